"""Preprocess of the backward: per query row D = rowsum(dO o O) - dLSE, and LSE * log2(e) (specification 7.3.1).

Bound by memory: each row of dO and O is read once, in 16-byte pieces. Rows past seqlen_q, and rows that saw no key, get
LSE = +inf, so that every later exp2(S - LSE) is 0 there, and D = 0.

Of a ragged batch the statistics are those of padded rows, where each sequence starts a new block of the key-parallel kernel.
"""

import math
from typing import Any, NamedTuple

from flash_hopper.device import placeholders
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Boolean,
    Float32,
    Int32,
    const_expr,
    cuda,
    cute,
    cutlass,
    make_fake_tensor,
)
from flash_hopper.device.sequences import RaggedArgs, make_batch, sequence_of_row, table_row, table_sequences
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.kernels.schedule.kernel import ScheduleKernel
from flash_hopper.plan.backward import PreprocessPlan
from flash_hopper.plan.schedule import COLUMNS

THREADS = 128
VECTOR = 8  # elements of 16 bit in 16 bytes
CLEARED_MULTIPLE = 64  # values of the accumulator come in multiples of this
ROWS_PER_THREAD = 4  # so that 8 to 16 loads a thread are in flight
LOG2_E = math.log2(math.e)


class RowPlace(NamedTuple):
    """Where a row of the statistics comes from: `row` of a batch entry, if it is one that is used."""

    entry: Int32
    row: Int32
    is_used: Boolean


