"""Backward plans: preprocess, the query-parallel dQ kernel and the key-parallel dK/dV kernel.

The query-parallel kernel owns query rows and adds up dQ over key blocks; the key-parallel one owns keys and adds up dK
and dV over query blocks and the query heads of its key head. So used, neither adds into global memory, and both are
deterministic. Where head dims allow, the key-parallel kernel can also compute dQ, adding it up in a float32 accumulator
in memory: five GEMMs instead of seven, but in no fixed order.
"""

from dataclasses import dataclass
from typing import Literal

from flash_hopper.geometry.arith import round_up
from flash_hopper.plan.budget import HDIM_STEP
from flash_hopper.plan.tables.backward import (
    DkdvTile,
    choose_dkdv_tile,
    choose_dq_tile,
    choose_fused_tile,
)
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.mask import MaskKind

WINDOWED = ("local", "chunk")
PIECE_COLS = 64
DQ_PIECE = 64 * PIECE_COLS  # dQ is added up in pieces of 64 x 64 float32 values
STATISTICS_ROWS = 16  # rows of the statistics are padded to a multiple of this and of the key-parallel kernel's tile_m


@dataclass(frozen=True, slots=True)
class PreprocessPlan:
    """Compile-time choices of the preprocess kernel: D = rowsum(dO o O) - dLSE, and LSE in base 2.

    `cleared_hdim`: columns of the dQ accumulator, which it clears; 0 if there is none. `is_ragged`: rows of the statistics
    are padded sequences, found in a table on the device.
    """

    dtype: DType
    threads_per_row: int
    has_dlse: bool
    cleared_hdim: int
    is_ragged: bool

    kind = "preprocess"

    @property
    def name(self) -> str:
        """Readable and unique among preprocess plans."""
        flags = ("_dlse" if self.has_dlse else "") + (f"_clear{self.cleared_hdim}" if self.cleared_hdim else "")
        flags += "_ragged" if self.is_ragged else ""
        return f"preprocess_{self.dtype}_t{self.threads_per_row}{flags}"


