"""The forward plan: everything about the kernel that is fixed at compile time.

A `ForwardPlan` is frozen, hashable and printable, and is the compile key (with the sources' fingerprint). `plan_forward`
chooses one for a problem from the user's own rows (`own_tiles.py`) or `tables/forward.py`; `budget.py` fills in what fits into
shared memory, `roles.py` the threads, registers and barrier arrivals. No GPU, no torch, no DSL.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from flash_hopper import settings
from flash_hopper.geometry.arith import ceil_div, round_up
from flash_hopper.plan.budget import HDIM_STEP, Layout, OPlace, choose_layout
from flash_hopper.plan.own_tiles import OwnRow, find_row, read_rows
from flash_hopper.plan.tables.forward import choose_tile
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask, MaskKind

# Up to this many rows in the longest sequence, heads share tiles. 2,000 sequences of 8: two to three times as fast; longer ones lose
# 2 % by it (H200, 2026-11, docs/findings/ragged.md).
SHORT_ROWS = 128


@dataclass(frozen=True, slots=True)
class ForwardPlan:
    """Compile-time choices of the forward kernel.

    `tile_m` query rows (64 per consumer warpgroup) and `tile_n` keys per step. Of `streams` > 1 each computes tiles of its own, beside
    the others and with nothing in common but the CTA: producer and scheduler warp, consumers, stages, barriers. Head dims rounded up
    to `HDIM_STEP`, the real ones are run-time sizes. `q_stages` > 1 loads the next tile's Q during this tile; `o_place`: where the
    output is staged. `mask` says which bounds the kernel knows; `negates_scores` serves a negative softmax scale;
    `has_lse` stores the log-sum-exp. `scheduler` says how persistent CTAs find their next tile; `is_ragged` that the
    lengths of sequences are on the device, and `shares_tiles` that heads of a short one share tiles (`geometry/tiles.py`).
    """

    dtype: DType
    tile_hdim: int
    tile_hdimv: int
    tile_m: int
    tile_n: int
    q_stages: int
    kv_stages: int
    o_place: OPlace
    has_pingpong: bool
    scheduler: Literal["static", "dynamic"]
    mask: MaskKind
    is_ragged: bool
    shares_tiles: bool
    has_lse: bool
    negates_scores: bool
    streams: int = 1

    kind = "forward"

    @property
    def out_dtype(self) -> DType:
        """Element type of the output."""
        return self.dtype

    @property
    def layout(self) -> Layout:
        """Tile and stages alone."""
        stages = self.q_stages, self.kv_stages, self.o_place
        return Layout(self.tile_m, self.tile_n, self.has_pingpong, *stages, self.streams)

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute a tile; each owns 64 query rows."""
        return self.tile_m // 64

    @property
    def looks_ahead(self) -> bool:
        """Whether a tile's first scores are issued before the tile before is finished.

        That takes a second stage of Q. And a warpgroup must be able to jump over blocks that it does not see, which the
        producer frees in its place: over fewer than there are stages, as a whole round of stages that went by unseen would be
        mistaken for the next one. Ranges of a tile's warpgroups start and end 64 rows apart; of chunks, any number of blocks.
        The tiles of a ragged batch are not found early enough (docs/findings/ragged.md). And who stages O in V must have waited for
        every stage of V (`Consumer.value_stage`).
        """
        if self.q_stages == 1 or self.o_place == "v" or self.is_ragged or self.mask == "chunk":
            return False
        steps = [ceil_div(64 * i, self.tile_n) for i in range(self.consumer_warpgroups)]
        in_front = steps if self.mask == "local" else [0] * len(steps)
        most = max(map(sum, zip(reversed(steps), in_front, strict=True)))
        return self.mask == "full" or most < self.kv_stages

    @property
    def frees_q_early(self) -> bool:
        """Whether the only stage of Q is freed behind the last scores of a tile, so that the next tile's loads during the rest of it."""
        return self.q_stages == 1 and self.o_place != "q"

    @property
    def has_idle(self) -> bool:
        """Whether a warpgroup without a row of the sequence computes one block of keys and frees the rest unread.

        In a dense batch not where warpgroups take turns: there the tile is chosen to leave few rows empty.
        """
        return self.consumer_warpgroups > 1 and (self.is_ragged or not self.has_pingpong)

    @property
    def frees_unseen(self) -> bool:
        """Whether the producer frees the stages of blocks that a warpgroup does not see, and the warpgroup jumps over them."""
        return self.looks_ahead and self.mask != "full"

    @property
    def name(self) -> str:
        """Readable and unique among forward plans, e.g. for symbols, cache listings and tests."""
        flags = [
            self.mask,
            self.scheduler,
            *(["ragged"] if self.is_ragged else []),
            *(["shared"] if self.shares_tiles else []),
            *(["lse"] if self.has_lse else []),
            *(["neg"] if self.negates_scores else []),
            *(["pingpong"] if self.has_pingpong else []),
            *([] if self.o_place == "apart" else [f"o{self.o_place}"]),
        ]
        head = f"forward_{self.dtype}_d{self.tile_hdim}_dv{self.tile_hdimv}"
        tile = f"{self.tile_m}x{self.tile_n}" if self.streams == 1 else f"{self.streams}x{self.tile_m}x{self.tile_n}"
        return f"{head}_{tile}_q{self.q_stages}kv{self.kv_stages}_" + "_".join(flags)


