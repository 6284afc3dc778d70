"""Bundles of the query-parallel backward kernel."""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Float32, Int32, cute
from flash_hopper.device.schedulers.mailbox import TileMailbox
from flash_hopper.device.schedulers.source import Work
from flash_hopper.geometry.masks import MaskBounds


class DqArgs(NamedTuple):
    """Kernel parameters that change from call to call. TMA's views of a ragged batch have one more mode, see
    `device/sequences.py`."""

    mQ: cute.Tensor  # (seqlen_q, head_dim, heads, batch)
    mK: cute.Tensor  # (seqlen_k, head_dim, heads_k, batch)
    mV: cute.Tensor  # (seqlen_k, head_dim_v, heads_k, batch)
    mdO: cute.Tensor  # (seqlen_q, head_dim_v, heads, batch)
    mdQ: cute.Tensor  # (seqlen_q, head_dim, heads, batch), float32 if it is added to
    mStatistics: cute.Tensor  # (2, batch, heads, rows) float32: LSE in base 2, D; ragged: padded rows of a batch of one
    left: Int32 | None  # bounds of the mask, for windows and chunks only
    right: Int32 | None
    chunk: Int32 | None
    scale: Float32
    scale_log2: Float32
    work: Work

    def mask(self, kind: str) -> MaskBounds:
        """The mask, of the plan's kind."""
        return MaskBounds(kind) if self.left is None else MaskBounds(kind, self.left, self.right, self.chunk)


class DqAtoms(NamedTuple):
    """TMA copies and MMAs, made on the host."""

    tma_q: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_do: cute.CopyAtom
    tma_dq: cute.CopyAtom | None  # None if dQ is added to what is there
    mma_s: cute.TiledMma  # 64 x tile_n: Q K^T, both from shared memory
    mma_dp: cute.TiledMma  # 64 x tile_n: dO V^T, both from shared memory
    mma_dq: cute.TiledMma  # 64 x tile_hdim: dS K, dS from registers


class SharedTensors(NamedTuple):
    """The buffers of `storage.py`."""

    sQ: cute.Tensor  # (64, tile_hdim, warpgroup)
    sdO: cute.Tensor  # (64, tile_hdimv, warpgroup)
    sK: cute.Tensor  # (tile_n, tile_hdim, stage)
    sV: cute.Tensor  # (tile_n, tile_hdimv, stage)


class Pipelines(NamedTuple):
    """See the table in `kernel.py`."""

    rows: Any
    k: Any
    v: Any
    tiles: TileMailbox
