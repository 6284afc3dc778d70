"""Postprocess of the backward: dQ = scale * accumulator, in the dtype of q (specification 7.3.2), or added in float32 to
what the caller gives; dK and dV likewise.

The accumulator holds, per query block, two pieces of 64 x 64 in the register order of the warpgroups that added them up
(`backward_dkdv/storage.py`), so each thread reads back what its counterpart held, 16 bytes at a time.
"""

from typing import Any, NamedTuple

from flash_hopper.device import placeholders
from flash_hopper.device.accumulate import add_to_rows, summed_tensor
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Float32,
    Int32,
    OperandMajorMode,
    SmemAllocator,
    const_expr,
    cpasync,
    cuda,
    cute,
    make_trivial_tiled_mma,
    warp,
)
from flash_hopper.device.layouts import seqlen_major, stacked, tile_layout
from flash_hopper.device.pipelines import partition
from flash_hopper.device.probabilities import clear_rows
from flash_hopper.device.sequences import RaggedArgs, RaggedTile, make_batch, sequence_of_row, table_row
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.tiles import TileCoord
from flash_hopper.kernels.backward_dkdv.storage import SWIZZLE_ALIGN, dq_by_thread
from flash_hopper.plan.backward import DQ_PIECE, PostprocessPlan
from flash_hopper.plan.roles import WARPGROUP
from flash_hopper.plan.schedule import COLUMNS

PIECE = 64


class Side(NamedTuple):
    """Rows of a sequence in the gradient: where they start, how many are used, and how many are written."""

    row: Int32
    used: Int32
    stored: Int32