class Choice(NamedTuple):
    """What the choice of a tile depends on: padded head dims, the mask that is left for these lengths, and query rows, or the reach of
    a window or chunk if that is less."""

    hdim: int
    hdimv: int
    mask: MaskKind
    is_ragged: bool
    rows: int


def plan_forward(problem: AttentionProblem, gpu: str | None = None) -> ForwardPlan:
    """The plan for a problem. Depends on dtype, head dims, flags and, for the tile height, on the lengths.

    A row of the user's own (`own_tiles.py`) goes before the tables; one that names a GPU only if `gpu` is that name. Raises
    ArgumentError if the user's file cannot be used.
    """
    own = own_row(choice_of(problem), gpu)
    return plan_with(problem, table_layout(problem) if own is None else own.layout)


def own_row(choice: Choice, gpu: str | None = None) -> OwnRow | None:
    """The row of the user's own that serves a choice on a GPU of this name, if there is one."""
    path = settings.tiles_file()
    return None if path is None else find_row(read_rows(path), *choice, gpu)


def choice_of(problem: AttentionProblem) -> Choice:
    """What the choice of the problem's tile depends on."""
    mask, rows = problem.mask.simplified(problem.seqlen_q, problem.seqlen_k), longest_rows(problem)
    return Choice(
        round_up(problem.head_dim, HDIM_STEP),
        round_up(problem.head_dim_v, HDIM_STEP),
        mask.kind,
        problem.ragged is not None,
        visited_rows(rows, mask),
    )


def table_layout(problem: AttentionProblem) -> Layout:
    """The tile and stages that the tables choose."""
    hdim, hdimv, mask, is_ragged, rows = choice_of(problem)
    return choose_layout(choose_tile(hdim, hdimv, mask, rows, is_ragged), hdim, hdimv, problem.dtype.itemsize)


def plan_with(problem: AttentionProblem, layout: Layout) -> ForwardPlan:
    """The plan for a problem with a given tile and stages."""
    hdim, hdimv, mask, is_ragged, _ = choice_of(problem)
    return ForwardPlan(
        dtype=problem.dtype,
        tile_hdim=hdim,
        tile_hdimv=hdimv,
        tile_m=layout.m,
        tile_n=layout.n,
        q_stages=layout.q_stages,
        kv_stages=layout.kv_stages,
        o_place=layout.o_place,
        has_pingpong=layout.has_pingpong,
        scheduler="static" if mask == "full" and not is_ragged else "dynamic",
        mask=mask,
        is_ragged=is_ragged,
        shares_tiles=is_ragged and longest_rows(problem) <= SHORT_ROWS,
        has_lse=Feature.LSE in problem.features,
        negates_scores=Feature.NEGATIVE_SCALE in problem.features,
        streams=layout.streams,
    )


def longest_rows(problem: AttentionProblem) -> int:
    """The query length by which a tile is chosen: of a ragged batch the longest sequence as far as the caller says, in powers of two
    so that few hints are told apart, or the mean."""
    ragged = problem.ragged
    if ragged is None:
        return problem.seqlen_q
    hint = ragged.max_seqlen_q
    return ceil_div(ragged.rows_q, max(problem.batch, 1)) if hint is None else 1 << max(hint - 1, 0).bit_length()


def visited_rows(rows: int, mask: Mask) -> int:
    """The same, or how far a window reaches if that is less."""
    if mask.chunk:
        return min(rows, mask.chunk)
    if mask.left is not None:
        return min(rows, mask.left + (mask.right or 0) + 1)
    return rows
