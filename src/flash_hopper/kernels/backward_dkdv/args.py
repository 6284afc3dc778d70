"""Bundles of the key-parallel backward kernel."""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Float32, Int32, cute
from flash_hopper.device.schedulers.mailbox import TileMailbox
from flash_hopper.device.schedulers.source import Work
from flash_hopper.geometry.masks import MaskBounds


class DkdvArgs(NamedTuple):
    """Kernel parameters that change from call to call. TMA's views of a ragged batch have one more mode, see
    `device/sequences.py`; statistics and accumulators have padded rows then, of a batch of one."""

    mQ: cute.Tensor  # (seqlen_q, head_dim, heads, batch)
    mK: cute.Tensor  # (seqlen_k, head_dim, heads_k, batch)
    mV: cute.Tensor  # (seqlen_k, head_dim_v, heads_k, batch)
    mdO: cute.Tensor  # (seqlen_q, head_dim_v, heads, batch)
    mdK: cute.Tensor  # (seqlen_k, head_dim, heads_k, batch), float32 if added to, or like mAccumulator over heads_k
    mdV: cute.Tensor  # (seqlen_k, head_dim_v, heads_k, batch), likewise
    mStatistics: cute.Tensor  # (rows, heads, batch, 2) float32: LSE in base 2, D
    mAccumulator: cute.Tensor | None  # (4096, batch, heads, piece) float32, if dQ is added up
    left: Int32 | None  # bounds of the mask, for windows and chunks only
    right: Int32 | None
    chunk: Int32 | None
    scale: Float32
    scale_log2: Float32
    work: Work

    def mask(self, kind: str) -> MaskBounds:
        """The mask, of the plan's kind."""
        return MaskBounds(kind) if self.left is None else MaskBounds(kind, self.left, self.right, self.chunk)


class DkdvAtoms(NamedTuple):
    """TMA copies and MMAs, made on the host. All MMAs are one warpgroup's, 64 keys."""

    tma_q: cute.CopyAtom
    tma_do: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_statistics: cute.CopyAtom
    tma_dk: cute.CopyAtom | None  # None if dK and dV are added in memory
    tma_dv: cute.CopyAtom | None
    mma_s: cute.TiledMma  # 64 x tile_m: K Q^T, both from shared memory
    mma_dp: cute.TiledMma  # the same shape: V dO^T, V from registers if plan.v_in_registers
    mma_dk: cute.TiledMma  # 64 x tile_hdim: dS^T Q, dS^T from registers
    mma_dv: cute.TiledMma  # 64 x tile_hdimv: P^T dO, P^T from registers
    mma_dq: cute.TiledMma  # 64 x 64: dS K, both from shared memory


class SharedTensors(NamedTuple):
    """The buffers of `storage.py`."""

    sQ: cute.Tensor  # (tile_m, tile_hdim, stage)
    sdO: cute.Tensor  # (tile_m, tile_hdimv, stage)
    sK: cute.Tensor  # (64, tile_hdim, band of keys)
    sV: cute.Tensor  # (64, tile_hdimv, band of keys)
    sLSE: cute.Tensor  # (tile_m, stage) float32, base 2
    sDelta: cute.Tensor  # (tile_m, stage) float32
    sP: cute.Tensor | None  # (4, tile_m / 8, 128) float32: P^T by thread, split roles only
    sdS: cute.Tensor | None  # (tile_n, tile_m, 2): dS^T, if dQ is added up
    sdK: cute.Tensor  # (64, tile_hdim, band of keys): dK on its way out
    sdV: cute.Tensor  # (64, tile_hdimv, band of keys): dV on its way out
    sdQ: cute.Tensor | None  # (4, 8, 128, warpgroup) float32: dQ by thread, if dQ is added up


class Pipelines(NamedTuple):
    """See the table in `kernel.py`."""

    keys: Any
    q: Any
    do: Any
    tiles: TileMailbox
    p: Any | None  # split roles only


class Resources(NamedTuple):
    """What every role of a CTA works with."""

    args: DkdvArgs
    atoms: DkdvAtoms
    shared: SharedTensors
    pipes: Pipelines


class Cursors(NamedTuple):
    """Positions in the pipelines of Q and dO, kept over tiles."""

    q: Any
    do: Any

    def ahead(self) -> "Cursors":
        """The positions one block on."""
        q, do = self.q.clone(), self.do.clone()
        q.advance()
        do.advance()
        return Cursors(q, do)