@dataclass(frozen=True, slots=True)
class BackwardDqPlan:
    """Compile-time choices of the query-parallel kernel: 64 query rows per consumer warpgroup, tile_n keys a step.

    `accumulates` adds dQ to float32 values in memory instead of storing it in the dtype.
    """

    dtype: DType
    tile_hdim: int
    tile_hdimv: int
    tile_m: int
    tile_n: int
    k_stages: int
    v_stages: int
    has_pingpong: bool
    scheduler: Literal["static", "dynamic"]
    mask: MaskKind
    is_ragged: bool
    accumulates: bool

    kind = "backward_dq"

    @property
    def is_windowed(self) -> bool:
        """The mask cuts at both ends, by run-time bounds."""
        return self.mask in WINDOWED

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute."""
        return self.tile_m // 64

    @property
    def name(self) -> str:
        """Readable and unique among these plans."""
        return (
            f"backward_dq_{self.dtype}_d{self.tile_hdim}_dv{self.tile_hdimv}_{self.tile_m}x{self.tile_n}"
            f"_k{self.k_stages}v{self.v_stages}_{self.mask}_{self.scheduler}"
            + ("_pingpong" if self.has_pingpong else "")
            + ("_ragged" if self.is_ragged else "")
            + ("_acc" if self.accumulates else "")
        )


@dataclass(frozen=True, slots=True)
class BackwardDkdvPlan:
    """Compile-time choices of the key-parallel kernel.

    With `splits_roles` there are two warpgroups on the same 64 keys: one makes P and dV, the other dP, dS and dK.
    Otherwise each warpgroup owns 64 keys and does everything for them; `is_deferred` issues a block's dV and dK together
    with the next block's S and dP, for which registers must suffice and three stages are needed. `adds_dq` also computes
    dQ and adds it to a float32 accumulator in memory, in any order (not deterministic); `adds_dkdv` does so with dK and
    dV of each query head, which share a key head. `accumulates` adds finished dK and dV to float32 values in memory.
    `v_in_registers`: of a tile, read once, so that dP's product reads a third fewer bytes of shared memory.
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
    adds_dkdv: bool
    scheduler: Literal["static", "dynamic"]
    mask: MaskKind
    is_ragged: bool
    accumulates: bool
    v_in_registers: bool

    kind = "backward_dkdv"

    @property
    def is_windowed(self) -> bool:
        """The mask cuts at both ends, by run-time bounds."""
        return self.mask in WINDOWED

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute."""
        return 2 if self.splits_roles else self.tile_n // 64

    @property
    def reads_ahead(self) -> bool:
        """LSE of the next query block goes to registers during this block's last product, whose operands leave the port of shared
        memory half free; those of S and dP, after which it is wanted, do not.

        Larger blocks, chunks, and kernels without dQ that add to given gradients have not the registers (8 to 48 bytes a thread
        were spilled).
        """
        has_registers = self.tile_m <= 64 and self.mask != "chunk" and (self.adds_dq or not self.accumulates)
        return has_registers and not self.splits_roles

    @property
    def name(self) -> str:
        """Readable and unique among these plans."""
        return (
            f"backward_dkdv_{self.dtype}_d{self.tile_hdim}_dv{self.tile_hdimv}_{self.tile_m}x{self.tile_n}"
            f"_q{self.q_stages}do{self.do_stages}_{self.mask}_{self.scheduler}"
            + (
                "_split"
                if self.splits_roles
                else "_deferred"
                if self.is_deferred
                else "_dqkv"
                if self.adds_dkdv
                else "_dq"
                if self.adds_dq
                else ""
            )
            + ("_ragged" if self.is_ragged else "")
            + ("_acc" if self.accumulates else "")
            + ("_v" if self.v_in_registers else "")
        )


@dataclass(frozen=True, slots=True)
class PostprocessPlan:
    """Compile-time choices of the postprocess kernel: the float32 accumulator of dQ to dQ, or that of dK or dV.

    `accumulates` adds to float32 values in memory instead of storing in the dtype. `ragged_side`: whose padded sequences the
    rows of the accumulator are, found in a table on the device; "" for a dense batch.
    """

    dtype: DType
    tile_m: int
    tile_hdim: int
    accumulates: bool
    ragged_side: Literal["", "q", "k"]

    kind = "postprocess"

    @property
    def is_ragged(self) -> bool:
        """The accumulator holds padded sequences."""
        return self.ragged_side != ""

    @property
    def name(self) -> str:
        """Readable and unique among postprocess plans."""
        flags = (f"_ragged_{self.ragged_side}" if self.ragged_side else "") + ("_acc" if self.accumulates else "")
        return f"postprocess_{self.dtype}_{self.tile_m}x{self.tile_hdim}{flags}"


BackwardKernelPlan = PreprocessPlan | BackwardDqPlan | BackwardDkdvPlan | PostprocessPlan


@dataclass(frozen=True, slots=True)
class BackwardPlans:
    """The kernels of one backward call, in launch order; None for those that it does not need.

    Either `dkdv` also adds up dQ, which `postprocess` converts, or `dq` computes it. `postprocess_dk` and `postprocess_dv`
    convert dK and dV where several query heads add to them.
    """

    preprocess: PreprocessPlan
    dkdv: BackwardDkdvPlan | None
    dq: BackwardDqPlan | None
    postprocess: PostprocessPlan | None
    postprocess_dk: PostprocessPlan | None = None
    postprocess_dv: PostprocessPlan | None = None

    def kernels(self) -> tuple[BackwardKernelPlan, ...]:
        """Those that are launched, in order."""
        plans = (self.preprocess, self.dq, self.dkdv, self.postprocess, self.postprocess_dk, self.postprocess_dv)
        return tuple(plan for plan in plans if plan is not None)


@dataclass(frozen=True, slots=True)
class BackwardRequest:
    """What a backward call must deliver beyond its forward problem.

    `accumulates`: gradients are added, in float32, to what the caller gives.
    """

    needs_dq: bool
    needs_dkdv: bool
    has_dlse: bool
    is_deterministic: bool
    accumulates: bool = False


def plan_backward(problem: AttentionProblem, request: BackwardRequest) -> BackwardPlans:
    """The plans for a problem and what is asked of its backward."""
    hdim, hdimv = round_up(problem.head_dim, HDIM_STEP), round_up(problem.head_dim_v, HDIM_STEP)
    threads_per_row, is_ragged = 8 if hdimv <= 64 else 16, problem.ragged is not None
    fused = choose_fused_tile(hdim, hdimv)
    if fused is not None and request.needs_dq and request.needs_dkdv and not request.is_deterministic:
        hdim = 2 * DQ_PIECE // fused.m  # two pieces of dQ a query block, one a warpgroup
        is_grouped = problem.qhead_per_kvhead > 1
        if is_grouped:
            hdimv = round_up(hdimv, PIECE_COLS)
        return BackwardPlans(
            PreprocessPlan(problem.dtype, threads_per_row, request.has_dlse, hdim, is_ragged),
            _dkdv_plan(problem, request, fused, hdim, hdimv, adds_dq=True, adds_dkdv=is_grouped),
            None,
            _postprocess_plan(problem, request, hdim, "q"),
            _postprocess_plan(problem, request, hdim, "k") if is_grouped else None,
            _postprocess_plan(problem, request, hdimv, "k") if is_grouped else None,
        )
    return BackwardPlans(
        PreprocessPlan(problem.dtype, threads_per_row, request.has_dlse, 0, is_ragged),
        _dkdv_plan(problem, request, choose_dkdv_tile(hdim, hdimv), hdim, hdimv) if request.needs_dkdv else None,
        _dq_plan(problem, request, hdim, hdimv) if request.needs_dq else None,
        None,
    )


def _mask(problem: AttentionProblem) -> MaskKind:
    return problem.mask.simplified(problem.seqlen_q, problem.seqlen_k).kind


def _scheduler(problem: AttentionProblem, mask: MaskKind) -> Literal["static", "dynamic"]:
    """Tiles of full attention to a dense batch cost the same."""
    return "static" if mask == "full" and problem.ragged is None else "dynamic"


def _postprocess_plan(
    problem: AttentionProblem, request: BackwardRequest, hdim: int, side: Literal["q", "k"]
) -> PostprocessPlan:
    """Two pieces a CTA."""
    ragged_side: Literal["", "q", "k"] = "" if problem.ragged is None else side
    return PostprocessPlan(problem.dtype, 2 * DQ_PIECE // hdim, hdim, request.accumulates, ragged_side)


def _dkdv_plan(
    problem: AttentionProblem,
    request: BackwardRequest,
    tile: DkdvTile,
    hdim: int,
    hdimv: int,
    adds_dq: bool = False,
    adds_dkdv: bool = False,
) -> BackwardDkdvPlan:
    mask = _mask(problem)
    return BackwardDkdvPlan(
        dtype=problem.dtype,
        tile_hdim=hdim,
        tile_hdimv=hdimv,
        tile_m=tile.m,
        tile_n=tile.n,
        q_stages=tile.q_stages,
        do_stages=tile.do_stages,
        splits_roles=tile.splits_roles,
        is_deferred=tile.is_deferred,
        adds_dq=adds_dq,
        adds_dkdv=adds_dkdv,
        scheduler=_scheduler(problem, mask),
        mask=mask,
        is_ragged=problem.ragged is not None,
        accumulates=request.accumulates and not adds_dkdv,
        v_in_registers=tile.causal_v_in_registers and mask == "causal" and problem.ragged is None and not adds_dkdv,
    )


def _dq_plan(problem: AttentionProblem, request: BackwardRequest, hdim: int, hdimv: int) -> BackwardDqPlan:
    mask = _mask(problem)
    tile = choose_dq_tile(hdim, hdimv, is_full=mask == "full")
    return BackwardDqPlan(
        dtype=problem.dtype,
        tile_hdim=hdim,
        tile_hdimv=hdimv,
        tile_m=tile.m,
        tile_n=tile.n,
        k_stages=tile.k_stages,
        v_stages=tile.v_stages,
        has_pingpong=tile.has_pingpong,
        scheduler=_scheduler(problem, mask),
        mask=mask,
        is_ragged=problem.ragged is not None,
        accumulates=request.accumulates,
    )
