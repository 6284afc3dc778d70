"""Tile coordinates from the producer warp to the consumers, two tiles ahead.

The producer does the divisions of `geometry/tiles.py` once; a consumer warp reads three integers. The end of work is a
coordinate with a negative block.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Int32, cute, pipeline
from flash_hopper.device.pipelines import thread_pipeline
from flash_hopper.geometry.tiles import TileCoord
from flash_hopper.plan.roles import PipelineSpec

SLOT_INTS = 4  # block, head, batch, padding: one 16-byte slot


def make_mailbox(spec: PipelineSpec, storage: Any) -> "TileMailbox":
    """The mailbox in a kernel's `bar_tile` and `slots`; `spec` is the plan's tile pipeline."""
    slots = storage.slots.get_tensor(cute.make_layout((SLOT_INTS, spec.stages)))
    return TileMailbox(thread_pipeline(spec, storage.bar_tile), slots)


class TileMailbox(NamedTuple):
    """slots: (SLOT_INTS, stages) int32 in shared memory; pipe: one arrival fills a slot, one a consumer warp frees it."""

    pipe: pipeline.PipelineAsync
    slots: cute.Tensor

    def post(self, state: Any, coord: TileCoord) -> None:
        """Producer warp: put a coordinate into the next slot, once the consumers have read what was there."""
        self.pipe.producer_acquire(state)
        with cute.arch.elect_one():
            for i in range(3):
                self.slots[i, state.index] = coord[i]
            self.pipe.producer_commit(state)

    def post_end(self, state: Any) -> None:
        """Producer warp: no more tiles."""
        self.post(state, TileCoord(Int32(-1), Int32(0), Int32(0)))

    def read(self, state: Any) -> TileCoord:
        """Consumer warp, all lanes: wait for the next coordinate, read it and free its slot."""
        self.pipe.consumer_wait(state)
        # the shuffle inside make_warp_uniform hands out lane 0's load, so the slot may be freed once it is done
        coord = TileCoord(*(cute.arch.make_warp_uniform(self.slots[i, state.index]) for i in range(3)))
        with cute.arch.elect_one():
            self.pipe.consumer_release(state)
        return coord
