"""From accumulator to global memory: one warpgroup's 64 rows of O, and its LSE.

Registers -> shared memory (stmatrix) -> TMA store, which clips rows past the sequence and columns past head_dim_v.
"""

from typing import Any

from flash_hopper.device.barriers import epilogue_sync
from flash_hopper.device.dsl import ELEMENT_TYPES, Float32, Int32, const_expr, cute, cutlass, warp
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.pipelines import partition
from flash_hopper.device.sequences import make_batch
from flash_hopper.device.softmax import SoftmaxState, quad_reduce, scale_rows
from flash_hopper.kernels.forward.args import ForwardArgs, ForwardAtoms
from flash_hopper.kernels.forward.storage import WG_ROWS
from flash_hopper.plan.forward import ForwardPlan

LN2 = 0.6931471805599453


class Epilogue:
    """Called by one consumer warpgroup at the end of each tile; thread is the index within the warpgroup."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)

    @cute.jit
    def begin(self, softmax: SoftmaxState, tile: Any, first_row: Int32, warpgroup: Int32, thread: Int32) -> None:
        """What need not wait for the last PV: finish the row sums (deferred reduction) and their reciprocals, and free the
        buffer of O. A row without keys, and one that is allocated but not used, gets a factor of 0.

        Leaves the full sums in `softmax.row_sum` and the factors in `softmax.rescale`.
        """
        for r in cutlass.range_constexpr(2):
            total = quad_reduce(softmax.row_sum[r], lambda x, y: x + y)
            if const_expr(self.plan.is_ragged):
                total = cutlass.select_(first_row + 8 * r < tile.seqlen_q, total, Float32(0.0))
            softmax.row_sum[r] = total
            softmax.rescale[r] = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total))
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            self.wait_stored()  # the store of the tile before still reads the buffer
        epilogue_sync(warpgroup)  # ... and nobody writes it until that store is done

    @cute.jit
    def store_lse(
        self, args: ForwardArgs, softmax: SoftmaxState, tile: Any, head: Int32, first_row: Int32, lane: Int32
    ) -> None:
        """LSE = scale * reference + ln(sum), natural log; -inf for a row without keys. One lane a row writes."""
        batch = self.batch
        mLSE = args.mLSE[batch.entry(tile, args.mLSE.shape[0]), head, None]
        rows, start = batch.stored_rows(tile, args.mQ), batch.query_row(tile)
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            total = softmax.row_sum[r]
            lse = softmax.row_max[r] * args.scale + cute.math.log2(total, fastmath=True) * LN2
            if lane % 4 == 0 and row < rows:
                mLSE[start + row] = cutlass.select_(total == 0.0, -Float32.inf, lse)

    @cute.jit
    def scale(self, acc_o: cute.Tensor, softmax: SoftmaxState) -> None:
        """Multiply the rows of O by their factors."""
        scale_rows(acc_as_rows(acc_o), softmax.rescale)

    @cute.jit
    def store_o(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        sO: cute.Tensor,
        acc_o: cute.Tensor,
        softmax: SoftmaxState,
        tile: Any,
        head: Int32,
        band: Int32,
        warpgroup: Int32,
        thread: Int32,
    ) -> None:
        """Normalise O, stage it in sO, (64, tile_hdimv), and start its store to this band of the head's rows; `wait_stored` says
        when the buffer may be written again. After `begin`."""
        self.scale(acc_o, softmax)
        dtype = ELEMENT_TYPES[self.plan.out_dtype]
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        r2s = cute.make_tiled_copy_C(store_matrix, atoms.mma_pv).get_slice(thread)
        rO = cute.make_rmem_tensor_like(acc_o, dtype)
        rO.store(acc_o.load().to(dtype))
        is_first_warp = cute.arch.make_warp_uniform(thread // 32) == 0
        cute.copy(r2s, r2s.retile(rO), r2s.partition_D(sO))
        cute.arch.fence_proxy("async.shared", space="cta")  # these writes, before the TMA store reads them
        epilogue_sync(warpgroup)  # ... from all threads of the warpgroup
        if is_first_warp:
            mO = self.batch.stored_queries(args.mO, tile, head)
            gO = cute.local_tile(mO, (WG_ROWS, self.plan.tile_hdimv), (band, 0))
            dst, src = partition(atoms.tma_o, gO, sO)
            with cute.arch.elect_one():
                cute.copy(atoms.tma_o, src, dst)
                cute.arch.cp_async_bulk_commit_group()

    def wait_stored(self) -> None:
        """First warp of a warpgroup: until its TMA stores have read their buffer. Bulk groups belong to the thread."""
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0, read=True)
