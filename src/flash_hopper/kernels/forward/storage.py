"""Shared memory of the forward kernel.

| buffer | holds | shares memory with | written by | read by |
|---|---|---|---|---|
| barriers | full and empty mbarriers of q, k, v, tile, o | - | all | all |
| slots | coordinates of the next tiles | - | scheduler | producer and consumer warps |
| sQ | (64, tile_hdim) per warpgroup and Q stage | sO, if the plan says so | TMA | wgmma |
| sK | (tile_n, tile_hdim) per K/V stage | - | TMA | wgmma |
| sV | (tile_n, tile_hdimv) per K/V stage | - | TMA | wgmma |
| sO | (64, tile_hdimv) per warpgroup | as `plan.o_place` says: nobody, the tile's own Q, or a stage of V | its warpgroup (stmatrix) | TMA store |

Of several streams each has all of this: a buffer holds that of stream 0, then that of stream 1, and `stream_view` is what a role sees.
A warpgroup's part of Q is contiguous, so that its O can take exactly that place once its own last QK is done. A stage of V is read by
all warpgroups: `Consumer.value_stage` says which and when.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import ELEMENT_TYPES, Int32, Int64, SmemAllocator, cute
from flash_hopper.device.layouts import stacked, tile_layout
from flash_hopper.device.pipelines import of_stream
from flash_hopper.device.schedulers.mailbox import slot_ints
from flash_hopper.kernels.forward.args import Pipelines, SharedTensors
from flash_hopper.plan.budget import check_shared_memory
from flash_hopper.plan.forward import ForwardPlan
from flash_hopper.plan.roles import forward_pipelines

WG_ROWS = 64
SWIZZLE_ALIGN = 1024


class TileLayouts(NamedTuple):
    """Layouts of one tile of each buffer; what TMA copies."""

    q: cute.ComposedLayout
    k: cute.ComposedLayout
    v: cute.ComposedLayout
    o: cute.ComposedLayout


def tile_layouts(plan: ForwardPlan) -> TileLayouts:
    """One warpgroup's Q and O, one stage of K and V."""
    dtype = ELEMENT_TYPES[plan.dtype]
    return TileLayouts(
        q=tile_layout(WG_ROWS, plan.tile_hdim, dtype),
        k=tile_layout(plan.tile_n, plan.tile_hdim, dtype),
        v=tile_layout(plan.tile_n, plan.tile_hdimv, dtype),
        o=tile_layout(WG_ROWS, plan.tile_hdimv, dtype),
    )


def _sizes(plan: ForwardPlan) -> tuple[int, int, int, int]:
    """Elements of one warpgroup's Q slot, one K stage, one V stage, one warpgroup's O."""
    q, o = WG_ROWS * plan.tile_hdim, WG_ROWS * plan.tile_hdimv
    return max(q, o) if plan.o_place == "q" else q, plan.tile_n * plan.tile_hdim, plan.tile_n * plan.tile_hdimv, o


def shared_struct(plan: ForwardPlan) -> Any:
    """The struct to allocate. Raises CompileError if it exceeds what a CTA may have; the compiler would not."""
    dtype = ELEMENT_TYPES[plan.dtype]
    specs = forward_pipelines(plan)
    q, k, v, o = _sizes(plan)
    wgs, stages, streams = plan.consumer_warpgroups, plan.kv_stages, plan.streams
    tensor = cute.struct.MemRange
    align = cute.struct.Align

    @cute.struct
    class Shared:
        bar_q: tensor[Int64, streams * 2 * specs["q"].stages]
        bar_k: tensor[Int64, streams * 2 * specs["k"].stages]
        bar_v: tensor[Int64, streams * 2 * specs["v"].stages]
        bar_o: tensor[Int64, streams * 2 * specs["o"].stages if "o" in specs else 0]
        bar_tile: tensor[Int64, streams * 2 * specs["tile"].stages]
        slots: align[tensor[Int32, streams * slot_ints(plan.is_ragged) * specs["tile"].stages], 16]
        sQ: align[tensor[dtype, streams * q * wgs * plan.q_stages], SWIZZLE_ALIGN]
        sK: align[tensor[dtype, streams * k * stages], SWIZZLE_ALIGN]
        sV: align[tensor[dtype, streams * v * stages], SWIZZLE_ALIGN]
        sO: align[tensor[dtype, streams * o * wgs if plan.o_place == "apart" else 0], SWIZZLE_ALIGN]

    check_shared_memory(plan.name, Shared.size_in_bytes())
    return Shared


def allocate(plan: ForwardPlan, struct: Any, tiles: TileLayouts) -> tuple[Any, SharedTensors]:
    """In the kernel: the storage object (for barriers and slots) and the tensors in it, of several streams with one mode more."""
    storage = SmemAllocator().allocate(struct)
    q, k, v, o = _sizes(plan)
    wgs, stages = plan.consumer_warpgroups, plan.kv_stages

    def tensor(field: Any, tile: cute.ComposedLayout, count: int, stride: int) -> cute.Tensor:
        outer = stacked(tile, count, stride)
        if plan.streams > 1:
            outer = cute.append(outer, cute.make_layout(plan.streams, stride=count * stride))
        return field.get_tensor(outer, swizzle=tile.inner)

    return storage, SharedTensors(
        sQ=tensor(storage.sQ, tiles.q, wgs * plan.q_stages, q),
        sK=tensor(storage.sK, tiles.k, stages, k),
        sV=tensor(storage.sV, tiles.v, stages, v),
        sO={
            "apart": lambda: tensor(storage.sO, tiles.o, wgs, o),
            "q": lambda: tensor(storage.sQ, tiles.o, wgs * plan.q_stages, q),
            "v": lambda: tensor(storage.sV, tiles.o, stages, v),
        }[plan.o_place](),
    )


def stream_view(
    plan: ForwardPlan, shared: SharedTensors, pipes: Pipelines, stream: Int32
) -> tuple[SharedTensors, Pipelines]:
    """What a role of this stream (run-time, the same in a warp) sees of the buffers, and of the pipelines of stream 0."""
    if plan.streams == 1:
        return shared, pipes
    own = SharedTensors(*(t[None, None, None, stream] for t in shared))
    q, k, v, o = (None if pipe is None else of_stream(pipe, stream) for pipe in (pipes.q, pipes.k, pipes.v, pipes.o))
    return own, Pipelines(q, k, v, pipes.tiles.of_stream(stream), o)
