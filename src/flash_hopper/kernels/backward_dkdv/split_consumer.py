"""Two consumer warpgroups on the same 64 keys, for head dims above 128, where dK and dV fill a warpgroup each.

Warpgroup 0 computes S^T and P^T and adds up dV; warpgroup 1 computes dP^T and dS^T and adds up dK. P^T goes from thread
to thread: both hold the same element in the same register. Warpgroup 0 issues dV of the block before with S of this one and
makes P while it runs; warpgroup 1 makes dS while dV or dK runs.
"""

from typing import Any

from flash_hopper.device.barriers import all_consumers_sync
from flash_hopper.device.dsl import Float32, Int32, const_expr, cute, cutlass, warpgroup
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.pipelines import await_empty, await_full, consumer_state, producer_state
from flash_hopper.device.probabilities import grad_columns
from flash_hopper.device.registers import to_operand
from flash_hopper.kernels.backward_dkdv.args import Cursors, Pipelines, Resources, SharedTensors
from flash_hopper.kernels.backward_dkdv.consumer import KeyView, delta_of, key_view, lse_of, make_p
from flash_hopper.kernels.backward_dkdv.epilogue import Epilogue
from flash_hopper.kernels.backward_dkdv.fragments import (
    ScoreSide,
    grad_side,
    issue_dk,
    issue_dp,
    issue_dv,
    issue_s,
    score_side,
)
from flash_hopper.kernels.backward_dkdv.schedule import query_heads, query_schedule
from flash_hopper.plan.backward import BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS

SCORES, GRADS = 0, 1  # warpgroups


