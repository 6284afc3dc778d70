"""Forward tiles: which rows and keys per step, by head dim, mask and length.

A row is data: the limits it serves, the tiles, and what the choice rests on. `choose_tile` takes the first row that
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
    `streams`: how many such tiles a CTA computes beside each other, each with stages of its own. `o_in_v`: O is staged in V's
    stages, which leaves the memory to them, with `q_stages` of Q or fewer.
    """

    m: int
    n: int
    has_pingpong: bool = True
    kv_stages: int = 2
    streams: int = 1
    o_in_v: bool = False
    q_stages: int = 2


Steps = tuple[tuple[int, Tile], ...]
"""Tiles by length: the first whose number is not exceeded."""

ANY = 1 << 31  # rows


@dataclass(frozen=True, slots=True)
class Row:
    """Serves head dims up to `hdim` and `hdimv`.

    `full` serves attention without a mask, by query rows, but for `spare`, where that pads fewer of them; `masked` serves masks, by
    query rows or the reach of a window or chunk if that is less; `windows` goes before it, for windows; `ragged` serves ragged batches up to `RAGGED_TO`
    rows. `why` is the basis.
    """

    hdim: int
    hdimv: int
    full: Steps
    masked: Steps
    windows: Steps
    ragged: Tile | None
    spare: Tile | None
    why: str

    @property
    def tiles(self) -> dict[str, Tile]:
        """All of them, by what they are for."""
        steps = {"full": self.full, "masks": self.masked, "windows": self.windows}
        found = {
            name if most == ANY else f"{name} up to {most}": tile for name, of in steps.items() for most, tile in of
        }
        others = {"ragged": self.ragged, "fewer rows of padding": self.spare}
        return found | {name: tile for name, tile in others.items() if tile is not None}


# What counts as padding more: query rows computed, over those of the spare tile.
SPARE_TILE_GAIN = 1.04
# Rows of a CTA, over all streams. Bounds of a chunk do not fit into the 112 registers that a thread has beside four consumer warpgroups.
CHUNK_MAX_M = 192

# Ragged batches whose longest sequence may have this many rows take the tile for them; it loses 3 to 4 % of full attention at 16k
# (H200, 2026-11, docs/findings/ragged.md). Windows of this many keys take the first tile for windows there: others were not measured.
RAGGED_TO = 8192
RAGGED_WINDOW_TO = 2048

# Small blocks of keys, of which few are cut, and no turns, so that warpgroups may drift apart.
TWO_STREAMS, THREE_STAGES, FOUR_STAGES = (
    Tile(128, 64, False, 3, streams=2),
    Tile(192, 64, False, 3),
    Tile(192, 64, False, 4),
)
# Windows of 128 keys lose 2 to 6 % by O in V, those of 512 nothing, those of 1024 gain 2 % (docs/findings/o_in_v.md)
NARROW_TO = 768
LONG_64 = Tile(192, 128, False, 3, o_in_v=True, q_stages=1)
LONG_96 = Tile(192, 96, False, 3, o_in_v=True)
FOUR_STAGES_V = Tile(192, 64, False, 4, o_in_v=True)

