"""Forward tiles: which rows and keys per step, by head dim, mask and length.

A row is data: the limits it serves, the tile, and what the choice rests on. `choose_tile` returns the first row that
covers both head dims; what fits into shared memory is decided by `plan/budget.py` afterwards.
"""

from dataclasses import dataclass
from typing import TypeGuard

from flash_hopper.geometry.arith import round_up
from flash_hopper.problem.mask import MaskKind


@dataclass(frozen=True, slots=True)
class Tile:
    """m query rows (64 per consumer warpgroup), n keys per step, and whether warpgroups take turns at issuing GEMMs.

    `kv_stages`: how many stages of K and V to make room for, even at the price of a buffer for O: warpgroups that see
    different keys may then drift apart, and jump over those that they do not see (`ForwardPlan.looks_ahead`).
    `streams`: how many such tiles a CTA computes beside each other, each with stages of its own.
    """

    m: int
    n: int
    has_pingpong: bool = True
    kv_stages: int = 2
    streams: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """Serves head dims up to `hdim` and `hdimv`.

    `tile` serves what no other does; `short` replaces it where nothing is masked, up to `short_to` rows unless it pads more of them,
    and beyond where it pads fewer; `causal` serves masks up to `causal_to` rows, where the masked part of the diagonal weighs more; `window` serves windows up
    to `WINDOW_TO` keys; `ragged` serves ragged batches up to `RAGGED_TO` rows. `why` is the basis.
    """

    hdim: int
    hdimv: int
    tile: Tile
    short: Tile | None
    short_to: int
    causal: Tile | None
    causal_to: int
    window: Tile | None
    ragged: Tile | None
    why: str

    @property
    def tiles(self) -> dict[str, Tile]:
        """All of them, by what they are for."""
        found = {
            "main": self.tile, "short": self.short, "causal": self.causal, "windows": self.window, "ragged": self.ragged
        }  # fmt: skip
        return {name: tile for name, tile in found.items() if tile is not None}


# What counts as padding more: query rows computed, over those of the other tile.
SHORT_TILE_GAIN = 1.04
# Rows of a CTA, over all streams. Bounds of a chunk do not fit into the 112 registers that a thread has beside four consumer warpgroups.
CHUNK_MAX_M = 192

# Windows of this many keys take the tile for windows. H200, 2026-11, d = 128, 16k, TFLOP/s of 192x80 with turns, 192x64 without
# and with more stages: window 512 421 and 465, 1024 560 and 580, 4096 730 and 708.
WINDOW_TO = 2048

# Ragged batches whose longest sequence may have this many rows take the tile for them; it loses 3 to 4 % of full attention at 16k
# (H200, 2026-11, docs/findings/ragged.md).
RAGGED_TO = 8192

# Small blocks of keys, of which few are cut, and no turns, so that warpgroups may drift apart.
TWO_STREAMS, THREE_STAGES, FOUR_STAGES = (
    Tile(128, 64, False, 3, streams=2),
    Tile(192, 64, False, 3),
    Tile(192, 64, False, 4),
)

ROWS = (
    Row(64, 64, Tile(192, 128), TWO_STREAMS, 4096, TWO_STREAMS, 4096, Tile(128, 64, True, 4, streams=2), TWO_STREAMS,
        "H200, 2026-11-30, time of 256x64 over two streams: full 1k 1.014, causal 1k, 2k, 4k 1.009, 1.008, 1.013, window 128 and 1024 1.021 "
        "and 1.019, ragged by Zipf full 1.034, causal 1.079, 8 x 2k 0.978, 0.985; of 192x128: full 2k, 4k, 16k 1.022, 1.022, 0.976"),
    Row(96, 96, Tile(192, 96), Tile(128, 128), 0, Tile(128, 128), 2048, FOUR_STAGES, THREE_STAGES,
        "registers: 48 S + 24 P + 48 O of 160; thresholds as for 128"),
    Row(128, 128, Tile(192, 80), Tile(128, 128), 0, THREE_STAGES, 2048, FOUR_STAGES, THREE_STAGES,
        "H200, 2026-11: full 4k 772 against 741; us of causal 1k 132.8 (128x128) and 132.0, 2k 217.6 and 215.4, 4k 398.9 (192x80) "
        "and 408.8 since who jumps over stages waits twice; window 1024 538 against 580"),
    Row(192, 128, Tile(128, 112), None, 0, None, 0, None, None, "largest n that leaves room for a separate O buffer"),
    Row(192, 192, Tile(128, 112), None, 0, None, 0, None, None, "largest n with two K/V stages, O staged in V's"),
    Row(256, 256, Tile(128, 80), None, 0, None, 0, None, None, "largest n with two K/V stages, O staged in V's"),
)  # fmt: skip


def choose_row(hdim: int, hdimv: int) -> Row:
    """The first row that covers both padded head dims."""
    return next(r for r in ROWS if hdim <= r.hdim and hdimv <= r.hdimv)


def choose_tile(hdim: int, hdimv: int, mask: MaskKind, seqlen_q: int, is_ragged: bool = False) -> Tile:
    """The tile for padded head dims, a mask and a query length, or the reach of a window if that is less."""
    row = choose_row(hdim, hdimv)
    if mask == "local" and row.window is not None and seqlen_q <= WINDOW_TO:
        return row.window
    if is_ragged and seqlen_q <= RAGGED_TO and _suits(row.ragged, mask):
        return row.ragged
    if mask != "full" and seqlen_q <= row.causal_to and _suits(row.causal, mask):
        return row.causal
    if row.short is None or mask != "full":
        return row.tile
    padded, padded_short = round_up(seqlen_q, row.tile.m), round_up(seqlen_q, row.short.m)
    if seqlen_q <= row.short_to:
        return row.short if padded_short <= SHORT_TILE_GAIN * padded else row.tile
    return row.short if padded > SHORT_TILE_GAIN * padded_short else row.tile


def _suits(tile: Tile | None, mask: MaskKind) -> TypeGuard[Tile]:
    """True for a tile that has the registers for the mask."""
    return tile is not None and (mask != "chunk" or tile.m * tile.streams <= CHUNK_MAX_M)
