"""The dQ writer: a warp that adds the warpgroups' pieces of dQ to the accumulator in memory (specification 7.6).

Each consumer warpgroup has a mailbox in shared memory; this warp waits until it is full, adds it with one bulk reduction
and says that it is empty once the copy engine has read it. The order of additions between CTAs is not fixed.
"""

from flash_hopper.device.barriers import mail_arrive, mail_wait
from flash_hopper.device.dsl import Int32, cute, cutlass
from flash_hopper.device.pipelines import consumer_state
from flash_hopper.device.ptx import bulk_reduce_add_f32
from flash_hopper.kernels.backward_dkdv.args import DkdvArgs, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dkdv.schedule import query_schedule
from flash_hopper.plan.backward import DQ_PIECE, BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS


class DqWriter:
    """One warp. `plan` is compile-time."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan

    @cute.jit
    def run(self, args: DkdvArgs, shared: SharedTensors, pipes: Pipelines) -> None:
        """All tiles that the producer posts, in the consumers' order."""
        tile_state = consumer_state(TILE_SLOTS)
        coord = pipes.tiles.read(tile_state)
        tile_state.advance()
        group = args.mQ.shape[2] // args.mK.shape[2]
        while coord.block >= 0:
            order = query_schedule(self.plan, args, coord)
            for i in cutlass.range(group, unroll=1):
                head = coord.head * group + i
                m_block = order.first
                for _ in cutlass.range(order.count, unroll=1):
                    for wg in cutlass.range_constexpr(2):
                        mail_wait(Int32(wg), is_full=True)
                        piece = args.mAccumulator[None, coord.batch, head, m_block, wg]
                        with cute.arch.elect_one():
                            bulk_reduce_add_f32(piece.iterator, shared.sdQ[None, None, None, wg].iterator, DQ_PIECE * 4)
                            cute.arch.cp_async_bulk_commit_group()
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                        mail_arrive(Int32(wg), is_full=False)
                    m_block = order.after(m_block)
            coord = pipes.tiles.read(tile_state)
            tile_state.advance()
        with cute.arch.elect_one():
            cute.arch.cp_async_bulk_wait_group(0)  # added, before the CTA ends
