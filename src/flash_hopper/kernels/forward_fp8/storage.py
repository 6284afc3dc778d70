"""Shared memory of the e4m3 forward kernel.

| buffer | holds | shares memory with | written by | read by |
|---|---|---|---|---|
| barriers | full and empty mbarriers of q, k, v, tile | - | all | all |
| slots | coordinates of the next tiles | - | scheduler | producer and consumer warps |
| sQ | (64, tile_hdim) per warpgroup and Q stage | sO, if the plan says so | TMA | wgmma |
| sK | (tile_n, tile_hdim) per K/V stage | - | TMA | wgmma |
| sV | V^T, (tile_hdimv, tile_n) per K/V stage, and behind it 8 rows of ones if row sums come from PV | - | TMA; ones once, by all | wgmma |
| sOnes | (8, tile_n) of ones if row sums are a product of their own | - | once, by all | wgmma |
| sO | (64, tile_hdimv) of 16 bit per warpgroup | the tile's own Q, if the plan says so | its warpgroup (stmatrix) | TMA store |
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import ELEMENT_TYPES, Int32, Int64, SmemAllocator, cute
from flash_hopper.device.layouts import stacked, tile_layout
from flash_hopper.device.schedulers.mailbox import slot_ints
from flash_hopper.kernels.forward.storage import SWIZZLE_ALIGN, WG_ROWS
from flash_hopper.plan.budget import check_shared_memory
from flash_hopper.plan.forward_fp8 import SUM_COLUMNS, ForwardFp8Plan
from flash_hopper.plan.roles import forward_pipelines

ONES = 0x38383838  # four times 1.0 in e4m3


class TileLayouts(NamedTuple):
    """Layouts of one tile of each buffer; what TMA copies, and for V what wgmma reads."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout  # (tile_hdimv, tile_n)
    o: cute.ComposedLayout
    v_operand: cute.ComposedLayout  # (plan.value_rows, tile_n)
    ones: cute.ComposedLayout  # (SUM_COLUMNS, tile_n)


class Fp8SharedTensors(NamedTuple):
    """The buffers of the table."""

    sQ: cute.Tensor  # (64, tile_hdim, warpgroup + warpgroups * stage)
    sK: cute.Tensor  # (tile_n, tile_hdim, stage)
    sV: cute.Tensor  # (tile_hdimv, tile_n, stage)
    sO: cute.Tensor  # (64, tile_hdimv, warpgroup)
    sV_operand: cute.Tensor  # (plan.value_rows, tile_n, stage), the same memory as sV
    sOnes: cute.Tensor | None  # (SUM_COLUMNS, tile_n, 1)


def tile_layouts(plan: ForwardFp8Plan) -> TileLayouts:
    """One warpgroup's Q and O, one stage of K and V."""
    dtype = ELEMENT_TYPES[plan.dtype]
    # rows of one swizzle: V and V with rows of ones behind it have the same places then
    assert plan.tile_n in (32, 64, 128), f"rows of a transposed V have {plan.tile_n} bytes"
    return TileLayouts(
        q=tile_layout(WG_ROWS, plan.tile_hdim, dtype),
        k=tile_layout(plan.tile_n, plan.tile_hdim, dtype),
        v=tile_layout(plan.tile_hdimv, plan.tile_n, dtype),
        o=tile_layout(WG_ROWS, plan.tile_hdimv, ELEMENT_TYPES[plan.out_dtype]),
        v_operand=tile_layout(plan.value_rows, plan.tile_n, dtype),
        ones=tile_layout(SUM_COLUMNS, plan.tile_n, dtype),
    )


class _Sizes(NamedTuple):
    """Bytes of one warpgroup's Q slot, one K stage, one V stage, one warpgroup's O."""

    q: int
    k: int
    v: int
    o: int


def _sizes(plan: ForwardFp8Plan) -> _Sizes:
    q, o = WG_ROWS * plan.tile_hdim, WG_ROWS * plan.tile_hdimv * plan.out_dtype.itemsize
    q = max(q, o) if plan.o_place == "q" else q
    return _Sizes(q, plan.tile_n * plan.tile_hdim, plan.tile_n * plan.value_rows, o)


