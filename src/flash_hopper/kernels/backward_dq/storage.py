"""Shared memory of the query-parallel backward kernel.

| buffer | holds | shares memory with | written by | read by |
|---|---|---|---|---|
| barriers | full and empty mbarriers of rows, k, v, tile | - | all | all |
| slots | coordinates of the next tiles | - | producer | consumer warps |
| sQ | (64, tile_hdim) per warpgroup | dQ on its way out | TMA, then its warpgroup | wgmma, then TMA store |
| sdO | (64, tile_hdimv) per warpgroup | - | TMA | wgmma |
| sK | (tile_n, tile_hdim) per K stage | - | TMA | wgmma, in both orientations |
| sV | (tile_n, tile_hdimv) per V stage | - | TMA | wgmma |
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import ELEMENT_TYPES, Int32, Int64, SmemAllocator, cute
from flash_hopper.device.layouts import stacked, tile_layout
from flash_hopper.device.schedulers.mailbox import slot_ints
from flash_hopper.kernels.backward_dq.args import SharedTensors
from flash_hopper.plan.backward import BackwardDqPlan
from flash_hopper.plan.budget import check_shared_memory
from flash_hopper.plan.roles import backward_dq_pipelines

WG_ROWS = 64
SWIZZLE_ALIGN = 1024


class TileLayouts(NamedTuple):
    """Layouts of one tile of each buffer; what TMA copies."""

    q: cute.ComposedLayout
    do: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout


def tile_layouts(plan: BackwardDqPlan) -> TileLayouts:
    """One warpgroup's Q and dO, one stage of K and V."""
    dtype = ELEMENT_TYPES[plan.dtype]
    return TileLayouts(
        q=tile_layout(WG_ROWS, plan.tile_hdim, dtype),
        do=tile_layout(WG_ROWS, plan.tile_hdimv, dtype),
        k=tile_layout(plan.tile_n, plan.tile_hdim, dtype),
        v=tile_layout(plan.tile_n, plan.tile_hdimv, dtype),
    )


def shared_struct(plan: BackwardDqPlan) -> Any:
    """The struct to allocate, checked against what a CTA may have."""
    dtype = ELEMENT_TYPES[plan.dtype]
    specs = backward_dq_pipelines(plan)
    wgs = plan.consumer_warpgroups
    array = cute.struct.MemRange
    align = cute.struct.Align

    @cute.struct
    class Shared:
        bar_rows: array[Int64, 2 * specs["rows"].stages]
        bar_k: array[Int64, 2 * specs["k"].stages]
        bar_v: array[Int64, 2 * specs["v"].stages]
        bar_tile: array[Int64, 2 * specs["tile"].stages]
        slots: align[array[Int32, slot_ints(plan.is_ragged) * specs["tile"].stages], 16]
        sQ: align[array[dtype, WG_ROWS * plan.tile_hdim * wgs], SWIZZLE_ALIGN]
        sdO: align[array[dtype, WG_ROWS * plan.tile_hdimv * wgs], SWIZZLE_ALIGN]
        sK: align[array[dtype, plan.tile_n * plan.tile_hdim * plan.k_stages], SWIZZLE_ALIGN]
        sV: align[array[dtype, plan.tile_n * plan.tile_hdimv * plan.v_stages], SWIZZLE_ALIGN]

    check_shared_memory(plan.name, Shared.size_in_bytes())
    return Shared


def allocate(plan: BackwardDqPlan, struct: Any, tiles: TileLayouts) -> tuple[Any, SharedTensors]:
    """In the kernel: the storage object (for barriers and slots) and the tensors in it."""
    storage = SmemAllocator().allocate(struct)
    wgs = plan.consumer_warpgroups

    def tensor(field: Any, tile: cute.ComposedLayout, count: int, stride: int) -> cute.Tensor:
        return field.get_tensor(stacked(tile, count, stride), swizzle=tile.inner)

    return storage, SharedTensors(
        sQ=tensor(storage.sQ, tiles.q, wgs, WG_ROWS * plan.tile_hdim),
        sdO=tensor(storage.sdO, tiles.do, wgs, WG_ROWS * plan.tile_hdimv),
        sK=tensor(storage.sK, tiles.k, plan.k_stages, plan.tile_n * plan.tile_hdim),
        sV=tensor(storage.sV, tiles.v, plan.v_stages, plan.tile_n * plan.tile_hdimv),
    )
