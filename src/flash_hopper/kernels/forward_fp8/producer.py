"""The producer warp of the e4m3 kernel: as that of the 16-bit kernel, but for where a transposed V lies."""

from typing import Any

from flash_hopper.device.dsl import Int32, const_expr, cute
from flash_hopper.kernels.forward.producer import Producer
from flash_hopper.kernels.forward_fp8.args import Fp8Args


class Fp8Producer(Producer):
    """One warp. `plan` is a `ForwardFp8Plan`."""

    def value_blocks(self, args: Fp8Args, tile: Any, head_k: Int32) -> cute.Tensor:  # type: ignore[override]
        """V^T of the tile's sequence and key head: (tile_hdimv, tile_n, key block)."""
        plan = self.plan
        if const_expr(plan.is_ragged):
            mV = args.mV[None, None, head_k, tile.batch * args.values.entry]
            mV = cute.domain_offset((0, self.batch.padded_key(tile) * args.values.packed), mV)
        else:
            mV = args.mV[None, None, head_k, tile.batch]
        return cute.local_tile(mV, (plan.tile_hdimv, plan.tile_n), (0, None))
