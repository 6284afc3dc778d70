"""Postprocess of the backward: dQ = scale * accumulator, in the dtype of q (specification 7.3.2), or added in float32 to
what the caller gives; dK and dV likewise.

The accumulator holds, per query block, two pieces of 64 x 64 in the register order of the warpgroups that added them up
(`backward_dkdv/storage.py`), so each thread reads back what its counterpart held, 16 bytes at a time.
"""

from typing import Any

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
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.kernels.backward_dkdv.storage import SWIZZLE_ALIGN, dq_by_thread
from flash_hopper.plan.backward import DQ_PIECE, PostprocessPlan
from flash_hopper.plan.roles import WARPGROUP

PIECE = 64


class PostprocessKernel:
    """One CTA of two warpgroups per query block of a head; each converts one piece."""

    def __init__(self, plan: PostprocessPlan) -> None:
        self.plan = plan
        self.splits_rows = plan.tile_m > PIECE  # else the two pieces are the two halves of the columns

    @cute.jit
    def __call__(self, accumulator: cute.Tensor, dq: cute.Tensor, scale: Float32, stream: cuda.CUstream):
        """accumulator: (batch, heads, rows * plan.tile_hdim) float32; dq: (batch, seqlen_q, heads, head_dim), float32 if
        plan.accumulates."""
        mdQ = seqlen_major(dq)
        dtype = ELEMENT_TYPES[self.plan.dtype]
        layout = tile_layout(PIECE, PIECE, dtype)
        m_blocks, pairs = ceil_div(mdQ.shape[0], self.plan.tile_m), mdQ.shape[2] * mdQ.shape[3]
        tma_dq = None
        if const_expr(not self.plan.accumulates):
            tma_dq, mdQ = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mdQ, layout, (PIECE, PIECE))
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        mma = make_trivial_tiled_mma(dtype, dtype, k_major, mn_major, Float32, (1, 1, 1), (PIECE, PIECE))
        self.kernel(accumulator, mdQ, tma_dq, mma, scale, m_blocks).launch(
            grid=[m_blocks * pairs, 1, 1],
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
        mma: cute.TiledMma,
        scale: Float32,
        m_blocks: Int32,
    ):
        """One query block of one head."""
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        wg = cute.arch.make_warp_uniform(thread // WARPGROUP)
        pair = block // m_blocks
        m_block, head, batch = block - pair * m_blocks, pair % mdQ.shape[2], pair // mdQ.shape[2]
        cute.arch.griddepcontrol_wait()  # the accumulator is complete
        values = cute.local_tile(mAccumulator[batch, head, None], (2 * DQ_PIECE,), (m_block,))
        pieces = cute.composition(values, dq_by_thread())
        acc = cute.make_rmem_tensor(mma.partition_shape_C((PIECE, PIECE)), Float32)
        registers = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
        cute.autovec_copy(pieces[None, None, thread % WARPGROUP, wg], registers)
        row, col = (m_block * 2 + wg, 0) if self.splits_rows else (m_block, wg)  # of the piece
        gdQ = mdQ[None, None, head, batch]
        if const_expr(self.plan.accumulates):
            add_to_rows(acc, scale, gdQ, row * PIECE, Int32(col * PIECE), mdQ.shape[0], thread % WARPGROUP)
        else:
            self.store(acc, scale, mma, tma_dq, cute.local_tile(gdQ, (PIECE, PIECE), (row, col)), wg, thread)
        cute.arch.griddepcontrol_launch_dependents()

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
    shape = batch, placeholders.size(), heads, placeholders.head_dim_size()
    return (
        placeholders.accumulator(batch, heads, 2 * DQ_PIECE),
        summed_tensor(*shape) if plan.accumulates else placeholders.heads_tensor(ELEMENT_TYPES[plan.dtype], *shape),
        Float32(1.0),
        placeholders.stream(),
    )
