"""Shared memory of the key-parallel backward kernel.

| buffer | holds | shares memory with | written by | read by |
|---|---|---|---|---|
| barriers | full and empty mbarriers of keys, q, do, tile, p | - | all | all |
| slots | coordinates of the next tiles | - | producer | consumer warps |
| sLSE, sDelta | statistics of tile_m rows per stage | - | TMA | consumers |
| sP | P^T, register by register, split roles only | - | the P warpgroup | the dS warpgroup |
| sdS | dS^T, (tile_n, tile_m), two of them, if dQ is added up | dK on its way out | consumers (stmatrix) | wgmma of both warpgroups |
| sdQ | 64 x 64 of dQ per warpgroup, register by register, if dQ is added up | dV on its way out | its warpgroup | bulk reduce-add |
| sQ, sdO | (tile_m, head dim) per stage | - | TMA | wgmma, in both orientations |
| sK, sV | (64, head dim) per band of 64 keys | dK and dV on their way out, unless dQ is added up | TMA, then a warpgroup | wgmma, then TMA store |
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import ELEMENT_TYPES, Float32, Int32, Int64, SmemAllocator, cute
from flash_hopper.device.layouts import stacked, tile_layout
from flash_hopper.device.schedulers.mailbox import slot_ints
from flash_hopper.kernels.backward_dkdv.args import SharedTensors
from flash_hopper.plan.backward import DQ_PIECE, BackwardDkdvPlan
from flash_hopper.plan.budget import check_shared_memory
from flash_hopper.plan.roles import WARPGROUP, backward_dkdv_pipelines

WG_KEYS = 64
SWIZZLE_ALIGN = 1024
DS_STAGES = 2  # so that one barrier a block suffices: the other buffer is still being read


class TileLayouts(NamedTuple):
    """Layouts of one tile of each buffer; what TMA copies."""

    q: cute.ComposedLayout
    do: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    ds: cute.ComposedLayout


def dq_by_thread() -> cute.Layout:
    """(register % 4, register // 4, thread, warpgroup) of a 64 x 64 accumulator piece: 16 bytes a thread side by side.

    The accumulator in memory has the same order, so the postprocess kernel reads back what each thread held.
    """
    return cute.make_layout((4, DQ_PIECE // (4 * WARPGROUP), WARPGROUP, 2), stride=(1, 4 * WARPGROUP, 4, DQ_PIECE))


def tile_layouts(plan: BackwardDkdvPlan) -> TileLayouts:
    """One stage of Q and dO, one band of K and V."""
    dtype = ELEMENT_TYPES[plan.dtype]
    return TileLayouts(
        q=tile_layout(plan.tile_m, plan.tile_hdim, dtype),
        do=tile_layout(plan.tile_m, plan.tile_hdimv, dtype),
        k=tile_layout(WG_KEYS, plan.tile_hdim, dtype),
        v=tile_layout(WG_KEYS, plan.tile_hdimv, dtype),
        ds=tile_layout(plan.tile_n, plan.tile_m, dtype),
    )


def shared_struct(plan: BackwardDkdvPlan) -> Any:
    """The struct to allocate, checked against what a CTA may have."""
    dtype = ELEMENT_TYPES[plan.dtype]
    specs = backward_dkdv_pipelines(plan)
    array = cute.struct.MemRange
    align = cute.struct.Align
    m = plan.tile_m

    @cute.struct
    class Shared:
        bar_keys: array[Int64, 2 * specs["keys"].stages]
        bar_q: array[Int64, 2 * specs["q"].stages]
        bar_do: array[Int64, 2 * specs["do"].stages]
        bar_tile: array[Int64, 2 * specs["tile"].stages]
        bar_p: array[Int64, 2 if plan.splits_roles else 0]
        slots: align[array[Int32, slot_ints(plan.is_ragged) * specs["tile"].stages], 16]
        sLSE: align[array[Float32, m * plan.q_stages], 128]
        sDelta: align[array[Float32, m * plan.do_stages], 128]
        sP: align[array[Float32, m // 2 * WARPGROUP if plan.splits_roles else 0], 16]
        sdQ: align[array[Float32, DQ_PIECE * 2 if plan.adds_dq else 0], SWIZZLE_ALIGN]
        sdS: align[array[dtype, plan.tile_n * m * DS_STAGES if plan.adds_dq else 0], SWIZZLE_ALIGN]
        sQ: align[array[dtype, m * plan.tile_hdim * plan.q_stages], SWIZZLE_ALIGN]
        sdO: align[array[dtype, m * plan.tile_hdimv * plan.do_stages], SWIZZLE_ALIGN]
        sK: align[array[dtype, plan.tile_n * plan.tile_hdim], SWIZZLE_ALIGN]
        sV: align[array[dtype, plan.tile_n * plan.tile_hdimv], SWIZZLE_ALIGN]

    check_shared_memory(plan.name, Shared.size_in_bytes())
    return Shared


def allocate(plan: BackwardDkdvPlan, struct: Any, tiles: TileLayouts) -> tuple[Any, SharedTensors]:
    """In the kernel: the storage object (for barriers and slots) and the tensors in it."""
    storage = SmemAllocator().allocate(struct)
    m, bands = plan.tile_m, plan.tile_n // WG_KEYS

    def tensor(field: Any, tile: cute.ComposedLayout, count: int, stride: int) -> cute.Tensor:
        return field.get_tensor(stacked(tile, count, stride), swizzle=tile.inner)

    if plan.adds_dq:
        sdK = tensor(storage.sdS, tiles.k, bands, WG_KEYS * plan.tile_hdim)
        sdV = storage.sdQ.get_tensor(
            stacked(tiles.v, bands, 2 * DQ_PIECE), swizzle=tiles.v.inner, dtype=ELEMENT_TYPES[plan.dtype]
        )
    else:
        sdK = tensor(storage.sK, tiles.k, bands, WG_KEYS * plan.tile_hdim)
        sdV = tensor(storage.sV, tiles.v, bands, WG_KEYS * plan.tile_hdimv)
    by_thread = cute.make_layout((4, m // 8, WARPGROUP), stride=(1, 4 * WARPGROUP, 4))  # 16 bytes a thread
    return storage, SharedTensors(
        sQ=tensor(storage.sQ, tiles.q, plan.q_stages, m * plan.tile_hdim),
        sdO=tensor(storage.sdO, tiles.do, plan.do_stages, m * plan.tile_hdimv),
        sK=tensor(storage.sK, tiles.k, bands, WG_KEYS * plan.tile_hdim),
        sV=tensor(storage.sV, tiles.v, bands, WG_KEYS * plan.tile_hdimv),
        sdK=sdK,
        sdV=sdV,
        sLSE=storage.sLSE.get_tensor(cute.make_layout((m, plan.q_stages))),
        sDelta=storage.sDelta.get_tensor(cute.make_layout((m, plan.do_stages))),
        sP=storage.sP.get_tensor(by_thread) if plan.splits_roles else None,
        sdS=tensor(storage.sdS, tiles.ds, DS_STAGES, plan.tile_n * m) if plan.adds_dq else None,
        sdQ=storage.sdQ.get_tensor(dq_by_thread()) if plan.adds_dq else None,
    )