class PostprocessKernel:
    """One CTA of two warpgroups per query block of a head; each converts one piece."""

    def __init__(self, plan: PostprocessPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.splits_rows = plan.tile_m > PIECE  # else the two pieces are the two halves of the columns

    @cute.jit
    def __call__(
        self,
        accumulator: cute.Tensor,
        dq: cute.Tensor,
        ragged: RaggedArgs | None,
        scale: Float32,
        stream: cuda.CUstream,
    ):
        """accumulator: (batch, heads, rows * plan.tile_hdim) float32; dq: (batch, seqlen_q, heads, head_dim), float32 if
        plan.accumulates. Of a ragged batch dq is without the batch; `ragged` then says how it lies, with one entry; the
        accumulator is of a batch of one and of padded rows."""
        plan, batch = self.plan, self.batch
        table = batch.table(ragged)
        (dq,) = batch.entries((dq,), ragged)
        layout = tile_layout(PIECE, PIECE, ELEMENT_TYPES[plan.dtype])
        if const_expr(plan.is_ragged):
            blocks = accumulator.shape[2] // (2 * DQ_PIECE)
        else:
            blocks = ceil_div(dq.shape[1], plan.tile_m)
        if const_expr(plan.accumulates):
            tma_dq, mdQ = None, seqlen_major(dq)
        else:
            store = cpasync.CopyBulkTensorTileS2GOp()
            tma_dq, mdQ = cpasync.make_tiled_tma_atom(store, batch.view(dq), layout, (PIECE, PIECE))
            mdQ = batch.with_batch(mdQ, dq)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        dtype = ELEMENT_TYPES[plan.dtype]
        mma = make_trivial_tiled_mma(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (PIECE, PIECE))
        self.kernel(accumulator, mdQ, tma_dq, table, mma, scale, blocks).launch(
            grid=[blocks * dq.shape[2] * accumulator.shape[0], 1, 1],
            block=[2 * WARPGROUP, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mAccumulator: cute.Tensor,
        mdQ: cute.Tensor,
        tma_dq: cute.CopyAtom | None,
        table: cute.Tensor | None,
        mma: cute.TiledMma,
        scale: Float32,
        blocks: Int32,
    ):
        """One block of one head."""
        thread, _, _ = cute.arch.thread_idx()
        number, _, _ = cute.arch.block_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        pair = number // blocks
        block, head, entry = number - pair * blocks, pair % mdQ.shape[2], pair // mdQ.shape[2]
        cute.arch.griddepcontrol_wait()  # the accumulator is complete
        values = cute.local_tile(mAccumulator[entry, head, None], (2 * DQ_PIECE,), (block,))
        if const_expr(table is not None):
            tile = self.ragged_tile(table, block, head)
            if tile.block * self.plan.tile_m < self.sides(tile).stored:
                self.convert(values, mdQ, tma_dq, mma, scale, tile, wg, thread)
        else:
            self.convert(values, mdQ, tma_dq, mma, scale, TileCoord(block, head, entry), wg, thread)
        cute.arch.griddepcontrol_launch_dependents()

    def ragged_tile(self, table: cute.Tensor, block: Int32, head: Int32) -> RaggedTile:
        """The tile that a block of padded rows is."""
        column = f"padded_{self.plan.ragged_side}"
        row = block * self.plan.tile_m
        sequence = sequence_of_row(table, column, row)
        found = table_row(table, sequence)
        values = [found[i] for i in range(len(COLUMNS))]
        return RaggedTile((row - values[COLUMNS.index(column)]) // self.plan.tile_m, head, sequence, *values)

    def sides(self, tile: RaggedTile) -> Side:
        """What matters of a ragged tile's sequence here: of its queries, or of its keys."""
        if self.plan.ragged_side == "q":
            return Side(tile.row_q, tile.seqlen_q, tile.allocated_q)
        return Side(tile.row_k, tile.seqlen_k, tile.allocated_k)

    @cute.jit
    def convert(
        self, values: cute.Tensor, mdQ: cute.Tensor, tma_dq: cute.CopyAtom | None, mma: cute.TiledMma, scale: Float32,
        tile: Any, wg: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """Both warpgroups' pieces of a block, `values` (8192,), to dQ."""
        plan = self.plan
        pieces = cute.composition(values, dq_by_thread())
        acc = cute.make_rmem_tensor(mma.partition_shape_C((PIECE, PIECE)), Float32)
        registers = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
        cute.autovec_copy(pieces[None, None, thread % WARPGROUP, wg], registers)
        row, col = (tile.block * 2 + wg, 0) if self.splits_rows else (tile.block, wg)  # of the piece
        side = Side(0, mdQ.shape[0], mdQ.shape[0])
        if const_expr(plan.is_ragged):
            side = self.sides(tile)
        if const_expr(plan.accumulates):
            gdQ = mdQ[None, None, tile.head, self.batch.entry(tile, mdQ.shape[3])]
            first, end = side.row + row * PIECE, side.row + side.used
            add_to_rows(acc, scale, gdQ, first, Int32(col * PIECE), end, thread % WARPGROUP)
        else:
            if const_expr(plan.is_ragged):
                clear_rows(acc, side.used - row * PIECE - thread % WARPGROUP // 32 * 16 - thread % 32 // 4)
            stored = self.batch.stored_keys if plan.ragged_side == "k" else self.batch.stored_queries
            gdQ = cute.local_tile(stored(mdQ, tile, tile.head), (PIECE, PIECE), (row, col))
            self.store(acc, scale, mma, tma_dq, gdQ, wg, thread)

    @cute.jit
    def store(
        self, acc: cute.Tensor, scale: Float32, mma: cute.TiledMma, tma_dq: cute.CopyAtom, gdQ: cute.Tensor, wg: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """A warpgroup's piece in the dtype to `gdQ` (64, 64), through shared memory. All threads of the CTA."""
        dtype = ELEMENT_TYPES[self.plan.dtype]
        layout = tile_layout(PIECE, PIECE, dtype)
        staged = SmemAllocator().allocate_tensor(
            dtype, stacked(layout, 2, PIECE * PIECE), SWIZZLE_ALIGN, layout.inner
        )  # (64, 64, piece)
        rdQ = cute.make_rmem_tensor_like(acc, dtype)
        rdQ.store((acc.load() * scale).to(dtype))
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        r2s = cute.make_tiled_copy_C(store_matrix, mma).get_slice(thread % WARPGROUP)
        sdQ = staged[None, None, wg]
        cute.copy(r2s, r2s.retile(rdQ), r2s.partition_D(sdQ))
        cute.arch.fence_proxy("async.shared", space="cta")  # these writes, before the TMA store reads them
        cute.arch.barrier()
        if thread % WARPGROUP < 32:
            dst, src = partition(tma_dq, gdQ, sdQ)
            with cute.arch.elect_one():
                cute.copy(tma_dq, src, dst)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)


def placeholder_arguments(plan: PostprocessPlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    batch, heads = placeholders.size(), placeholders.size()
    shape = (*(() if plan.is_ragged else (batch,)), placeholders.size(), heads, placeholders.head_dim_size())
    return (
        placeholders.accumulator(batch, heads, 2 * DQ_PIECE),
        summed_tensor(*shape) if plan.accumulates else placeholders.heads_tensor(ELEMENT_TYPES[plan.dtype], *shape),
        placeholders.ragged(tensors=1) if plan.is_ragged else None,
        Float32(1.0),
        placeholders.stream(),
    )
