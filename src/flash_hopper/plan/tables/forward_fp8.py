"""Tiles of the e4m3 forward: rows and keys per step, and how the second product is summed up, by head dims and length.

A row is data, as in `tables/forward.py`. Keys per step are 128 throughout: a block of descales, and one row of the widest
swizzle for a transposed V.
"""

from dataclasses import dataclass, replace

from flash_hopper.geometry.arith import round_up

TILE_N = 128


@dataclass(frozen=True, slots=True)
class Fp8Tile:
    """m query rows, 64 per consumer warpgroup.

    `overlaps`: a warpgroup's QK of the next block runs beside its PV of this one; otherwise the sums of PV take the registers
    of the scores, and only other warpgroups' softmax runs beside products. `pieces`: into so many equal parts, two of which are in
    flight, PV of a block is cut along the head dim. `has_pingpong`: warpgroups take turns at issuing products.
    """

    m: int
    overlaps: bool
    pieces: int = 1
    has_pingpong: bool = True
    kv_stages: int = 2


@dataclass(frozen=True, slots=True)
class Fp8Row:
    """Serves head dims up to `hdim` and `hdimv`; `short` replaces `tile` where it pads fewer query rows. `why` is the basis."""

    hdim: int
    hdimv: int
    tile: Fp8Tile
    short: Fp8Tile | None
    why: str


SHORT_TILE_GAIN = 1.04  # as in `tables/forward.py`

ROWS = (
    Fp8Row(64, 64, Fp8Tile(192, overlaps=False), Fp8Tile(128, overlaps=True),
        "registers: 64 S or 36 T, 16 P, 34 O of 160; exponentials are the limit, and three warpgroups share them best"),
    Fp8Row(256, 96, Fp8Tile(128, overlaps=True), None, "registers: 64 S, 52 T, 16 P, 50 O of 232"),
    Fp8Row(256, 128, Fp8Tile(128, overlaps=True), None, "registers: 64 S, 68 T, 16 P, 66 O of 240"),
    Fp8Row(256, 160, Fp8Tile(128, overlaps=False, pieces=2, has_pingpong=False), None,
        "registers: 64 S or two times 40 T, 16 P, 80 O of 232"),
    Fp8Row(256, 192, Fp8Tile(128, overlaps=False, pieces=3, has_pingpong=False), None,
        "registers: 64 S or two times 32 T, 16 P, 96 O of 232"),
    Fp8Row(256, 256, Fp8Tile(128, overlaps=False, pieces=4, has_pingpong=False), None,
        "registers: 64 S or two times 32 T, 16 P, 128 O of 232"),
)  # fmt: skip

# Beside this much of O and a second sum a warpgroup has too few registers left for a ragged batch's tiles: there the sums of PV
# take the place of the scores.
TIGHT_HDIMV = 128

PLAIN = Fp8Tile(128, overlaps=True, has_pingpong=False)  # sums in the tensor core: O is the accumulator


def choose_fp8_tile(hdim: int, hdimv: int, seqlen_q: int, is_ragged: bool) -> Fp8Tile:
    """The tile for padded head dims and a query length, or the reach of a window if that is less."""
    row = next(r for r in ROWS if hdim <= r.hdim and hdimv <= r.hdimv)
    tile = row.tile
    if row.short is not None:
        padded, padded_short = round_up(seqlen_q, row.tile.m), round_up(seqlen_q, row.short.m)
        tile = row.short if padded > SHORT_TILE_GAIN * padded_short else tile
    if hdimv == TIGHT_HDIMV and is_ragged:
        tile = replace(tile, overlaps=False)
    return tile
