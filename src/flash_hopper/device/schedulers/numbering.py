"""Schedulers: where a CTA's next tile number comes from. Called by the producer warp only, all lanes together."""

from typing import NamedTuple

from flash_hopper.device.dsl import Int32, cute


class StaticScheduler(NamedTuple):
    """CTA i computes tiles i, i + grid, i + 2 grid, ... No communication."""

    total: Int32

    def first(self) -> Int32:
        """The tile to start with; every CTA of the grid has one."""
        return cute.arch.block_idx()[0]

    def request(self, tile: Int32) -> Int32:
        """Ask for the tile after `tile`, early."""
        return tile + cute.arch.grid_dim()[0]

    def resolve(self, requested: Int32) -> Int32:
        """The tile number behind a request; >= total means that there is none."""
        return requested


class DynamicScheduler(NamedTuple):
    """CTAs draw numbers from a counter in global memory, so the fast ones take more tiles.

    counter: (1,) int32, zero before the first launch. Every tile leads to exactly one draw, so the draw that returns
    total - 1 is the launch's last and sets the counter back to zero for the next launch on its stream. A draw comes
    after `griddepcontrol_wait`, which makes the previous launch's reset visible.
    """

    total: Int32
    counter: cute.Tensor

    def first(self) -> Int32:
        """The tile to start with: the CTA's own number, without a draw."""
        return cute.arch.block_idx()[0]

    @cute.jit
    def request(self, tile: Int32) -> Int32:
        """Draw early; lane 0 holds the answer, and nobody waits for it yet."""
        drawn = Int32(0)
        if cute.arch.lane_idx() == 0:
            drawn = cute.arch.atomic_add(self.counter.iterator, Int32(1), sem="relaxed", scope="gpu")
        return drawn

    @cute.jit
    def resolve(self, requested: Int32) -> Int32:
        """The tile number drawn, the same in all lanes; >= total means that there is none."""
        drawn = cute.arch.shuffle_sync(requested, offset=0)
        if drawn == self.total - 1:
            if cute.arch.lane_idx() == 0:
                self.counter[0] = Int32(0)
        return drawn + cute.arch.grid_dim()[0]


def make_scheduler(kind: str, total: Int32, counter: cute.Tensor | None) -> StaticScheduler | DynamicScheduler:
    """The scheduler that a plan names, over tiles 0 .. total - 1."""
    return DynamicScheduler(total, counter) if kind == "dynamic" else StaticScheduler(total)
