"""The order in which a tile of keys visits query blocks: the same for producer, consumers and dQ writer."""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Int32, cute, cutlass
from flash_hopper.device.sequences import make_batch
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.blocks import query_blocks
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs
from flash_hopper.plan.backward import BackwardDkdvPlan


class QuerySchedule(NamedTuple):
    """`count` blocks a query head, from `first` upwards, with a wrap from `end` to `start`; masks start at `start`."""

    first: Int32
    count: Int32
    start: Int32
    end: Int32

    def visit(self, i: Int32) -> Int32:
        """The block visited as number `i` of a head, from 0."""
        block = self.first + i
        return block - cutlass.select_(block < self.end, 0, self.count)

    @cute.jit
    def after(self, m_block: Int32) -> Int32:
        """The block after `m_block`; after a head's last one, the next head's first."""
        following = m_block + 1
        if following == self.end:
            following = Int32(self.start)
        return following


def query_schedule(plan: BackwardDkdvPlan, args: DkdvArgs, tile: Any) -> QuerySchedule:
    """Tiles start at the first query that sees them. With full attention, where dQ is added up in memory, tiles of one
    head start at different blocks, so that they do not add to the same rows at the same time."""
    batch = make_batch(plan.is_ragged)
    lengths = batch.lengths(tile, args.mQ, args.mK)
    blocks = query_blocks(tile.block * plan.tile_n, plan.tile_n, lengths, plan.tile_m, args.mask(plan.mask))
    count = blocks.end - blocks.start
    first = Int32(blocks.start)
    if plan.adds_dq and plan.mask == "full":
        n_blocks = ceil_div(batch.stored_keys_count(tile, args.mK), plan.tile_n)
        first = tile.block * count // n_blocks
    return QuerySchedule(first, count, Int32(blocks.start), Int32(blocks.end))


def query_heads(plan: BackwardDkdvPlan, args: DkdvArgs) -> Int32:
    """Query heads that a tile visits: all of its key head, or one if dK and dV are added up in memory."""
    return Int32(1) if plan.adds_dkdv else args.mQ.shape[2] // args.mK.shape[2]


def first_query_head(plan: BackwardDkdvPlan, args: DkdvArgs, tile: Any) -> Int32:
    """The first query head of a tile, whose coordinate names a query head if dK and dV are added up, else a key head."""
    return tile.head if plan.adds_dkdv else tile.head * query_heads(plan, args)


def key_head(plan: BackwardDkdvPlan, args: DkdvArgs, tile: Any) -> Int32:
    """The key head of a tile."""
    return tile.head // (args.mQ.shape[2] // args.mK.shape[2]) if plan.adds_dkdv else tile.head
