"""A consumer warpgroup that owns 64 keys and also computes half of a query block's dQ: head dims up to 128.

All five GEMMs of specification 7.5. dS^T goes to shared memory, as dQ needs that of both warpgroups; a warpgroup then
computes a 64 x 64 piece of dQ (half the rows, or half the columns) and mails it to the dQ writer. The next block's S is
issued before the barrier that makes dS visible, so the tensor core is not idle there.
"""

from typing import Any

from flash_hopper.device.barriers import all_consumers_sync, mail_arrive, mail_wait
from flash_hopper.device.dsl import ELEMENT_TYPES, Constexpr, Float32, Int32, const_expr, cute, cutlass, warp, warpgroup
from flash_hopper.device.gemm import issue
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.pipelines import await_full, consumer_state
from flash_hopper.device.probabilities import grad_columns
from flash_hopper.device.registers import anew, to_operand
from flash_hopper.kernels.backward_dkdv.args import Cursors, DkdvAtoms, Resources, SharedTensors
from flash_hopper.kernels.backward_dkdv.consumer import (
    KeyView,
    delta_of,
    inner_visits,
    key_view,
    lse_of,
    make_p,
    read_first,
    read_next,
)
from flash_hopper.kernels.backward_dkdv.epilogue import Epilogue
from flash_hopper.kernels.backward_dkdv.fragments import (
    DqSide,
    GradSide,
    ScoreSide,
    dq_side,
    grad_side,
    issue_dk,
    issue_dp,
    issue_dv,
    issue_s,
    load_values,
    score_side,
)
from flash_hopper.kernels.backward_dkdv.schedule import QuerySchedule, query_schedule
from flash_hopper.plan.backward import BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS


