"""Writes the table of a ragged batch (`plan/schedule.py`): lengths and offsets of each sequence, and the order of computation.

One CTA, a thread a sequence. Whatever combination of cu_seqlens and seqused a call has, the other kernels see only the table.
Values that make no sense are cut so that no kernel leaves its tensors. The order is longest first, up to steps of at most an
eighth: a counting sort by the logarithm of queries + keys, in no fixed order within a step, on which no result depends.
"""

from typing import Any, NamedTuple

from flash_hopper.device import placeholders
from flash_hopper.device.dsl import Int32, SmemAllocator, cuda, cute, cutlass, make_fake_tensor
from flash_hopper.device.sequences import table_order, table_row, table_sequences
from flash_hopper.geometry.arith import clamp
from flash_hopper.plan.schedule import COLUMNS, HEADER, SchedulePlan

THREADS = 1024
STEPS = 8  # buckets a power of two
BUCKETS = 256


class Side(NamedTuple):
    """Queries or keys. `size`: rows of a padded entry, 0 if packed; `rows`: of the whole packed tensor, or `size`;
    `multiple`: what the first row of a sequence is rounded to in padded buffers."""

    cu_seqlens: cute.Tensor
    seqused: cute.Tensor
    has_cu_seqlens: Int32
    has_seqused: Int32
    size: Int32
    rows: Int32
    multiple: Int32


class Rows(NamedTuple):
    """Of one sequence: used, allocated, where they start, and where they start in padded buffers."""

    seqlen: Int32
    allocated: Int32
    first: Int32
    padded: Int32


class ScheduleKernel:
    """`plan` has no choices."""

    def __init__(self, plan: SchedulePlan) -> None:
        self.plan = plan

    @cute.jit
    def __call__(
        self,
        cu_seqlens_q: cute.Tensor,
        cu_seqlens_k: cute.Tensor,
        seqused_q: cute.Tensor,
        seqused_k: cute.Tensor,
        table: cute.Tensor,
        given: Int32,
        size_q: Int32,
        size_k: Int32,
        rows_q: Int32,
        rows_k: Int32,
        multiple_q: Int32,
        multiple_k: Int32,
        stream: cuda.CUstream,
    ):
        """cu_seqlens: (batch + 1,), seqused: (batch,), table: (`table_ints(batch)`,), all int32. `given` has bit 0 to 3 set
        for the four tensors that a call has; any tensor may stand for the others. Sizes, rows and multiples: see `Side`."""
        q = Side(cu_seqlens_q, seqused_q, given & 1, given & 4, size_q, rows_q, multiple_q)
        k = Side(cu_seqlens_k, seqused_k, given & 2, given & 8, size_k, rows_k, multiple_k)
        self.kernel(q, k, table).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, q: Side, k: Side, table: cute.Tensor):
        """Rows of the table, with a histogram of their lengths; its prefix sums; the order."""
        thread, _, _ = cute.arch.thread_idx()
        places = SmemAllocator().allocate_tensor(Int32, cute.make_layout(BUCKETS), 16)
        count = table_sequences(table)
        if thread < BUCKETS:
            places[thread] = Int32(0)
        cute.arch.barrier()
        cute.arch.griddepcontrol_wait()  # lengths are written, and nobody reads the table's memory any more
        if thread < HEADER:
            table[thread] = Int32(0)
        for i in cutlass.range(thread, count, THREADS, unroll=1):
            self.write_row(q, k, table, i, count - 1)
            cute.arch.atomic_add(places.iterator + self.bucket(table, i), Int32(1), sem="relaxed", scope="cta")
        cute.arch.barrier()
        self.exclusive_sum(places, thread)
        order = table_order(table)
        for i in cutlass.range(thread, count, THREADS, unroll=1):
            place = cute.arch.atomic_add(places.iterator + self.bucket(table, i), Int32(1), sem="relaxed", scope="cta")
            order[place] = i
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def write_row(self, q: Side, k: Side, table: cute.Tensor, i: Int32, batch: Int32) -> None:
        """Sequence i's row; number `batch` owns the rows behind the last sequence."""
        queries, keys = self.rows(q, i, batch), self.rows(k, i, batch)
        row = table_row(table, i)
        values = [value for pair in zip(queries, keys, strict=True) for value in pair]
        assert len(values) == len(COLUMNS)
        for column, value in enumerate(values):
            row[column] = value

    @cute.jit
    def rows(self, side: Side, i: Int32, batch: Int32) -> Rows:
        """One side of sequence i."""
        first, end, before = Int32(0), side.size, i * side.size
        if i == batch:
            end = Int32(0)
        if side.has_cu_seqlens != 0:
            first, end = side.cu_seqlens[i], side.rows
            if i < batch:
                end = side.cu_seqlens[i + 1]
            first = clamp(first, 0, side.rows)
            end = clamp(end, first, side.rows)
            before = first
        seqlen = end - first
        if side.has_seqused != 0 and i < batch:
            seqlen = clamp(side.seqused[i], 0, end - first)
        if i == batch:
            seqlen = Int32(0)
        padded = (before + i * side.multiple) // side.multiple * side.multiple
        return Rows(seqlen, end - first, first, padded)

    @cute.jit
    def bucket(self, table: cute.Tensor, i: Int32) -> Int32:
        """The longer, the lower: 8 steps a power of two of queries + keys."""
        row = table_row(table, i)
        length = row[0] + row[1]
        result = Int32(BUCKETS - 1)
        if length > 0:
            power = 31 - Int32(cute.arch.clz(length))
            step = (length << 3 >> power) & (STEPS - 1) if power < 28 else (length >> (power - 3)) & (STEPS - 1)
            result = BUCKETS - 1 - (power * STEPS + step)
        return result

    @cute.jit
    def exclusive_sum(self, values: cute.Tensor, thread: Int32) -> None:
        """Each of the `BUCKETS` values becomes the sum of those before it. All threads."""
        own = Int32(0)
        if thread < BUCKETS:
            own = values[thread]
        for log_step in cutlass.range_constexpr(8):
            step = 1 << log_step
            lower = Int32(0)
            if thread < BUCKETS and thread >= step:
                lower = values[thread - step]
            cute.arch.barrier()
            if thread < BUCKETS:
                values[thread] = values[thread] + lower
            cute.arch.barrier()
        if thread < BUCKETS:
            values[thread] = values[thread] - own
        cute.arch.barrier()


def placeholder_arguments(plan: SchedulePlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    lengths = tuple(make_fake_tensor(Int32, (placeholders.size(),), (1,), assumed_align=4) for _ in range(4))
    return (*lengths, placeholders.table(), *(Int32(1) for _ in range(7)), placeholders.stream())