def shared_struct(plan: ForwardFp8Plan) -> Any:
    """The struct to allocate. Raises CompileError if it exceeds what a CTA may have; the compiler would not."""
    dtype, out_dtype = ELEMENT_TYPES[plan.dtype], ELEMENT_TYPES[plan.out_dtype]
    specs = forward_pipelines(plan)
    sizes = _sizes(plan)
    wgs, stages = plan.consumer_warpgroups, plan.kv_stages
    o_count = 0 if plan.o_place == "q" else sizes.o // plan.out_dtype.itemsize * wgs
    tensor = cute.struct.MemRange
    align = cute.struct.Align

    @cute.struct
    class Shared:
        bar_q: tensor[Int64, 2 * specs["q"].stages]
        bar_k: tensor[Int64, 2 * specs["k"].stages]
        bar_v: tensor[Int64, 2 * specs["v"].stages]
        bar_tile: tensor[Int64, 2 * specs["tile"].stages]
        slots: align[tensor[Int32, slot_ints(plan.is_ragged) * specs["tile"].stages], 16]
        sQ: align[tensor[dtype, sizes.q * wgs * plan.q_stages], SWIZZLE_ALIGN]
        sK: align[tensor[dtype, sizes.k * stages], SWIZZLE_ALIGN]
        sV: align[tensor[dtype, sizes.v * stages], SWIZZLE_ALIGN]
        sOnes: align[tensor[dtype, SUM_COLUMNS * plan.tile_n * plan.has_ones_apart], SWIZZLE_ALIGN]
        sO: align[tensor[out_dtype, o_count], SWIZZLE_ALIGN]

    check_shared_memory(plan.name, Shared.size_in_bytes())
    return Shared


def allocate(plan: ForwardFp8Plan, struct: Any, tiles: TileLayouts) -> tuple[Any, Fp8SharedTensors]:
    """In the kernel: the storage object (for barriers and slots) and the tensors in it."""
    storage = SmemAllocator().allocate(struct)
    sizes = _sizes(plan)
    wgs, stages = plan.consumer_warpgroups, plan.kv_stages

    def tensor(field: Any, tile: cute.ComposedLayout, count: int, stride: int, **view: Any) -> cute.Tensor:
        return field.get_tensor(stacked(tile, count, stride), swizzle=tile.inner, **view)

    out_dtype, out_bytes = ELEMENT_TYPES[plan.out_dtype], plan.out_dtype.itemsize
    return storage, Fp8SharedTensors(
        sQ=tensor(storage.sQ, tiles.q, wgs * plan.q_stages, sizes.q),
        sK=tensor(storage.sK, tiles.k, stages, sizes.k),
        sV=tensor(storage.sV, tiles.v, stages, sizes.v),
        sO=(
            tensor(storage.sQ, tiles.o, wgs * plan.q_stages, sizes.q // out_bytes, dtype=out_dtype)
            if plan.o_place == "q"
            else tensor(storage.sO, tiles.o, wgs, sizes.o // out_bytes)
        ),
        sV_operand=tensor(storage.sV, tiles.v_operand, stages, sizes.v),
        sOnes=tensor(storage.sOnes, tiles.ones, 1, 0) if plan.has_ones_apart else None,
    )


@cute.jit
def write_ones(plan: ForwardFp8Plan, storage: Any, thread: Int32) -> None:
    """The rows of ones, behind V in every stage or apart: all threads, before the barrier that ends the set-up."""
    words = SUM_COLUMNS * plan.tile_n // 4
    step = plan.value_rows * plan.tile_n // 4
    first, copies = (0, 1) if plan.has_ones_apart else (step - words, plan.kv_stages)
    buffer = storage.sOnes if plan.has_ones_apart else storage.sV
    memory = cute.make_tensor(
        cute.recast_ptr(buffer.data_ptr(), dtype=Int32), cute.make_layout(first + (copies - 1) * step + words)
    )
    if thread < words:
        for copy in range(copies):
            memory[first + copy * step + thread] = Int32(ONES)
    cute.arch.fence_proxy("async.shared", space="cta")  # these writes, before wgmma reads them


__all__ = [
    "Fp8SharedTensors",
    "TileLayouts",
    "allocate",
    "shared_struct",
    "tile_layouts",
    "write_ones",
]