class FusedConsumer:
    """`plan` is compile-time. `wg` counts consumers from 0 and is the band of keys; `thread` runs within it."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.epilogue = Epilogue(plan)
        self.is_ahead = plan.tile_m > 64

    @cute.jit
    def run(self, resources: Resources, wg: Int32, thread: Int32) -> None:
        """All tiles that the producer posts."""
        args, atoms, shared, pipes = resources
        plan = self.plan
        scores, grads = score_side(plan, atoms, shared, wg), grad_side(plan, atoms, shared, wg)
        dq = dq_side(plan, atoms, shared, wg)
        keys_state, tile_state = consumer_state(1), consumer_state(TILE_SLOTS)
        at = Cursors(consumer_state(plan.q_stages), consumer_state(plan.do_stages))
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            pipes.keys.consumer_wait(keys_state)
            load_values(plan, atoms, shared, grads, wg, thread)
            at = self.tile(resources, scores, grads, dq, tile, at, wg, thread)
            pipes.keys.consumer_release(keys_state)  # the next tile's keys load during this epilogue
            keys_state.advance()
            lane = anew(thread, at.q.index)
            if const_expr(plan.adds_dkdv or plan.accumulates):
                if const_expr(plan.adds_dkdv):
                    self.mail_keys(shared, scores.acc_dV, plan.tile_hdimv, wg, lane)
                    self.mail_keys(shared, grads.acc_dK, plan.tile_hdim, wg, lane)
                else:
                    self.epilogue.add(scores.acc_dV, Float32(1.0), args, args.mdV, tile, wg, lane)
                    self.epilogue.add(grads.acc_dK, args.scale, args, args.mdK, tile, wg, lane)
                mail_wait(wg, is_full=False)  # the mailbox is this warpgroup's at a tile's start
                all_consumers_sync(2)  # both warpgroups have finished their wgmmas on dS
            else:
                self.store_keys(resources, scores, grads, tile, wg, lane)
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    @cute.jit
    def store_keys(
        self, resources: Resources, scores: ScoreSide, grads: GradSide, tile: Any, wg: Int32, thread: Int32
    ) -> None:
        """dV and dK by TMA, through memory that is idle between tiles, so that K's and V's is free already."""
        args, atoms, shared, _ = resources
        plan = self.plan
        self.epilogue.clear_unused(scores.acc_dV, tile, wg, thread)
        self.epilogue.clear_unused(grads.acc_dK, tile, wg, thread)
        mail_wait(wg, is_full=False)  # dV is staged in the mailbox; the next tile's first piece need not wait
        self.epilogue.stage(scores.acc_dV, atoms.mma_dv, Float32(1.0), shared.sdV[None, None, wg], wg, thread)
        self.epilogue.store(atoms.tma_dv, args.mdV, shared.sdV[None, None, wg], plan.tile_hdimv, tile, wg, thread)
        all_consumers_sync(2)  # both warpgroups have finished their wgmmas on dS, where dK is staged
        self.epilogue.stage(grads.acc_dK, atoms.mma_dk, args.scale, shared.sdK[None, None, wg], wg, thread)
        self.epilogue.store(atoms.tma_dk, args.mdK, shared.sdK[None, None, wg], plan.tile_hdim, tile, wg, thread)
        self.epilogue.wait_stored(thread)
        all_consumers_sync(2)  # the stores of both warpgroups have read dS's and the mailboxes' memory

    @cute.jit
    def mail_keys(self, shared: SharedTensors, acc: cute.Tensor, cols: int, wg: Int32, thread: Int32) -> None:
        """dV or dK to the writer, 64 columns at a time: 32 registers in a row."""
        for col in cutlass.range_constexpr(cols // 64):
            mail_wait(wg, is_full=False)
            self.mail(shared, cute.make_tensor(acc.iterator + 32 * col, cute.make_layout(32)), wg, thread)

    @cute.jit
    def tile(
        self, resources: Resources, scores: ScoreSide,
        grads: GradSide, dq: DqSide, tile: Any, at: Cursors, wg: Int32, thread: Int32,
    ) -> Cursors:  # fmt: skip
        """One tile, of one query head, up to unscaled dK and dV; returns the cursors."""
        args, atoms, _, pipes = resources
        view = key_view(self.plan, args, tile, wg, thread)
        order = query_schedule(self.plan, args, tile)
        scores.acc_dV.fill(0.0)
        grads.acc_dK.fill(0.0)
        if const_expr(self.is_ahead):
            await_full(pipes.q, at.q)
            issue_s(atoms, scores, at.q.index)
            warpgroup.wait_group(0)
        read_first(self.plan, resources, scores, view, at)
        inner = inner_visits(self.plan, view, order)
        # Masked blocks, then inner ones and those after them. The inner blocks' loop stands first all the same: ptxas makes
        # the descriptors of a second loop from halves (head dim 128: 40 instructions a step more).
        for part in cutlass.range(2, unroll=1):
            cut = part * inner.end
            for i in cutlass.range(inner.first, cut, unroll=1):
                has_next = i + 1 < order.count
                at = self.step(
                    resources, scores, grads, dq, view, at, self.block(order, i), i, has_next, False, wg, thread
                )
            for i in cutlass.range(cut, cutlass.select_(part == 0, inner.first, order.count), unroll=1):
                has_next = i + 1 < order.count
                at = self.step(
                    resources, scores, grads, dq, view, at, self.block(order, i), i, has_next, True, wg, thread
                )
        return at

    def block(self, order: QuerySchedule, i: Int32) -> Int32:
        """The block that is visited as number `i`. Masks start at the first one, so that nothing wraps."""
        return order.visit(i) if self.plan.mask == "full" else order.start + i

    @cute.jit
    def step(
        self, resources: Resources, scores: ScoreSide,
        grads: GradSide, dq: DqSide, view: KeyView, at: Cursors, m_block: Int32, i: Int32, has_next: Any,
        is_masked: Constexpr[bool], wg: Int32, thread: Int32,
    ) -> Cursors:  # fmt: skip
        """One query block, whose scores are there, up to dQ, dK, dV; and the next block's scores."""
        args, atoms, shared, pipes = resources
        plan = self.plan
        ds_stage = i % 2
        if const_expr(not self.is_ahead):
            if const_expr(not plan.reads_ahead):
                await_full(pipes.q, at.q)
            issue_s(atoms, scores, at.q.index)
        await_full(pipes.do, at.do)
        issue_dp(atoms, grads, at.do)
        # Ahead, S is there. The wait keeps exponentials from going between the products of dP, which would end late; with masks,
        # whose branch does the same to what follows, it costs more than it gives.
        if const_expr(not self.is_ahead or plan.mask == "full"):
            warpgroup.wait_group(1)  # S
        lse = scores.lse if const_expr(plan.reads_ahead) else lse_of(shared, view, at.q.index)
        make_p(plan, args, lse, scores.acc_S, view, m_block, is_masked)
        if const_expr(plan.tile_m <= 64):  # dV runs while dS is made, where registers allow
            to_operand(scores.acc_S, scores.tVrP, plan.dtype)
            issue_dv(atoms, scores, at.do)
            warpgroup.wait_group(1)  # dP
        else:
            warpgroup.wait_group(0)  # dP
        grad_columns(acc_as_rows(scores.acc_S), acc_as_rows(grads.acc_dP), delta_of(shared, view, at.do.index))
        to_operand(grads.acc_dP, grads.tKrdS, plan.dtype)
        if const_expr(plan.tile_m > 64):
            to_operand(scores.acc_S, scores.tVrP, plan.dtype)
            issue_dv(atoms, scores, at.do)
        self.publish_ds(atoms, shared, grads, ds_stage, wg, thread)
        ahead = at.ahead()
        if const_expr(self.is_ahead):
            if has_next:
                await_full(pipes.q, ahead.q)
            # after the last block this block's Q once more, whose result nobody looks at: the next stage may be loading
            issue_s(atoms, scores, cutlass.select_(has_next, ahead.q.index, at.q.index))
        cute.arch.fence_proxy("async.shared", space="cta")  # dS, before wgmma reads it
        all_consumers_sync(2)  # ... that of both warpgroups; both are past the dQ that read the other buffer
        if const_expr(self.is_ahead):
            warpgroup.wait_group(1)  # dV: its stage is free, and P's registers go to dQ
            pipes.do.consumer_release(at.do)
        issue(atoms.mma_dq, dq.acc_dQ, dq.tQrdS[None, None, None, ds_stage], dq.tQrKt, True)
        issue_dk(atoms, grads, at.q)
        if const_expr(not self.is_ahead):
            warpgroup.wait_group(2)  # dV
            pipes.do.consumer_release(at.do)
        warpgroup.wait_group(1)  # dQ, and the next S
        self.mail_dq(shared, dq, i, wg, thread)
        read_next(plan, resources, scores, view, at, has_next)
        warpgroup.wait_group(0)  # dK
        pipes.q.consumer_release(at.q)
        return ahead

    @cute.jit
    def publish_ds(
        self, atoms: DkdvAtoms, shared: SharedTensors, grads: GradSide, stage: Int32, wg: Int32, thread: Int32
    ) -> None:
        """This warpgroup's rows of dS^T to shared memory."""
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), ELEMENT_TYPES[self.plan.dtype])
        r2s = cute.make_tiled_copy_C(store_matrix, atoms.mma_s).get_slice(thread)
        rows = cute.local_tile(shared.sdS[None, None, stage], (64, self.plan.tile_m), (wg, 0))
        rdS = cute.make_tensor(grads.tKrdS.iterator, cute.make_layout(grads.acc_dP.shape))
        cute.copy(r2s, r2s.retile(rdS), r2s.partition_D(rows))

    @cute.jit
    def mail_dq(self, shared: SharedTensors, dq: DqSide, i: Int32, wg: Int32, thread: Int32) -> None:
        """This warpgroup's piece of dQ to the dQ writer; at a tile's start the mailbox is this warpgroup's."""
        if i > 0:
            mail_wait(wg, is_full=False)
        self.mail(shared, dq.acc_dQ, wg, thread)

    def mail(self, shared: SharedTensors, acc: cute.Tensor, wg: Int32, thread: Int32) -> None:
        """32 registers a thread into this warpgroup's mailbox, which is empty, for the writer."""
        registers = cute.make_tensor(acc.iterator, cute.make_layout((4, cute.size(acc) // 4)))
        cute.autovec_copy(registers, shared.sdQ[None, None, thread, wg])
        cute.arch.fence_proxy("async.shared", space="cta")  # these writes, before the bulk reduction reads them
        mail_arrive(wg, is_full=True)
