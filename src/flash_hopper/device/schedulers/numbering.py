"""Where a CTA's next tile number comes from. Called by a scheduler warp only, all lanes together.

Of a kernel whose CTAs have several streams, each counts as a CTA: stream s of CTA c is number c + s grid of streams * grid. So a few
tiles go to a CTA each.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Int32, cute


def first_number(streams: int, stream: Int32 | int) -> Int32:
    """The tile that a stream of this CTA starts with: its own number."""
    block = cute.arch.block_idx()[0]
    return block if streams == 1 else block + stream * cute.arch.grid_dim()[0]


def drawers(streams: int) -> Int32:
    """How many there are to hand out tiles to."""
    return cute.arch.grid_dim()[0] if streams == 1 else streams * cute.arch.grid_dim()[0]


class StaticScheduler(NamedTuple):
    """CTA i computes tiles i, i + grid, i + 2 grid, ... No communication."""

    total: Int32
    streams: int

    def following(self, number: Int32) -> Int32:
        """The number after `number`; >= total means that there is none."""
        return number + drawers(self.streams)


class DynamicScheduler(NamedTuple):
    """CTAs draw numbers from a counter in global memory, so the fast ones take more tiles. The first is a CTA's own.

    counter: (1,) int32, zero before the first launch. Every tile leads to exactly one draw, so the draw that returns
    total - 1 is the launch's last and sets the counter back to zero for the next launch on its stream. A draw comes
    after `griddepcontrol_wait`, which makes the previous launch's reset visible.
    """

    total: Int32
    counter: cute.Tensor
    streams: int

    @cute.jit
    def following(self, number: Int32) -> Int32:
        """The number drawn, the same in all lanes; >= total means that there is none."""
        drawn = draw(self.counter.iterator)
        if drawn == self.total - 1:
            if cute.arch.lane_idx() == 0:
                self.counter[0] = Int32(0)
        return drawn + drawers(self.streams)


@cute.jit
def draw(counter: Any) -> Int32:
    """Count one further; what was counted before, in all lanes."""
    drawn = Int32(0)
    if cute.arch.lane_idx() == 0:
        drawn = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(drawn, offset=0)


def make_scheduler(
    kind: str, total: Int32, counter: cute.Tensor | None, streams: int
) -> StaticScheduler | DynamicScheduler:
    """The scheduler that a plan names, over tiles 0 .. total - 1, of CTAs with so many streams."""
    return DynamicScheduler(total, counter, streams) if kind == "dynamic" else StaticScheduler(total, streams)
