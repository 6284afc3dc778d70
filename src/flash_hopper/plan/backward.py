"""Backward plans: preprocess, the query-parallel dQ kernel and the key-parallel dK/dV kernel.

The query-parallel kernel owns query rows and adds up dQ over key blocks; the key-parallel one owns keys and adds up dK
and dV over query blocks and the query heads of its key head. Neither adds into global memory, so both are deterministic.
"""

from dataclasses import dataclass
from typing import Literal

from flash_hopper.geometry.arith import round_up
from flash_hopper.plan.forward import HDIM_STEP
from flash_hopper.plan.tables.backward import choose_dkdv_tile, choose_dq_tile, choose_fused_tile
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType

FUSED_HDIM_STEP = 64  # dQ is added up in pieces of 64 x 64, one a warpgroup
STATISTICS_ROWS = 16  # rows of the statistics are padded to a multiple of this and of the key-parallel kernel's tile_m


@dataclass(frozen=True, slots=True)
class PreprocessPlan:
    """Compile-time choices of the preprocess kernel: D = rowsum(dO o O) - dLSE, and LSE in base 2.

    `cleared_hdim`: columns of the dQ accumulator, which it clears; 0 if there is none.
    """

    dtype: DType
    threads_per_row: int
    has_dlse: bool
    cleared_hdim: int

    kind = "preprocess"

    @property
    def name(self) -> str:
        """Readable and unique among preprocess plans."""
        flags = ("_dlse" if self.has_dlse else "") + (f"_clear{self.cleared_hdim}" if self.cleared_hdim else "")
        return f"preprocess_{self.dtype}_t{self.threads_per_row}{flags}"


@dataclass(frozen=True, slots=True)
class BackwardDqPlan:
    """Compile-time choices of the query-parallel kernel: 64 query rows per consumer warpgroup, tile_n keys a step."""

    dtype: DType
    tile_hdim: int
    tile_hdimv: int
    tile_m: int
    tile_n: int
    k_stages: int
    v_stages: int
    has_pingpong: bool
    scheduler: Literal["static", "dynamic"]
    is_causal: bool

    kind = "backward_dq"

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.tile_m // 64

    @property
    def name(self) -> str:
        """Readable and unique among these plans."""
        return (
            f"backward_dq_{self.dtype}_d{self.tile_hdim}_dv{self.tile_hdimv}_{self.tile_m}x{self.tile_n}"
            f"_k{self.k_stages}v{self.v_stages}_{'causal' if self.is_causal else 'full'}_{self.scheduler}"
            + ("_pingpong" if self.has_pingpong else "")
        )


@dataclass(frozen=True, slots=True)
class BackwardDkdvPlan:
    """Compile-time choices of the key-parallel kernel.

    With `splits_roles` there are two warpgroups on the same 64 keys: one makes P and dV, the other dP, dS and dK.
    Otherwise each warpgroup owns 64 keys and does everything for them; `is_deferred` issues a block's dV and dK together
    with the next block's S and dP, for which registers must suffice and three stages are needed. `adds_dq` also computes
    dQ and adds it to a float32 accumulator in memory, in any order (not deterministic).
    """

    dtype: DType
    tile_hdim: int
    tile_hdimv: int
    tile_m: int
    tile_n: int
    q_stages: int
    do_stages: int
    splits_roles: bool
    is_deferred: bool
    adds_dq: bool
    scheduler: Literal["static", "dynamic"]
    is_causal: bool

    kind = "backward_dkdv"

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute."""
        return 2 if self.splits_roles else self.tile_n // 64

    @property
    def name(self) -> str:
        """Readable and unique among these plans."""
        return (
            f"backward_dkdv_{self.dtype}_d{self.tile_hdim}_dv{self.tile_hdimv}_{self.tile_m}x{self.tile_n}"
            f"_q{self.q_stages}do{self.do_stages}_{'causal' if self.is_causal else 'full'}_{self.scheduler}"
            + ("_split" if self.splits_roles else "_deferred" if self.is_deferred else "_dq" if self.adds_dq else "")
        )


@dataclass(frozen=True, slots=True)
class PostprocessPlan:
    """Compile-time choices of the postprocess kernel: the float32 accumulator of dQ to dQ."""

    dtype: DType
    tile_m: int
    tile_hdim: int

    kind = "postprocess"

    @property
    def name(self) -> str:
        """Readable and unique among postprocess plans."""
        return f"postprocess_{self.dtype}_{self.tile_m}x{self.tile_hdim}"


@dataclass(frozen=True, slots=True)
class BackwardPlans:
    """All kernels of one backward call, in launch order: preprocess, then either dkdv (which adds up dQ) and
    postprocess, or dq and dkdv."""

    preprocess: PreprocessPlan
    dkdv: BackwardDkdvPlan
    dq: BackwardDqPlan | None
    postprocess: PostprocessPlan | None


def plan_backward(problem: AttentionProblem, has_dlse: bool, is_deterministic: bool) -> BackwardPlans:
    """The plans for a problem; `has_dlse`: a gradient of the log-sum-exp comes in as well."""
    dtype = problem.dtype
    hdim, hdimv = round_up(problem.head_dim, HDIM_STEP), round_up(problem.head_dim_v, HDIM_STEP)
    scheduler: Literal["static", "dynamic"] = "dynamic" if problem.causal else "static"
    threads_per_row = 8 if hdimv <= 64 else 16
    fused = None if is_deterministic else choose_fused_tile(hdim, hdimv)
    if fused is not None:
        padded = round_up(hdim, FUSED_HDIM_STEP)
        return BackwardPlans(
            PreprocessPlan(dtype, threads_per_row, has_dlse, padded),
            BackwardDkdvPlan(
                dtype, padded, hdimv, fused.m, fused.n, fused.q_stages, fused.do_stages, False, False, True, scheduler, problem.causal
            ),
            None,
            PostprocessPlan(dtype, fused.m, padded),
        )
    dq, dkdv = choose_dq_tile(hdim, hdimv), choose_dkdv_tile(hdim, hdimv)
    return BackwardPlans(
        PreprocessPlan(dtype, threads_per_row, has_dlse, 0),
        BackwardDkdvPlan(
            dtype, hdim, hdimv, dkdv.m, dkdv.n, dkdv.q_stages, dkdv.do_stages, dkdv.splits_roles, dkdv.is_deferred, False, scheduler,
            problem.causal,
        ),
        BackwardDqPlan(
            dtype, hdim, hdimv, dq.m, dq.n, dq.k_stages, dq.v_stages, dq.has_pingpong, scheduler, problem.causal
        ),
        None,
    )  # fmt: skip