class SplitConsumer:
    """`plan` is compile-time. `wg` is the role, `thread` runs within the warpgroup."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.epilogue = Epilogue(plan)

    @cute.jit
    def run(self, resources: Resources, wg: Int32, thread: Int32) -> None:
        """All tiles that the producer posts."""
        if wg == SCORES:
            self.run_scores(resources, thread)
        else:
            self.run_grads(resources, thread)

    @cute.jit
    def run_scores(self, resources: Resources, thread: Int32) -> None:
        """Warpgroup 0: P and dV."""
        args, atoms, shared, pipes = resources
        plan = self.plan
        side = score_side(plan, atoms, shared, Int32(0))
        keys_state, tile_state, p_state = consumer_state(1), consumer_state(TILE_SLOTS), producer_state(1)
        at = Cursors(consumer_state(plan.q_stages), consumer_state(plan.do_stages))
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            pipes.keys.consumer_wait(keys_state)
            view = key_view(plan, args, tile, Int32(0), thread)
            order = query_schedule(plan, args, tile)
            m_block = order.first
            total = order.count * query_heads(plan, args)
            side.acc_dV.fill(0.0)
            self.scores(resources, side, view, at, m_block, p_state, thread)
            p_state.advance()
            to_operand(side.acc_S, side.tVrP, plan.dtype)
            for _ in cutlass.range(total - 1, unroll=1):
                m_block = order.after(m_block)
                ahead = at.ahead()
                await_full(pipes.q, ahead.q)
                issue_s(atoms, side, ahead.q.index)
                await_full(pipes.do, at.do)
                issue_dv(atoms, side, at.do)
                warpgroup.wait_group(1)  # S
                make_p(plan, args, lse_of(shared, view, ahead.q.index), side.acc_S, view, m_block, True)
                pipes.q.consumer_release(ahead.q)
                self.send_p(pipes, shared, side, p_state, thread)
                p_state.advance()
                warpgroup.wait_group(0)  # dV
                pipes.do.consumer_release(at.do)
                to_operand(side.acc_S, side.tVrP, plan.dtype)
                at = ahead
            await_full(pipes.do, at.do)
            issue_dv(atoms, side, at.do)
            warpgroup.wait_group(0)
            pipes.do.consumer_release(at.do)
            at = at.ahead()
            if const_expr(plan.accumulates):
                self.epilogue.add(side.acc_dV, Float32(1.0), args, args.mdV, tile, Int32(0), thread)
            else:
                self.epilogue.clear_unused(side.acc_dV, tile, Int32(0), thread)
                all_consumers_sync(2)  # warpgroup 1 has finished its wgmmas on V
                self.epilogue.stage(side.acc_dV, atoms.mma_dv, Float32(1.0), shared.sV[None, None, 0], Int32(0), thread)
                self.epilogue.store(
                    atoms.tma_dv, args.mdV, shared.sV[None, None, 0], plan.tile_hdimv, tile, Int32(0), thread
                )
                self.epilogue.wait_stored(thread)
            pipes.keys.consumer_release(keys_state)
            keys_state.advance()
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    @cute.jit
    def scores(
        self, resources: Resources, side: ScoreSide, view: KeyView, at: Cursors, m_block: Int32, p_state: Any,
        thread: Int32,
    ) -> None:  # fmt: skip
        """S^T and P^T of a tile's first block."""
        args, atoms, shared, pipes = resources
        await_full(pipes.q, at.q)
        issue_s(atoms, side, at.q.index)
        warpgroup.wait_group(0)
        make_p(self.plan, args, lse_of(shared, view, at.q.index), side.acc_S, view, m_block, True)
        pipes.q.consumer_release(at.q)
        self.send_p(pipes, shared, side, p_state, thread)

    @cute.jit
    def run_grads(self, resources: Resources, thread: Int32) -> None:
        """Warpgroup 1: dP, dS and dK."""
        args, atoms, shared, pipes = resources
        plan = self.plan
        side = grad_side(plan, atoms, shared, Int32(0))
        p = cute.make_rmem_tensor_like(side.acc_dP)
        delta = cute.make_rmem_tensor(plan.tile_m // 4, Float32)
        keys_state, tile_state, p_state = consumer_state(1), consumer_state(TILE_SLOTS), consumer_state(1)
        at = Cursors(consumer_state(plan.q_stages), consumer_state(plan.do_stages))
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            pipes.keys.consumer_wait(keys_state)
            view = key_view(plan, args, tile, Int32(0), thread)
            order = query_schedule(plan, args, tile)
            total = order.count * query_heads(plan, args)
            side.acc_dK.fill(0.0)
            for _ in cutlass.range(total, unroll=1):
                await_full(pipes.do, at.do)
                cute.autovec_copy(delta_of(shared, view, at.do.index), delta)  # behind the product it would come late
                issue_dp(atoms, side, at.do)
                warpgroup.wait_group(0)
                self.receive_p(pipes, shared, p, p_state, thread)
                p_state.advance()
                grad_columns(acc_as_rows(p), acc_as_rows(side.acc_dP), delta)
                pipes.do.consumer_release(at.do)
                to_operand(side.acc_dP, side.tKrdS, plan.dtype)
                await_full(pipes.q, at.q)
                issue_dk(atoms, side, at.q)
                warpgroup.wait_group(0)
                pipes.q.consumer_release(at.q)
                at = at.ahead()
            if const_expr(plan.accumulates):
                self.epilogue.add(side.acc_dK, args.scale, args, args.mdK, tile, Int32(0), thread)
            else:
                self.epilogue.clear_unused(side.acc_dK, tile, Int32(0), thread)
                all_consumers_sync(2)  # warpgroup 0 has finished its wgmmas on K
                self.epilogue.stage(side.acc_dK, atoms.mma_dk, args.scale, shared.sK[None, None, 0], Int32(1), thread)
                self.epilogue.store(
                    atoms.tma_dk, args.mdK, shared.sK[None, None, 0], plan.tile_hdim, tile, Int32(0), thread
                )
                self.epilogue.wait_stored(thread)
            pipes.keys.consumer_release(keys_state)
            keys_state.advance()
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    def send_p(self, pipes: Pipelines, shared: SharedTensors, side: ScoreSide, p_state: Any, thread: Int32) -> None:
        """P^T, float32, to the same thread of the other warpgroup."""
        await_empty(pipes.p, p_state)
        registers = cute.make_tensor(side.acc_S.iterator, cute.make_layout((4, cute.size(side.acc_S) // 4)))
        cute.autovec_copy(registers, shared.sP[None, None, thread])
        pipes.p.producer_commit(p_state)

    def receive_p(self, pipes: Pipelines, shared: SharedTensors, p: cute.Tensor, p_state: Any, thread: Int32) -> None:
        """P^T from the same thread of the other warpgroup."""
        await_full(pipes.p, p_state)
        cute.autovec_copy(
            shared.sP[None, None, thread], cute.make_tensor(p.iterator, cute.make_layout((4, cute.size(p) // 4)))
        )
        pipes.p.consumer_release(p_state)
