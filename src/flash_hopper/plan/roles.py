"""Warps of a kernel: threads, registers, barrier arrivals and transaction bytes.

The numbers a kernel hands to its barriers are computed here and compared with what the kernel passes, so that a
mismatch fails the compile with the arithmetic instead of hanging the GPU.
"""

from dataclasses import dataclass
from typing import Protocol

from flash_hopper.plan.backward import BackwardDkdvPlan, BackwardDqPlan
from flash_hopper.plan.budget import REGISTERS
from flash_hopper.plan.forward import ForwardPlan
from flash_hopper.plan.forward_fp8 import ForwardFp8Plan
from flash_hopper.problem.errors import CompileError

WARP = 32
WARPGROUP = 128
REGISTER_FILE = 65_536
STATISTIC_BYTES = 4  # LSE or D of one row
PRODUCER, SCHEDULER = 0, 1  # warps of the first warpgroup, of each stream in turn
STREAM_WARPS = 2  # that many
TILE_SLOTS = 2  # tiles that may be posted and not read by everybody
TIGHT_REGISTERS = {2: (24, 240)}  # where the consumers need every register, in place of `budget.REGISTERS`


@dataclass(frozen=True, slots=True)
class Roles:
    """Threads and registers of one producer warpgroup and the consumers, and the arrivals their barriers count.

    `consumer_warpgroups`: of all `streams`.
    """

    consumer_warpgroups: int
    producer_registers: int
    consumer_registers: int
    streams: int = 1

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return WARPGROUP * (1 + self.consumer_warpgroups)

    @property
    def consumer_warps(self) -> int:
        """Arrivals that free a stage: one a consumer warp of the stream."""
        return self.consumer_warpgroups // self.streams * WARPGROUP // WARP

    def check_registers(self) -> None:
        """setmaxnreg.inc waits for ever if the sum exceeds what the launch allocated."""
        at_launch = REGISTER_FILE // self.threads // 8 * 8
        pool = at_launch * self.threads
        wanted = WARPGROUP * (self.producer_registers + self.consumer_warpgroups * self.consumer_registers)
        if wanted > pool:
            raise CompileError(
                f"{wanted} registers wanted ({self.producer_registers} a producer thread, {self.consumer_registers} a "
                f"thread of {self.consumer_warpgroups} consumer warpgroups), the launch allocates {at_launch} x "
                f"{self.threads} threads = {pool}"
            )


class HasConsumers(Protocol):
    """Any plan of a kernel with one producer warpgroup and consumers."""

    kind: str

    @property
    def consumer_warpgroups(self) -> int:
        """Warpgroups that compute, of a stream if there are several."""


def roles_of(plan: HasConsumers) -> Roles:
    """Roles of a plan's kernel, checked."""
    table = TIGHT_REGISTERS if _is_tight(plan) else REGISTERS
    streams = plan.streams if isinstance(plan, ForwardPlan) else 1
    warpgroups = plan.consumer_warpgroups * streams
    roles = Roles(warpgroups, *table[warpgroups], streams)
    roles.check_registers()
    return roles


def _is_tight(plan: HasConsumers) -> bool:
    """True if the consumers need every register, and the producer can do with few."""
    if isinstance(plan, BackwardDkdvPlan):
        return not (plan.splits_roles and plan.is_ragged)
    return isinstance(plan, ForwardFp8Plan) and plan.is_tight


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """One mbarrier pipeline: what a stage holds, who frees it and with how many arrivals and bytes."""

    name: str
    stages: int
    consumer_arrivals: int
    tx_bytes: int


def forward_pipelines(plan: ForwardPlan | ForwardFp8Plan) -> dict[str, PipelineSpec]:
    """The pipelines of a stream of the forward by name: q, k, v, and tile, which carries coordinates instead of data; o,
    if O lies in stages of V, says that they are V's again."""
    warps = roles_of(plan).consumer_warps
    size = plan.dtype.itemsize
    specs = [
        PipelineSpec("q", plan.q_stages, warps, plan.tile_m * plan.tile_hdim * size),
        PipelineSpec("k", plan.kv_stages, warps, plan.tile_n * plan.tile_hdim * size),
        PipelineSpec("v", plan.kv_stages, warps, plan.tile_n * plan.tile_hdimv * size),
        PipelineSpec("tile", TILE_SLOTS, WARP * (warps + 1), 0),  # each thread that reads; the producer does, too
        *([PipelineSpec("o", 1, 1, 0)] if plan.o_place == "v" else []),
    ]
    return {spec.name: spec for spec in specs}


def backward_dq_pipelines(plan: BackwardDqPlan) -> dict[str, PipelineSpec]:
    """Pipelines of the query-parallel backward kernel: rows (Q and dO of a tile), k, v, tile."""
    warps = roles_of(plan).consumer_warps
    size = plan.dtype.itemsize
    specs = [
        PipelineSpec("rows", 1, warps, plan.tile_m * (plan.tile_hdim + plan.tile_hdimv) * size),
        PipelineSpec("k", plan.k_stages, warps, plan.tile_n * plan.tile_hdim * size),
        PipelineSpec("v", plan.v_stages, warps, plan.tile_n * plan.tile_hdimv * size),
        PipelineSpec("tile", TILE_SLOTS, WARP * (warps + 1), 0),  # each thread that reads; the producer does, too
    ]
    return {spec.name: spec for spec in specs}


def backward_dkdv_pipelines(plan: BackwardDkdvPlan) -> dict[str, PipelineSpec]:
    """Pipelines of the key-parallel backward kernel: keys (K and V of a tile), q with LSE, do with D, tile; with split roles
    p, from one consumer warpgroup to the other."""
    warps = roles_of(plan).consumer_warps
    size = plan.dtype.itemsize
    specs = [
        PipelineSpec("keys", 1, warps, plan.tile_n * (plan.tile_hdim + plan.tile_hdimv) * size),
        PipelineSpec("q", plan.q_stages, warps, plan.tile_m * (plan.tile_hdim * size + STATISTIC_BYTES)),
        PipelineSpec("do", plan.do_stages, warps, plan.tile_m * (plan.tile_hdimv * size + STATISTIC_BYTES)),
        PipelineSpec("tile", TILE_SLOTS, WARP * (warps + plan.adds_dq), 0),  # the dQ writer does, too
        *([PipelineSpec("p", 1, WARPGROUP, 0)] if plan.splits_roles else []),  # every thread reads its own part
    ]
    return {spec.name: spec for spec in specs}
