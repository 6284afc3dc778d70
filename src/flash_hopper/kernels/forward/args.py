"""Bundles that travel through the forward kernel: what the roles receive.

Names follow STYLE section 5: `m` whole tensors in global memory, `s` shared memory. TMA views (`mQ`, ...) hold
coordinates, not data.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Float32, Int32, cute
from flash_hopper.device.schedulers.mailbox import TileMailbox
from flash_hopper.device.schedulers.source import Work
from flash_hopper.geometry.masks import MaskBounds


class ForwardArgs(NamedTuple):
    """Kernel parameters that change from call to call. The views of a ragged batch have one more mode, see
    `device/sequences.py`."""

    mQ: cute.Tensor  # (seqlen_q, head_dim, heads, batch)
    mK: cute.Tensor  # (seqlen_k, head_dim, heads_k, batch)
    mV: cute.Tensor  # (seqlen_k, head_dim_v, heads_k, batch)
    mO: cute.Tensor  # (seqlen_q, head_dim_v, heads, batch)
    mLSE: cute.Tensor | None  # (batch, heads, seqlen_q) float32
    scale: Float32  # of raw scores, not negative
    scale_log2: Float32  # the same times log2(e)
    left: Int32 | None  # bounds of the mask, for windows and chunks only
    right: Int32 | None
    chunk: Int32 | None
    work: Work

    def mask(self, kind: str) -> MaskBounds:
        """The mask, of the plan's kind."""
        return MaskBounds(kind) if self.left is None else MaskBounds(kind, self.left, self.right, self.chunk)


class ForwardAtoms(NamedTuple):
    """TMA copies and MMAs, made on the host."""

    tma_q: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_o: cute.CopyAtom
    mma_qk: cute.TiledMma  # one warpgroup: 64 x tile_n, both operands from shared memory
    mma_pv: cute.TiledMma  # one warpgroup: 64 x tile_hdimv, P from registers


class SharedTensors(NamedTuple):
    """The buffers of `storage.py`, of one stream."""

    sQ: cute.Tensor  # (64, tile_hdim, warpgroup + warpgroups * stage)
    sK: cute.Tensor  # (tile_n, tile_hdim, stage)
    sV: cute.Tensor  # (tile_n, tile_hdimv, stage)
    sO: cute.Tensor  # (64, tile_hdimv, warpgroup)


class Pipelines(NamedTuple):
    """Who fills and drains what: see the table in `kernel.py`."""

    q: Any
    k: Any
    v: Any
    tiles: TileMailbox
    o: Any | None = None  # plan.o_place "v" only
