"""From the sums of the e4m3 kernel to global memory: as the 16-bit kernel's epilogue, but for factors and row sums."""

from typing import Any

from flash_hopper.device.barriers import epilogue_sync
from flash_hopper.device.dsl import Float32, Int32, const_expr, cute, cutlass
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.softmax import quad_reduce, scale_rows
from flash_hopper.device.softmax_e4m3 import E4m3State
from flash_hopper.geometry.fp8 import REFERENCE_LOG2
from flash_hopper.kernels.forward.epilogue import LN2, Epilogue
from flash_hopper.kernels.forward_fp8.args import Fp8Args


class Fp8Epilogue(Epilogue):
    """Called by one consumer warpgroup at the end of each tile; `plan` is a `ForwardFp8Plan`."""

    @cute.jit
    def normalise(self, state: E4m3State, value: Float32, tile: Any, first_row: Int32) -> None:
        """Finish the row sums and leave O's factors in `state.rescale`: 0 for a row without keys, and for one that is allocated
        but not used. value: V's descale, in which O is counted."""
        for r in cutlass.range_constexpr(2):
            total = state.row_sum[r]
            if const_expr(not self.plan.has_sum_columns):
                total = quad_reduce(total, lambda x, y: x + y)
            if const_expr(self.plan.is_ragged):
                total = cutlass.select_(first_row + 8 * r < tile.seqlen_q, total, Float32(0.0))
            state.row_sum[r] = total
            state.rescale[r] = cutlass.select_(total == 0.0, Float32(0.0), cute.arch.rcp_approx(total) * value)

    @cute.jit
    def scale(self, acc_o: cute.Tensor, state: E4m3State) -> None:  # type: ignore[override]
        """Multiply the rows of O by their factors; where that is 0, O is 0, too, whatever it was.

        Of a sequence without keys nobody wrote V^T, and what lies there instead may be NaN.
        """
        if const_expr(self.plan.is_ragged):
            rows = acc_as_rows(acc_o)
            for r in cutlass.range_constexpr(2):
                is_void = state.rescale[r] == 0.0
                for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                    rows[r, i] = cutlass.select_(is_void, Float32(0.0), rows[r, i] * state.rescale[r])
        else:
            scale_rows(acc_as_rows(acc_o), state.rescale)

    @cute.jit
    def await_buffer(self, warpgroup: Int32, thread: Int32) -> None:
        """Until the store of the tile before has read the buffer of O."""
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            self.wait_stored()
        epilogue_sync(warpgroup)

    @cute.jit
    def store_lse(  # type: ignore[override]
        self, args: Fp8Args, state: E4m3State, tile: Any, head: Int32, first_row: Int32, lane: Int32
    ) -> None:
        """LSE = ln 2 (reference + log2(sum) - REFERENCE_LOG2), natural log; -inf for a row without keys. One lane a row writes."""
        batch = self.batch
        mLSE = args.mLSE[batch.entry(tile, args.mLSE.shape[0]), head, None]
        rows, start = batch.stored_rows(tile, args.mQ), batch.query_row(tile)
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            total = state.row_sum[r]
            lse = (state.reference[r] + cute.math.log2(total, fastmath=True) - REFERENCE_LOG2) * LN2
            if lane % 4 == 0 and row < rows:
                mLSE[start + row] = cutlass.select_(total == 0.0, -Float32.inf, lse)