class PreprocessKernel:
    """One CTA handles `ROWS_PER_THREAD * THREADS / threads_per_row` rows of one head."""

    def __init__(self, plan: PreprocessPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.schedule = ScheduleKernel()
        self.rows_per_pass = THREADS // plan.threads_per_row
        self.rows_per_cta = self.rows_per_pass * ROWS_PER_THREAD

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        dout: cute.Tensor,
        lse: cute.Tensor,
        dlse: cute.Tensor | None,
        statistics: cute.Tensor,
        accumulator: cute.Tensor | None,
        ragged: RaggedArgs | None,
        stream: cuda.CUstream,
    ):
        """out, dout: (batch, seqlen_q, heads, head_dim_v); lse, dlse: (batch, heads, seqlen_q) float32; statistics:
        (2, batch, heads, rows) float32, rows >= seqlen_q: LSE in base 2, then D; accumulator: (batch, heads,
        rows * plan.cleared_hdim) float32. Of a ragged batch out, dout, lse and dlse are without the batch; `ragged` then says how
        it lies, with four entries and the lengths, from which a kernel in front of this one makes the table; statistics and
        accumulator are of a batch of one and of padded rows."""
        table = self.batch.table(ragged)
        if const_expr(self.plan.is_ragged):
            self.schedule.launch(table, ragged.lengths, stream)
        out, dout, lse, dlse = self.batch.entries((out, dout, lse, dlse), ragged)
        row_blocks = ceil_div(statistics.shape[3], self.rows_per_cta)
        self.kernel(out, dout, lse, dlse, statistics, accumulator, table, row_blocks).launch(
            grid=[row_blocks * out.shape[2] * statistics.shape[1], 1, 1],
            block=[THREADS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mO: cute.Tensor,
        mdO: cute.Tensor,
        mLSE: cute.Tensor,
        mdLSE: cute.Tensor | None,
        mStatistics: cute.Tensor,
        mAccumulator: cute.Tensor | None,
        table: cute.Tensor | None,
        row_blocks: Int32,
    ):
        """A CTA's rows; `threads_per_row` threads share a row."""
        per_row = self.plan.threads_per_row
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        pair = block // row_blocks
        head, batch = pair % mO.shape[2], pair // mO.shape[2]
        first = (block - pair * row_blocks) * self.rows_per_cta + thread // per_row
        piece = thread % per_row
        cute.arch.griddepcontrol_wait()  # dO may come from the kernel before; earlier readers of the memory are done
        if const_expr(mAccumulator is not None):
            self.clear(mAccumulator[batch, head, None], block - pair * row_blocks, thread)
        sequence = Int32(0)
        if const_expr(table is not None):
            sequence = sequence_of_row(table, "padded_q", first)
        for i in cutlass.range_constexpr(ROWS_PER_THREAD):
            row = first + i * self.rows_per_pass
            at = RowPlace(batch, row, row < mO.shape[1])
            if const_expr(table is not None):
                sequence = self.advance(table, sequence, row)
                at = self.ragged_place(table, sequence, row)
            total = self.row_sum(mO, mdO, at, head, piece)
            if piece == 0 and row < mStatistics.shape[3]:
                lse, delta = Float32.inf, Float32(0.0)
                if at.is_used:
                    value = mLSE[at.entry, head, at.row]
                    delta = total
                    if const_expr(mdLSE is not None):
                        delta = delta - mdLSE[at.entry, head, at.row]
                    if value != -Float32.inf:
                        lse = value * LOG2_E
                    else:
                        delta = Float32(0.0)
                mStatistics[0, batch, head, row] = lse
                mStatistics[1, batch, head, row] = delta
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def clear(self, gAccumulator: cute.Tensor, row_block: Int32, thread: Int32) -> None:
        """Zero this CTA's rows of the accumulator, 16 bytes a store."""
        zeros = cute.make_rmem_tensor(4, Float32)
        zeros.fill(0.0)
        stores = self.rows_per_cta * self.plan.cleared_hdim // (4 * THREADS)
        for i in cutlass.range_constexpr(stores):
            piece = (row_block * stores + i) * THREADS + thread
            if piece * 4 < gAccumulator.shape[0]:
                cute.autovec_copy(zeros, cute.local_tile(gAccumulator, (4,), (piece,)))

    @cute.jit
    def advance(self, table: cute.Tensor, sequence: Int32, row: Int32) -> Int32:
        """The sequence of a row one pass after one of `sequence`: each has at least as many padded rows as a pass."""
        if sequence + 1 < table_sequences(table):
            if table_row(table, sequence + 1)[COLUMNS.index("padded_q")] <= row:
                sequence = sequence + 1
        return sequence

    def ragged_place(self, table: cute.Tensor, sequence: Int32, row: Int32) -> RowPlace:
        """Where a padded row of `sequence` comes from."""
        found = table_row(table, sequence)
        seqlen, start, padded = (found[COLUMNS.index(name)] for name in ("seqlen_q", "row_q", "padded_q"))
        return RowPlace(sequence, start + row - padded, row - padded < seqlen)

    @cute.jit
    def row_sum(self, mO: cute.Tensor, mdO: cute.Tensor, at: RowPlace, head: Int32, piece: Int32) -> Float32:
        """rowsum(dO o O), in every thread of the row."""
        per_row = self.plan.threads_per_row
        total = Float32(0.0)
        if at.is_used:
            gO, gdO = mO[at.entry, at.row, head, None], mdO[at.entry, at.row, head, None]
            for start in cutlass.range_constexpr(0, 256 if per_row > 8 else 64, per_row * VECTOR):
                chunk = piece + start // VECTOR
                if chunk * VECTOR < mO.shape[3]:
                    o = cute.local_tile(gO, (VECTOR,), (chunk,)).load().to(Float32)
                    do = cute.local_tile(gdO, (VECTOR,), (chunk,)).load().to(Float32)
                    total = total + (o * do).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        return cute.arch.warp_reduction(total, lambda a, b: a + b, threads_in_group=per_row)


def placeholder_arguments(plan: PreprocessPlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    dtype = ELEMENT_TYPES[plan.dtype]
    padded_batch, seqlen_q, heads = (placeholders.size() for _ in range(3))
    batch = () if plan.is_ragged else (padded_batch,)
    hdimv = placeholders.head_dim_size()

    def per_row() -> Any:
        shape = (*batch, heads, seqlen_q)
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    return (
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdimv),
        placeholders.heads_tensor(dtype, *batch, seqlen_q, heads, hdimv),
        per_row(),
        per_row() if plan.has_dlse else None,
        placeholders.statistics(padded_batch, heads),
        placeholders.accumulator(padded_batch, heads, CLEARED_MULTIPLE) if plan.cleared_hdim else None,
        placeholders.ragged(tensors=4, is_first=True) if plan.is_ragged else None,
        placeholders.stream(),
    )
