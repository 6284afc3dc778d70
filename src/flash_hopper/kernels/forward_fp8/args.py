"""Bundles that travel through the e4m3 forward kernel; `kernels/forward/args.py` has those that it shares."""

from typing import NamedTuple

from flash_hopper.device.descales import DescaleArgs
from flash_hopper.device.dsl import Float32, Int32, cute
from flash_hopper.device.schedulers.source import Work
from flash_hopper.geometry.masks import MaskBounds


class ValuePlaces(NamedTuple):
    """Where a ragged batch's transposed values lie: 1 in `entry` if each sequence is an entry of a batch, 1 in `packed` if they
    share one, where each starts a new block."""

    entry: Int32
    packed: Int32


class Fp8Args(NamedTuple):
    """Kernel parameters that change from call to call: those of `ForwardArgs`, and what makes codes numbers.

    mV: (head_dim_v, keys, heads_k, batch) if V comes transposed.
    """

    mQ: cute.Tensor
    mK: cute.Tensor
    mV: cute.Tensor
    mO: cute.Tensor
    mLSE: cute.Tensor | None
    scale_log2: Float32  # of real scores, not negative, times log2(e)
    descales: DescaleArgs
    values: ValuePlaces | None
    left: Int32 | None
    right: Int32 | None
    chunk: Int32 | None
    work: Work

    def mask(self, kind: str) -> MaskBounds:
        """The mask, of the plan's kind."""
        return MaskBounds(kind) if self.left is None else MaskBounds(kind, self.left, self.right, self.chunk)


class Fp8Atoms(NamedTuple):
    """TMA copies and MMAs, made on the host."""

    tma_q: cute.CopyAtom
    tma_k: cute.CopyAtom
    tma_v: cute.CopyAtom
    tma_o: cute.CopyAtom
    mma_qk: cute.TiledMma  # one warpgroup: 64 x tile_n, both operands from shared memory
    mma_pv: cute.TiledMma  # one warpgroup: 64 x tile_hdimv, the layout of O
    mma_part: cute.TiledMma  # one warpgroup: 64 x a piece of V's rows in shared memory, P from registers
    mma_sums: cute.TiledMma  # one warpgroup: 64 x SUM_COLUMNS, P from registers
