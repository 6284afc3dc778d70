"""Where a CTA's next tile number comes from. Called by the scheduler warp only, all lanes together."""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Int32, cute


class StaticScheduler(NamedTuple):
    """CTA i computes tiles i, i + grid, i + 2 grid, ... No communication."""

    total: Int32

    def following(self, number: Int32) -> Int32:
        """The number after `number`; >= total means that there is none."""
        return number + cute.arch.grid_dim()[0]


class DynamicScheduler(NamedTuple):
    """CTAs draw numbers from a counter in global memory, so the fast ones take more tiles. The first is a CTA's own.

    counter: (1,) int32, zero before the first launch. Every tile leads to exactly one draw, so the draw that returns
    total - 1 is the launch's last and sets the counter back to zero for the next launch on its stream. A draw comes
    after `griddepcontrol_wait`, which makes the previous launch's reset visible.
    """

    total: Int32
    counter: cute.Tensor

    @cute.jit
    def following(self, number: Int32) -> Int32:
        """The number drawn, the same in all lanes; >= total means that there is none."""
        drawn = draw(self.counter.iterator)
        if drawn == self.total - 1:
            if cute.arch.lane_idx() == 0:
                self.counter[0] = Int32(0)
        return drawn + cute.arch.grid_dim()[0]


@cute.jit
def draw(counter: Any) -> Int32:
    """Count one further; what was counted before, in all lanes."""
    drawn = Int32(0)
    if cute.arch.lane_idx() == 0:
        drawn = cute.arch.atomic_add(counter, Int32(1), sem="relaxed", scope="gpu")
    return cute.arch.shuffle_sync(drawn, offset=0)


def make_scheduler(kind: str, total: Int32, counter: cute.Tensor | None) -> StaticScheduler | DynamicScheduler:
    """The scheduler that a plan names, over tiles 0 .. total - 1."""
    return DynamicScheduler(total, counter) if kind == "dynamic" else StaticScheduler(total)
