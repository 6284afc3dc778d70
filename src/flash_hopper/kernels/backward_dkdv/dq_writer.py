"""The dQ writer: a warp that adds the warpgroups' pieces of dQ to the accumulator in memory (specification 7.6).

Each consumer warpgroup has a mailbox in shared memory; this warp waits until it is full, adds it with one bulk reduction
and says that it is empty once the copy engine has read it. The order of additions between CTAs is not fixed.
"""

from typing import Any

from flash_hopper.device.barriers import mail_arrive, mail_wait
from flash_hopper.device.dsl import Int32, const_expr, cute, cutlass
from flash_hopper.device.pipelines import consumer_state
from flash_hopper.device.ptx import bulk_reduce_add_f32
from flash_hopper.device.sequences import make_batch
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dkdv.schedule import (
    first_query_head,
    key_head,
    query_heads,
    query_schedule,
)
from flash_hopper.plan.backward import DQ_PIECE, BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS


class DqWriter:
    """One warp. `plan` is compile-time."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)

    @cute.jit
    def run(self, args: DkdvArgs, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles that the producer posts, in the consumers' order."""
        tile_state = consumer_state(TILE_SLOTS)
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            order = query_schedule(self.plan, args, tile)
            for i in cutlass.range(query_heads(self.plan, args), unroll=1):
                head = first_query_head(self.plan, args, tile) + i
                padded = self.batch.padded_query(tile) // self.plan.tile_m
                m_block = order.first
                for _ in cutlass.range(order.count, unroll=1):
                    for wg in cutlass.range_constexpr(2):
                        piece = (padded + m_block) * 2 + wg
                        self.add(args.mAccumulator[None, self.batch.padded_entry(tile), head, piece], shared, wg)
                    m_block = order.after(m_block)
            if const_expr(self.plan.adds_dkdv):
                self.add_keys(args, shared, tile, args.mdV, self.plan.tile_hdimv)
                self.add_keys(args, shared, tile, args.mdK, self.plan.tile_hdim)
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)  # added, before the CTA ends

    @cute.jit
    def add_keys(self, args: DkdvArgs, shared: SharedTensors, tile: Any, m: cute.Tensor, cols: int) -> None:
        """dK or dV of the tile, 64 columns at a time, in the order in which the consumers mail them."""
        head, entry = key_head(self.plan, args, tile), self.batch.padded_entry(tile)
        block = self.batch.padded_key(tile) // self.plan.tile_n + tile.block
        for col in cutlass.range_constexpr(cols // 64):
            for wg in cutlass.range_constexpr(2):
                self.add(m[None, entry, head, (block * 2 + wg) * (cols // 64) + col], shared, wg)

    def add(self, piece: cute.Tensor, shared: SharedTensors, wg: int) -> None:
        """A warpgroup's mailbox, once it is full, to 4096 values in memory; then it is empty."""
        mail_wait(Int32(wg), is_full=True)
        with cute.arch.elect_one():
            bulk_reduce_add_f32(piece.iterator, shared.sdQ[None, None, None, wg].iterator, DQ_PIECE * 4)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)
        mail_arrive(Int32(wg), is_full=False)
