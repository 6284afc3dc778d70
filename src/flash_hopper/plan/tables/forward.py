"""Forward tiles: which rows and keys per step, by head dim, mask and length.

A row is data: the limits it serves, the tile, and what the choice rests on. `choose_tile` returns the first row that
covers both head dims; what fits into shared memory is decided by `plan/budget.py` afterwards.
"""

from dataclasses import dataclass

from flash_hopper.geometry.arith import round_up
from flash_hopper.problem.mask import MaskKind


@dataclass(frozen=True, slots=True)
class Tile:
    """m query rows (64 per consumer warpgroup), n keys per step, and whether warpgroups take turns at issuing GEMMs.

    `kv_stages`: how many stages of K and V to make room for, even at the price of a buffer for O: warpgroups that see
    different keys may then drift apart, and jump over those that they do not see (`ForwardPlan.looks_ahead`).
    """

    m: int
    n: int
    has_pingpong: bool = True
    kv_stages: int = 2


@dataclass(frozen=True, slots=True)
class Row:
    """Serves head dims up to `hdim` and `hdimv`.

    `short` replaces `tile` where it pads fewer query rows, and for causal attention up to `causal_short_to` rows, where
    the masked part of the diagonal weighs more. `window` serves windows up to `WINDOW_TO` keys. `why` is the basis.
    """

    hdim: int
    hdimv: int
    tile: Tile
    short: Tile | None
    causal_short_to: int
    window: Tile | None
    why: str


# A row's `short` tile is taken if `tile` would pad the query length by more than this over it.
SHORT_TILE_GAIN = 1.04
# Bounds of a chunk do not fit into the 112 registers that a thread has beside four consumer warpgroups.
CHUNK_MAX_M = 192

# Windows of this many keys take the tile for windows. H200, 2026-11, d = 128, 16k, TFLOP/s of 192x80 with turns, 192x64 without
# and with more stages: window 512 421 and 465, 1024 560 and 580, 4096 730 and 708.
WINDOW_TO = 2048

ROWS = (
    Row(64, 64, Tile(192, 128), Tile(256, 64, kv_stages=4), 4096, Tile(256, 64, False, 4),
        "H200, 2026-11: full 4k 570 against 566, causal 2k 460 against 484, window 1024 430 against 447; four stages instead "
        "of two in the short tile: full 1k 512 and 539, causal 2k 497 and 511"),
    Row(96, 96, Tile(192, 96), Tile(128, 128), 2048, Tile(192, 64, False, 4),
        "registers: 48 S + 24 P + 48 O of 160; thresholds as for 128"),
    Row(128, 128, Tile(192, 80), Tile(128, 128), 2048, Tile(192, 64, False, 4),
        "H200, 2026-11: full 4k 772 against 741, causal 1k 448 against 498, window 1024 538 against 580"),
    Row(192, 128, Tile(128, 112), None, 0, None, "largest n that leaves room for a separate O buffer"),
    Row(192, 192, Tile(128, 112), None, 0, None, "largest n with two K/V stages, O staged in Q's buffer"),
    Row(256, 256, Tile(128, 80), None, 0, None, "largest n with two K/V stages, O staged in Q's buffer"),
)  # fmt: skip


def choose_row(hdim: int, hdimv: int) -> Row:
    """The first row that covers both padded head dims."""
    return next(r for r in ROWS if hdim <= r.hdim and hdimv <= r.hdimv)


def choose_tile(hdim: int, hdimv: int, mask: MaskKind, seqlen_q: int) -> Tile:
    """The tile for padded head dims, a mask and a query length, or the reach of a window if that is less."""
    row = choose_row(hdim, hdimv)
    if mask == "local" and row.window is not None and seqlen_q <= WINDOW_TO:
        return row.window
    if row.short is None or (mask == "chunk" and row.short.m > CHUNK_MAX_M):
        return row.tile
    if mask != "full" and seqlen_q <= row.causal_short_to:
        return row.short
    padded, padded_short = round_up(seqlen_q, row.tile.m), round_up(seqlen_q, row.short.m)
    return row.short if padded > SHORT_TILE_GAIN * padded_short else row.tile
