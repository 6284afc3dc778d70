"""The plan of the e4m3 forward: everything about the kernel that is fixed at compile time.

As `plan/forward.py`, which it shares masks, stages and schedulers with. What is different: how sums of the second product
are kept accurate, and what the descales look like. V always comes transposed (`problem.fp8.Fp8Values`).
"""

from dataclasses import dataclass
from typing import Literal

from flash_hopper.geometry.arith import round_up
from flash_hopper.plan.budget import OPlace, choose_fp8_buffers
from flash_hopper.plan.forward import ForwardPlan, longest_rows, visited_rows
from flash_hopper.plan.tables.forward_fp8 import PLAIN, TILE_N, Fp8Demand, choose_fp8_tile
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import CompileError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.fp8 import DescaleForm
from flash_hopper.problem.mask import MaskKind

HDIM_STEP = 32  # head dims are padded to this in shared memory: what one 8-bit wgmma multiplies
MIN_TILE_HDIM = 64
SUM_COLUMNS = 8  # of ones: the smallest step of a wgmma's width
Accumulation = Literal["two_level", "plain"]


@dataclass(frozen=True, slots=True)
class ForwardFp8Plan:
    """Compile-time choices of the e4m3 forward kernel. Fields that `ForwardPlan` has mean the same.

    `accumulation`: with "two_level" PV of each key block starts a fresh sum, which is added to O in float32: the tensor core
    truncates its sums to 14 bits, and over 16k keys loses a quarter of values of one sign. "plain" sums in the tensor core.
    `overlaps`, `pieces` and `weights_ahead`: see `Fp8Tile`. `descales`: whether scores and values of each key block have factors of their own.
    Raises CompileError for a plan that overlaps in pieces, or has weights ahead of a PV that does not overlap.
    """

    out_dtype: DType
    tile_hdim: int
    tile_hdimv: int
    tile_m: int
    tile_n: int
    q_stages: int
    kv_stages: int
    o_place: OPlace
    scheduler: Literal["static", "dynamic"]
    mask: MaskKind
    is_ragged: bool
    has_lse: bool
    negates_scores: bool
    accumulation: Accumulation
    overlaps: bool
    pieces: int
    weights_ahead: int
    descales: DescaleForm

    kind = "forward_fp8"
    dtype = DType.E4M3  # of Q, K, V and P
    has_pingpong = False
    frees_q_early = False
    shares_tiles = False
    streams = 1
    looks_ahead = ForwardPlan.looks_ahead
    frees_unseen = ForwardPlan.frees_unseen

    def __post_init__(self) -> None:
        if self.overlaps and self.pieces > 1:
            raise CompileError(
                f"PV in {self.pieces} pieces cannot overlap with QK: all are issued at the end of a block"
            )
        if self.weights_ahead and not self.overlaps:
            raise CompileError(f"no weights can be ahead of a PV that does not overlap, got {self.weights_ahead}")

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute; each owns 64 query rows."""
        return self.tile_m // 64

    @property
    def has_idle(self) -> bool:
        """Whether a warpgroup without a row of the sequence computes one block of keys and frees the rest unread.

        Four warpgroups have no registers for it, and their tile is chosen to leave few rows empty; tight ones only do it for
        ragged batches.
        """
        return 1 < self.consumer_warpgroups < 4 and (self.is_ragged or not self.is_tight)

    @property
    def is_two_level(self) -> bool:
        """Whether each block's PV is a sum of its own."""
        return self.accumulation == "two_level"

    @property
    def is_tight(self) -> bool:
        """Whether consumers need every register: with 128 columns of O and a second sum, or 256 of O, beside S."""
        return self.tile_hdimv >= (128 if self.overlaps else 256)

    @property
    def has_sum_columns(self) -> bool:
        """Whether row sums are products of the rounded weights with columns of ones; else of weights that are not rounded.

        A sum in the tensor core must be as short as O's.
        """
        return self.is_two_level

    @property
    def has_ones_apart(self) -> bool:
        """Whether that is a product of its own, and not part of PV: cut in pieces, one would be wider than the others."""
        return self.has_sum_columns and self.pieces > 1

    @property
    def value_rows(self) -> int:
        """Rows of a transposed V in a stage of shared memory: its columns, and those of ones behind them."""
        return self.tile_hdimv + SUM_COLUMNS * (self.has_sum_columns and not self.has_ones_apart)

    @property
    def name(self) -> str:
        """Readable and unique among forward plans, e.g. for symbols, cache listings and tests."""
        flags = [
            self.mask,
            self.scheduler,
            self.accumulation.replace("_", ""),
            *([] if self.overlaps else [f"serial{self.pieces}"]),
            *([f"ahead{self.weights_ahead}"] if self.weights_ahead else []),
            *(["blockscales"] if self.descales == "block" else []),
            *(["ragged"] if self.is_ragged else []),
            *(["lse"] if self.has_lse else []),
            *(["neg"] if self.negates_scores else []),
            *([] if self.o_place == "apart" else [f"o{self.o_place}"]),
        ]
        head = f"forward_fp8_{self.out_dtype}_d{self.tile_hdim}_dv{self.tile_hdimv}"
        return f"{head}_{self.tile_m}x{self.tile_n}_q{self.q_stages}kv{self.kv_stages}_" + "_".join(flags)


def padded_head_dim(size: int) -> int:
    """A head dim as the kernel has it in shared memory."""
    return int(max(round_up(size, HDIM_STEP), MIN_TILE_HDIM))


def plan_forward_fp8(
    problem: AttentionProblem,
    out_dtype: DType,
    descales: DescaleForm,
    accumulation: Accumulation = "two_level",
) -> ForwardFp8Plan:
    """The plan for a problem of dtype e4m3, its output and the form of its descales."""
    hdim, hdimv = padded_head_dim(problem.head_dim), padded_head_dim(problem.head_dim_v)
    mask = problem.mask.simplified(problem.seqlen_q, problem.seqlen_k)
    is_plain = accumulation == "plain"
    rows, is_ragged = visited_rows(longest_rows(problem), mask), problem.ragged is not None
    has_lse, negates = Feature.LSE in problem.features, Feature.NEGATIVE_SCALE in problem.features
    is_lean = out_dtype is DType.BF16 and not has_lse and not negates
    demand = Fp8Demand(mask.kind, rows, is_ragged, descales == "block", is_lean)
    tile = PLAIN if is_plain else choose_fp8_tile(hdim, hdimv, demand)
    columns = 0 if is_plain else SUM_COLUMNS
    behind, apart = (columns, 0) if tile.pieces == 1 else (0, columns)
    buffers = choose_fp8_buffers(tile.m, TILE_N, hdim, hdimv, behind, apart, out_dtype.itemsize, tile.kv_stages)
    return ForwardFp8Plan(
        out_dtype=out_dtype,
        tile_hdim=hdim,
        tile_hdimv=hdimv,
        tile_m=tile.m,
        tile_n=TILE_N,
        q_stages=buffers.q_stages,
        kv_stages=buffers.kv_stages,
        o_place=buffers.o_place,
        scheduler="static" if mask.kind == "full" and problem.ragged is None else "dynamic",
        mask=mask.kind,
        is_ragged=is_ragged,
        has_lse=has_lse,
        negates_scores=negates,
        accumulation=accumulation,
        overlaps=tile.overlaps,
        pieces=tile.pieces,
        weights_ahead=tile.weights_ahead,
        descales=descales,
    )
