"""Tiles from the scheduler warp to all others.

One warp finds a tile; each of the others reads a few integers. The end of work is a tile with a negative block.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Int32, cute, pipeline
from flash_hopper.device.pipelines import of_stream, thread_pipeline
from flash_hopper.device.sequences import make_batch
from flash_hopper.geometry.arith import round_up
from flash_hopper.plan.roles import PipelineSpec


def slot_ints(is_ragged: bool) -> int:
    """Ints of a slot: the fields of a tile, in whole 16-byte pieces."""
    return round_up(len(make_batch(is_ragged).tile_type._fields), 4)


def make_mailbox(spec: PipelineSpec, storage: Any, is_ragged: bool, stream: int = 0) -> "TileMailbox":
    """The mailbox of a stream (compile-time) in a kernel's `bar_tile` and `slots`; `spec` is the plan's tile pipeline."""
    shape = slot_ints(is_ragged), spec.stages
    slots = storage.slots.get_tensor(cute.make_layout(shape))
    if stream:
        slots = cute.domain_offset((0, stream * spec.stages), slots)
    return TileMailbox(thread_pipeline(spec, storage.bar_tile, stream=stream), slots)


class TileMailbox(NamedTuple):
    """slots: (ints, stages) in shared memory; pipe: one arrival fills a slot, one of each reading thread frees it.

    One of each warp would do if its lanes met in front of it; but what is a NOP in the code made ptxas spill 60 bytes of a backward kernel
    (2026-11). Without meeting, the others' reads are not ordered before the slot's next filling, and racecheck says so.
    """

    pipe: pipeline.PipelineAsync
    slots: cute.Tensor

    def of_stream(self, stream: Int32) -> "TileMailbox":
        """The mailbox of a stream (run-time, the same in a warp), from that of stream 0."""
        slots = cute.domain_offset((0, stream * self.pipe.num_stages), self.slots)
        return TileMailbox(of_stream(self.pipe, stream), slots)

    @property
    def tile_type(self) -> Any:
        """What a slot of this size holds."""
        return make_batch(cute.size(self.slots, mode=[0]) == slot_ints(True)).tile_type

    def post(self, state: Any, tile: Any) -> None:
        """Scheduler warp: put a tile into the next slot, once everybody has read what was there."""
        self.pipe.producer_acquire(state)
        with cute.arch.elect_one():
            for i, value in enumerate(tile):
                self.slots[i, state.index] = value
            self.pipe.producer_commit(state)

    def wait_read(self, state: Any) -> None:
        """Scheduler warp: until everybody has read what is in the next slot."""
        self.pipe.producer_acquire(state)

    def post_end(self, state: Any) -> None:
        """Scheduler warp: no more tiles."""
        self.post(state, self.tile_type(Int32(-1), *(Int32(0) for _ in self.tile_type._fields[1:])))

    def read(self, state: Any) -> Any:
        """Any other warp, all lanes: wait for the next tile, read it and free the slot, each lane for itself."""
        self.pipe.consumer_wait(state)
        fields = range(len(self.tile_type._fields))
        tile = self.tile_type(*(cute.arch.make_warp_uniform(self.slots[i, state.index]) for i in fields))
        self.pipe.consumer_release(state)
        return tile