# H200, 2026-11-30; figures are time of the tile before over that of this one, docs/findings/o_in_v.md and ragged.md
ROWS = (
    Row(64, 64,
        full=((4096, TWO_STREAMS), (ANY, LONG_64)),
        masked=((4096, Tile(128, 64, False, 3, streams=2, o_in_v=True)), (ANY, LONG_64)),
        windows=((NARROW_TO, Tile(128, 64, True, 4, streams=2)), (2048, Tile(128, 64, True, 3, streams=2, o_in_v=True))),
        ragged=TWO_STREAMS, spare=LONG_64,
        why="causal 1k, 2k, 4k 1.011, 1.024, 1.023, 8k, 16k 1.016, 1.017; full 8k, 16k 1.015; window 1024, 2048 1.019; two streams over 256x64: "
        "full 1k 1.014, ragged by Zipf full 1.034, causal 1.079"),
    Row(96, 96,
        full=((ANY, LONG_96),), masked=((2048, FOUR_STAGES_V), (ANY, LONG_96)), windows=((NARROW_TO, FOUR_STAGES),),
        ragged=THREE_STAGES, spare=Tile(128, 128),
        why="full 4k 1.018; causal 1k, 2k 1.027, 1.069, 4k, 8k 1.039, 1.024; window 1024 1.018"),
    Row(128, 128,
        full=((4096, FOUR_STAGES_V), (ANY, Tile(192, 80))),
        masked=((768, THREE_STAGES), (1280, Tile(128, 128, o_in_v=True)), (ANY, FOUR_STAGES_V)),
        windows=((NARROW_TO, FOUR_STAGES), (ANY, FOUR_STAGES_V)),
        ragged=THREE_STAGES, spare=Tile(128, 128),
        why="full 2k, 4k 1.020, 1.016, 8k, 16k 1.000, 0.995 (so not there); causal 512 0.961 (nor there), 1k 1.026, 2k to 16k 1.033, 1.043, 1.015, 1.013; "
        "window 1024, 2048, 4096 1.017, 1.028, 1.012"),
    Row(192, 128,
        full=((ANY, Tile(128, 112, False, o_in_v=True)),),
        masked=((1536, Tile(128, 64, o_in_v=True)), (ANY, Tile(128, 112, False, o_in_v=True))),
        windows=(), ragged=None, spare=None,
        why="full 4k 1.023; causal 1k 1.056, 4k 1.003"),
    Row(192, 192,
        full=((2048, Tile(128, 80, o_in_v=True)), (ANY, Tile(128, 112))),
        masked=((4096, Tile(128, 64, o_in_v=True)), (ANY, Tile(128, 112))),
        windows=(), ragged=None, spare=None,
        why="full 1k 1.049, 4k 0.995 (so not there); causal 1k 1.036, 4k 1.002; else the largest n with two stages"),
    Row(256, 256,
        full=((ANY, Tile(128, 80)),), masked=((ANY, Tile(128, 64)),), windows=(), ragged=None, spare=None,
        why="causal 512 to 8k 1.043, 1.029, 1.023, 1.013, 1.007, 16k 1.001; window 1024 1.044; else the largest n with two stages"),
)  # fmt: skip


def choose_row(hdim: int, hdimv: int) -> Row:
    """The first row that covers both padded head dims."""
    return next(r for r in ROWS if hdim <= r.hdim and hdimv <= r.hdimv)


def choose_tile(hdim: int, hdimv: int, mask: MaskKind, seqlen_q: int, is_ragged: bool = False) -> Tile:
    """The tile for padded head dims, a mask and a query length, or the reach of a window or chunk if that is less."""
    row = choose_row(hdim, hdimv)
    if is_ragged:
        if mask == "local" and row.windows and seqlen_q <= RAGGED_WINDOW_TO:
            return row.windows[0][1]
        if row.ragged is not None and seqlen_q <= RAGGED_TO and _suits(row.ragged, mask):
            return row.ragged
    if mask == "full":
        tile = _step(row.full, seqlen_q, mask)
        padded, spared = (round_up(seqlen_q, x.m) for x in (tile, row.spare or tile))
        return tile if row.spare is None or padded <= SPARE_TILE_GAIN * spared else row.spare
    is_window = mask == "local" and row.windows and seqlen_q <= row.windows[-1][0]
    return _step(row.windows if is_window else row.masked, seqlen_q, mask)


def _step(steps: Steps, seqlen_q: int, mask: MaskKind) -> Tile:
    return next(tile for most, tile in steps if seqlen_q <= most and _suits(tile, mask))


def _suits(tile: Tile, mask: MaskKind) -> bool:
    """True for a tile that has the registers for the mask."""
    return mask != "chunk" or tile.m * tile.streams <= CHUNK_MAX_M
