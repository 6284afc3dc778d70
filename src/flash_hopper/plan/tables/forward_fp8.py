"""Tiles of the e4m3 forward: rows and keys per step, and how the second product is summed up, by head dims, mask and length.

A row is data, as in `tables/forward.py`. Keys per step are 128 throughout: a block of descales, and one row of the widest
swizzle for a transposed V. No warpgroups take turns at issuing products: that costs up to a fifth (docs/findings/fp8.md).
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from flash_hopper.geometry.arith import round_up
from flash_hopper.problem.mask import MaskKind

TILE_N = 128


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """m query rows, 64 per consumer warpgroup.

    `overlaps`: a warpgroup's QK of the next block runs beside its PV of this one; otherwise the sums of PV take the registers
    of the scores, and only other warpgroups' softmax runs beside products. `pieces`: into so many equal parts, two of which are in
    flight, PV of a block is cut along the head dim; not with `overlaps`. `weights_ahead`: sixteenths of a block's weights that are computed, as the
    source has it, before the PV beside it is waited for; only with `overlaps`. What ptxas makes of it is what counts: 0 to 5 %.
    """

    m: int
    overlaps: bool
    pieces: int = 1
    kv_stages: int = 2
    weights_ahead: int = 0


@dataclass(frozen=True, slots=True)
class Fp8Row:
    """Serves head dims up to `hdim` and `hdimv`.

    `tile` serves what no other does; `full` lean calls (`Fp8Demand`) of dense batches without a mask, where it
    pads hardly more query rows than `causal`;
    `causal` everything else up to `causal_to` rows: masks, where the masked part of the diagonal weighs more, and ragged batches.
    `why` is the basis.
    """

    hdim: int
    hdimv: int
    tile: Fp8Tile
    full: Fp8Tile | None
    causal: Fp8Tile | None
    causal_to: int
    why: str


SHORT_TILE_GAIN = 1.04  # as in `tables/forward.py`
# Beside this much of O and a second sum no register is left for a ragged batch with descales of blocks: there the sums of PV take the
# place of the scores. With such descales a dense batch is 1 to 2 % slower with weights ahead (H200, 2026-12).
TIGHT_HDIMV = 128
OVERLAP = Fp8Tile(128, overlaps=True)

ROWS = (
    Fp8Row(64, 64, Fp8Tile(192, overlaps=False, kv_stages=3), Fp8Tile(256, overlaps=False, kv_stages=4),
        Fp8Tile(128, overlaps=True, kv_stages=3, weights_ahead=4), 8192,
        "H200, 2026-11, TFLOP/s at 1k, 4k and 16k: full 256 602 675 708, 192 482 568 627, overlapping 128 571 598 628; causal 192 "
        "390 572 650, overlapping 128 419 564 612; for masks, a log-sum-exp or float16 256 rows lack registers; "
        "stages, and weights ahead: 2026-12, docs/findings/fp8.md"),
    Fp8Row(256, 96, OVERLAP, None, None, 0, "registers: 64 S, 52 T, 16 P, 50 O of 232"),
    Fp8Row(256, 128, Fp8Tile(128, overlaps=True, weights_ahead=6), Fp8Tile(128, overlaps=True, weights_ahead=3), None, 0,
        "H200, 2026-11, TFLOP/s at 1k, 4k and 16k: full 827 979 1029, sums in place of scores 611 643 646; causal 656 950 1070 and "
        "529 657 700. Registers: 64 S, 68 T, 16 P, 66 O of 240; weights ahead: 2026-12, docs/findings/fp8.md"),
    Fp8Row(256, 160, Fp8Tile(128, overlaps=False, pieces=2), None, None, 0,
        "registers: 64 S or two times 40 T, 16 P, 80 O of 232"),
    Fp8Row(256, 192, Fp8Tile(128, overlaps=False, pieces=3), None, None, 0,
        "registers: 64 S or two times 32 T, 16 P, 96 O of 232"),
    Fp8Row(256, 256, Fp8Tile(128, overlaps=False, pieces=4), None, None, 0,
        "registers: 64 S or two times 32 T, 16 P, 128 O of 232; H200, 2026-11: full 894 1149 1222 TFLOP/s, with turns 795 959 1003"),
)  # fmt: skip

PLAIN = OVERLAP  # sums in the tensor core: O is the accumulator


class Fp8Demand(NamedTuple):
    """What a tile must serve, and have registers for.

    seqlen_q: or the reach of a window if that is less. has_units: values have descales of blocks. is_lean: bfloat16 without a
    log-sum-exp, of scores that are not negated.
    """

    mask: MaskKind
    seqlen_q: int
    is_ragged: bool
    has_units: bool
    is_lean: bool


def choose_fp8_tile(hdim: int, hdimv: int, demand: Fp8Demand) -> Fp8Tile:
    """The tile for padded head dims."""
    mask, seqlen_q, is_ragged, has_units, is_lean = demand
    row = next(r for r in ROWS if hdim <= r.hdim and hdimv <= r.hdimv)
    tile = row.causal if row.causal is not None and seqlen_q <= row.causal_to else row.tile
    if row.full is not None and mask == "full" and is_lean and not is_ragged:
        short = row.causal or row.tile
        tile = row.full if _pads_little(seqlen_q, row.full.m, short.m) else short
    if hdimv == TIGHT_HDIMV and has_units:
        tile = replace(tile, overlaps=tile.overlaps and not is_ragged, weights_ahead=0)
    return tile


def _pads_little(rows: int, m: int, short: int) -> bool:
    """True if tiles of m rows leave hardly more rows empty than those of `short`."""
    return bool(round_up(rows, m) <= SHORT_TILE_GAIN * round_up(rows, short))
