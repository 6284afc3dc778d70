"""Writes the table of a ragged batch (`plan/schedule.py`): lengths and offsets of each sequence, and the order of computation.

One CTA, a thread a sequence. Whatever combination of cu_seqlens and seqused a call has, the other kernels see only the table.
Values that make no sense are cut so that no kernel leaves its tensors. The order is longest first, up to steps of at most an
eighth: a counting sort by the logarithm of queries + keys, in no fixed order within a step, on which no result depends.
"""

from flash_hopper.device.dsl import Int32, SmemAllocator, cuda, cute, cutlass
from flash_hopper.device.lengths import sequence_row
from flash_hopper.device.sequences import (
    LengthArgs,
    table_order,
    table_ranked_row,
    table_row,
    table_sequences,
)
from flash_hopper.device.warp_sum import inclusive_sum
from flash_hopper.plan.roles import WARP
from flash_hopper.plan.schedule import HEADER

THREADS = 1024
STEPS = 8  # buckets a power of two
BUCKETS = 256


class ScheduleKernel:
    """Launched by the first kernel of a call, in front of it: see `launch`."""

    def launch(self, table: cute.Tensor, lengths: LengthArgs, stream: cuda.CUstream) -> None:
        """Called within the host code of another kernel, which reads the table (`table_ints(sequences)`,) that this one
        writes."""
        self.kernel(lengths, table).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, lengths: LengthArgs, table: cute.Tensor):
        """Rows of the table, with a histogram of their lengths; its prefix sums; the rows in order."""
        thread, _, _ = cute.arch.thread_idx()
        memory = SmemAllocator()
        places = memory.allocate_tensor(Int32, cute.make_layout(BUCKETS), 16)
        sums = memory.allocate_tensor(Int32, cute.make_layout(BUCKETS // WARP), 16)
        count = table_sequences(table)
        if thread < BUCKETS:
            places[thread] = Int32(0)
        cute.arch.barrier()
        cute.arch.griddepcontrol_wait()  # lengths are written, and nobody reads the table's memory any more
        if thread < HEADER:
            table[thread] = Int32(0)
        for i in cutlass.range(thread, count, THREADS, unroll=1):
            values = sequence_row(lengths, i, count - 1)
            self.write_row(table_row(table, i), values)
            self.count_in(places, values)
        cute.arch.barrier()
        self.exclusive_sum(places, sums, thread)
        for i in cutlass.range(thread, count, THREADS, unroll=1):
            values = sequence_row(lengths, i, count - 1)
            place = self.count_in(places, values)
            self.write_row(table_ranked_row(table, place), values)
            table_order(table)[place] = i
        cute.arch.griddepcontrol_launch_dependents()

    def write_row(self, row: cute.Tensor, values: tuple[Int32, ...]) -> None:
        """A row of the table."""
        for column, value in enumerate(values):
            row[column] = value

    @cute.jit
    def count_in(self, places: cute.Tensor, values: tuple[Int32, ...]) -> Int32:
        """Count a sequence in the bucket of its length; what was counted there before."""
        bucket = self.bucket(values[0] + values[1])
        return cute.arch.atomic_add(places.iterator + bucket, Int32(1), sem="relaxed", scope="cta")

    @cute.jit
    def bucket(self, length: Int32) -> Int32:
        """The longer, the lower: 8 steps a power of two of queries + keys."""
        result = Int32(BUCKETS - 1)
        if length > 0:
            power = 31 - Int32(cute.arch.clz(length))
            step = (length << 3 >> power) & (STEPS - 1) if power < 28 else (length >> (power - 3)) & (STEPS - 1)
            result = BUCKETS - 1 - (power * STEPS + step)
        return result

    @cute.jit
    def exclusive_sum(self, values: cute.Tensor, sums: cute.Tensor, thread: Int32) -> None:
        """Each of the `BUCKETS` values becomes the sum of those before it; `sums` has room for one a warp of them. All threads."""
        own, prefix = Int32(0), Int32(0)
        warp, lane = thread // WARP, thread % WARP
        if warp < BUCKETS // WARP:
            own = values[thread]
            prefix = inclusive_sum(own, lane)
            if lane == WARP - 1:
                sums[warp] = prefix
        cute.arch.barrier()
        if warp < BUCKETS // WARP:
            for lower in cutlass.range_constexpr(BUCKETS // WARP):
                if lower < warp:
                    prefix = prefix + sums[lower]
            values[thread] = prefix - own
        cute.arch.barrier()
