"""Named barriers: their numbers, and the turns that warpgroups take at issuing GEMMs.

Barrier 0 is the whole CTA's. Each consumer warpgroup has one barrier of its own for the epilogue and one for its turn; warpgroups
are counted over all streams of a CTA.
"""

from typing import Any

from flash_hopper.device.dsl import Int32, cute, cutlass
from flash_hopper.plan.roles import WARP, WARPGROUP

EPILOGUE = 1  # + warpgroup: O staged in shared memory, or its buffer free again
ALL_CONSUMERS = 7
TURN = 8  # + warpgroup: this warpgroup may issue its GEMMs
MAIL_EMPTY, MAIL_FULL = 12, 14  # + warpgroup: its mailbox to the writer warp


def epilogue_sync(warpgroup: Int32) -> None:
    """All threads of one consumer warpgroup meet."""
    cute.arch.barrier(barrier_id=EPILOGUE + warpgroup, number_of_threads=WARPGROUP)


class Turns:
    """Ping-pong (specification 4.4): warpgroups issue their GEMMs one after the other, in a ring.

    A warpgroup waits on its own barrier, on which only its predecessor arrives. Every warpgroup takes the same number
    of turns per tile, so the arrival left over at the end of a tile serves the next one. `count` is compile-time; with
    `is_on` False, or one warpgroup, nothing is emitted. Of `rings` > 1 each has `count` warpgroups.
    """

    def __init__(self, count: int, is_on: bool, rings: int = 1) -> None:
        self.count = count
        self.is_on = is_on and count > 1
        self.rings = rings

    def first(self, warpgroup: Int32) -> Any:
        """The first warpgroup of this one's ring."""
        return 0 if self.rings == 1 else warpgroup // self.count * self.count

    @cute.jit
    def start(self, warpgroup: Int32) -> None:
        """The last warpgroup hands the first turn to the first one. Once per kernel."""
        if cutlass.const_expr(self.is_on):
            first = self.first(warpgroup)
            if warpgroup == first + self.count - 1:
                cute.arch.barrier_arrive(barrier_id=TURN + first, number_of_threads=2 * WARPGROUP)

    def wait(self, warpgroup: Int32) -> None:
        """Until the predecessor has passed its turn."""
        if self.is_on:
            cute.arch.barrier(barrier_id=TURN + warpgroup, number_of_threads=2 * WARPGROUP)

    def pass_on(self, warpgroup: Int32) -> None:
        """Give the turn to the next warpgroup of the ring."""
        if self.is_on:
            first = self.first(warpgroup)
            place = warpgroup - first
            successor = 1 - place if self.count == 2 else (place + 1) % self.count
            cute.arch.barrier_arrive(barrier_id=TURN + first + successor, number_of_threads=2 * WARPGROUP)


def all_consumers_sync(warpgroups: int) -> None:
    """All threads of all consumer warpgroups meet."""
    cute.arch.barrier(barrier_id=ALL_CONSUMERS, number_of_threads=warpgroups * WARPGROUP)


def mail_wait(warpgroup: Int32, is_full: bool) -> None:
    """A warpgroup waits for its mailbox to be empty, or the writer warp for it to be full; the other side arrives."""
    barrier = (MAIL_FULL if is_full else MAIL_EMPTY) + warpgroup
    cute.arch.barrier(barrier_id=barrier, number_of_threads=WARPGROUP + WARP)


def mail_arrive(warpgroup: Int32, is_full: bool) -> None:
    """Say that a warpgroup's mailbox is full, or (the writer warp) empty."""
    barrier = (MAIL_FULL if is_full else MAIL_EMPTY) + warpgroup
    cute.arch.barrier_arrive(barrier_id=barrier, number_of_threads=WARPGROUP + WARP)
