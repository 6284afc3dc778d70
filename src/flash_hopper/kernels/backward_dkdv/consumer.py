"""A consumer warpgroup that owns 64 keys and does all four GEMMs for them: head dims up to 128.

Two schedules. Prompt: per query block S and dP, then dV as soon as P is made (while dP runs), then dK as soon as dS is
made (while dV runs); few registers. Deferred, where registers allow: S(i), dP(i), dV(i - 1) and dK(i - 1) are issued
together, P(i) is made while the other three run and dS(i) while the last two do. Warpgroups share nothing but the stages.
"""

from typing import Any, NamedTuple

from flash_hopper.device.barriers import epilogue_sync
from flash_hopper.device.dsl import Boolean, Constexpr, Float32, Int32, const_expr, cute, cutlass, warpgroup
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.pipelines import await_full, consumer_state
from flash_hopper.device.probabilities import grad_columns, of_columns, recompute_columns
from flash_hopper.device.registers import to_operand
from flash_hopper.device.sequences import make_batch
from flash_hopper.geometry.arith import clamp, maximum
from flash_hopper.geometry.blocks import Blocks, query_blocks
from flash_hopper.geometry.masks import UNBOUNDED, Interval, Lengths, MaskBounds, visible_queries
from flash_hopper.kernels.backward_dkdv.args import Cursors, DkdvArgs, Pipelines, Resources, SharedTensors
from flash_hopper.kernels.backward_dkdv.epilogue import Epilogue
from flash_hopper.kernels.backward_dkdv.fragments import (
    GradSide,
    ScoreSide,
    grad_side,
    issue_dk,
    issue_dp,
    issue_dv,
    issue_s,
    score_side,
)
from flash_hopper.kernels.backward_dkdv.schedule import QuerySchedule, query_heads, query_schedule
from flash_hopper.kernels.backward_dkdv.storage import WG_KEYS
from flash_hopper.plan.backward import BackwardDkdvPlan
from flash_hopper.plan.roles import TILE_SLOTS


class KeyView(NamedTuple):
    """What a thread needs to know about its part of a tile."""

    first_key: Int32  # of its two keys, the other is 8 above
    lane_col: Int32  # its first query within a block
    own: Blocks  # query blocks of its band of keys
    reaches_past_end: Boolean  # some keys of the band do not exist
    lengths: Lengths  # of the tile's sequence


def key_view(plan: BackwardDkdvPlan, args: DkdvArgs, tile: Any, band: Int32, thread: Int32) -> KeyView:
    """This thread's view of a tile."""
    lengths = make_batch(plan.is_ragged).lengths(tile, args.mQ, args.mK)
    key = tile.block * plan.tile_n + band * WG_KEYS
    own = query_blocks(key, WG_KEYS, lengths, plan.tile_m, args.mask(plan.mask))
    first_key = key + thread // 32 * 16 + thread % 32 // 4
    return KeyView(first_key, thread % 4 * 2, own, key + WG_KEYS > lengths.k, lengths)


def rows_that_see(key: Int32, lengths: Lengths, mask: MaskBounds) -> Interval:
    """Rows that see `key`: none, i.e. a first row past any end or an end of 0, for a key past the end."""
    exists = clamp(lengths.k - key, 0, 1)
    rows = visible_queries(key, lengths, mask)
    if mask.kind in ("full", "causal"):
        return Interval(maximum(rows.first, (1 - exists) * UNBOUNDED), rows.end)
    return Interval(rows.first, rows.end * exists)


def inner_visits(plan: BackwardDkdvPlan, view: KeyView, order: QuerySchedule) -> Interval:
    """Of a query head's blocks, numbered as they are visited, those that need no mask: no end of the visible rows cuts them.

    Keys that do not exist need one only if dQ sums over them: dK and dV of them are clipped or cleared, but their P may be
    infinite.
    """
    first, end = Int32(0), order.count
    if plan.mask != "full":
        first = clamp(view.own.inner_start - order.start, 0, order.count)
    if plan.is_windowed:
        end = clamp(view.own.inner_end - order.start, first, order.count)
    if plan.adds_dq:
        first, end = (cutlass.select_(view.reaches_past_end, 0, bound) for bound in (first, end))
    return Interval(first, end)


def needs_mask(plan: BackwardDkdvPlan, view: KeyView, m_block: Int32) -> Any:
    """True for the other blocks."""
    is_cut = view.reaches_past_end if plan.adds_dq else False
    if plan.mask != "full":
        is_cut = (m_block < view.own.inner_start) | is_cut
    return (m_block >= view.own.inner_end) | is_cut if plan.is_windowed else is_cut


def lse_of(shared: SharedTensors, view: KeyView, stage: Int32) -> cute.Tensor:
    """LSE of this thread's queries of the block in a stage of Q, (tile_m / 4,) in shared memory."""
    return of_columns(shared.sLSE[None, stage], view.lane_col)


def delta_of(shared: SharedTensors, view: KeyView, stage: Int32) -> cute.Tensor:
    """D likewise, in a stage of dO."""
    return of_columns(shared.sDelta[None, stage], view.lane_col)


@cute.jit
def read_first(plan: cutlass.Constexpr, resources: Resources, scores: ScoreSide, view: KeyView, at: Cursors) -> None:
    """Where LSE is read ahead, that of the first block, whose Q is then there."""
    if const_expr(plan.reads_ahead):
        await_full(resources.pipes.q, at.q)
        cute.autovec_copy(lse_of(resources.shared, view, at.q.index), scores.lse)


@cute.jit
def read_next(
    plan: cutlass.Constexpr, resources: Resources, scores: ScoreSide, view: KeyView, at: Cursors, has_next: Any
) -> None:
    """Likewise that of the block after the one at `at`, whose Q is then there; after the last block this block's once more."""
    if const_expr(plan.reads_ahead):
        ahead = at.ahead()
        if has_next:
            await_full(resources.pipes.q, ahead.q)
        stage = cutlass.select_(has_next, ahead.q.index, at.q.index)
        cute.autovec_copy(lse_of(resources.shared, view, stage), scores.lse)


@cute.jit
def make_p(
    plan: cutlass.Constexpr, args: DkdvArgs, lse: cute.Tensor, acc_S: cute.Tensor, view: KeyView, m_block: Int32,
    may_be_cut: Constexpr[bool],
) -> None:  # fmt: skip
    """S^T to P^T in place, masked where the block needs it; lse: (tile_m / 4,) of this thread's queries, base 2.

    In a loop over such blocks that is always true, but what is hidden is then computed for each, and not kept in registers
    around the loop, which have no room for it.
    """
    mask = args.mask(plan.mask)
    is_masked = needs_mask(plan, view, m_block) if const_expr(may_be_cut) else False
    visible = tuple(rows_that_see(view.first_key + 8 * r, view.lengths, mask) for r in (0, 1))
    recompute_columns(
        acc_as_rows(acc_S), args.scale_log2, lse, visible, m_block * plan.tile_m, view.lane_col, is_masked, plan.is_windowed,
    )  # fmt: skip


class Consumer:
    """`plan` is compile-time. `wg` counts consumers from 0 and is the band of keys; `thread` runs within it."""

    def __init__(self, plan: BackwardDkdvPlan) -> None:
        self.plan = plan
        self.epilogue = Epilogue(plan)

    @cute.jit
    def run(self, resources: Resources, wg: Int32, thread: Int32) -> None:
        """All tiles that the producer posts."""
        args, atoms, shared, pipes = resources
        plan = self.plan
        scores, grads = score_side(plan, atoms, shared, wg), grad_side(plan, atoms, shared, wg)
        keys_state, tile_state = consumer_state(1), consumer_state(TILE_SLOTS)
        at = Cursors(consumer_state(plan.q_stages), consumer_state(plan.do_stages))
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            pipes.keys.consumer_wait(keys_state)
            at = self.tile(resources, scores, grads, tile, at, wg, thread)
            if const_expr(plan.accumulates):
                pipes.keys.consumer_release(keys_state)
                self.epilogue.add(grads.acc_dK, args.scale, args, args.mdK, tile, wg, thread)
                self.epilogue.add(scores.acc_dV, Float32(1.0), args, args.mdV, tile, wg, thread)
            else:
                self.store(resources, scores, grads, tile, wg, thread)
                pipes.keys.consumer_release(keys_state)
            keys_state.advance()
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    @cute.jit
    def store(
        self, resources: Resources, scores: ScoreSide, grads: GradSide, tile: Any, wg: Int32, thread: Int32
    ) -> None:
        """dK and dV by TMA, through K's and V's memory, which is free when this returns."""
        args, atoms, shared, _ = resources
        plan, epilogue = self.plan, self.epilogue
        epilogue.clear_unused(grads.acc_dK, tile, wg, thread)
        epilogue.clear_unused(scores.acc_dV, tile, wg, thread)
        epilogue_sync(wg)  # every warp of the warpgroup has finished its wgmmas on K and V
        epilogue.stage(grads.acc_dK, atoms.mma_dk, args.scale, shared.sK[None, None, wg], wg, thread)
        epilogue.store(atoms.tma_dk, args.mdK, shared.sK[None, None, wg], plan.tile_hdim, tile, wg, thread)
        epilogue.stage(scores.acc_dV, atoms.mma_dv, Float32(1.0), shared.sV[None, None, wg], wg, thread)
        epilogue.store(atoms.tma_dv, args.mdV, shared.sV[None, None, wg], plan.tile_hdimv, tile, wg, thread)
        epilogue.wait_stored(thread)

    @cute.jit
    def tile(
        self, resources: Resources, scores: ScoreSide,
        grads: GradSide, tile: Any, at: Cursors, wg: Int32, thread: Int32,
    ) -> Cursors:  # fmt: skip
        """One tile up to unscaled dK and dV; returns the cursors."""
        args, atoms, _, pipes = resources
        plan = self.plan
        view = key_view(plan, args, tile, wg, thread)
        order = query_schedule(plan, args, tile)
        inner = inner_visits(plan, view, order)
        scores.acc_dV.fill(0.0)
        grads.acc_dK.fill(0.0)
        if const_expr(plan.is_deferred):
            self.first_deferred(resources, scores, grads, view, at, order.first)
        for head in cutlass.range(query_heads(plan, args), unroll=1):
            done = cutlass.select_(head == 0, 1, 0) if const_expr(plan.is_deferred) else 0
            read_first(plan, resources, scores, view, at)
            step = self.step_deferred if const_expr(plan.is_deferred) else self.step
            # masked blocks, then inner ones and those after them, in the order of `fused_consumer.py`
            for part in cutlass.range(2, unroll=1):
                cut = part * inner.end
                for i in cutlass.range(maximum(inner.first, done), cut, unroll=1):
                    at = step(resources, scores, grads, view, at, order, i, False)
                if const_expr(plan.mask != "full"):
                    last = cutlass.select_(part == 0, inner.first, order.count)
                    for i in cutlass.range(maximum(cut, done), last, unroll=1):
                        at = step(resources, scores, grads, view, at, order, i, True)
        if const_expr(plan.is_deferred):
            issue_dv(atoms, scores, at.do)
            issue_dk(atoms, grads, at.q)
            warpgroup.wait_group(0)
            pipes.do.consumer_release(at.do)
            pipes.q.consumer_release(at.q)
            at = at.ahead()
        return at

    @cute.jit
    def step(
        self, resources: Resources, scores: ScoreSide,
        grads: GradSide, view: KeyView, at: Cursors, order: QuerySchedule, i: Int32, is_masked: Constexpr[bool],
    ) -> Cursors:  # fmt: skip
        """Prompt schedule, visit i from S to dV and dK."""
        args, atoms, shared, pipes = resources
        plan = self.plan
        if const_expr(not plan.reads_ahead):
            await_full(pipes.q, at.q)
        issue_s(atoms, scores, at.q.index)
        await_full(pipes.do, at.do)
        issue_dp(atoms, grads, at.do)
        warpgroup.wait_group(1)  # S
        lse = scores.lse if const_expr(plan.reads_ahead) else lse_of(shared, view, at.q.index)
        make_p(plan, args, lse, scores.acc_S, view, order.start + i, is_masked)
        to_operand(scores.acc_S, scores.tVrP, plan.dtype)
        issue_dv(atoms, scores, at.do)
        warpgroup.wait_group(1)  # dP
        grad_columns(acc_as_rows(scores.acc_S), acc_as_rows(grads.acc_dP), delta_of(shared, view, at.do.index))
        to_operand(grads.acc_dP, grads.tKrdS, plan.dtype)
        issue_dk(atoms, grads, at.q)
        warpgroup.wait_group(1)  # dV
        pipes.do.consumer_release(at.do)
        read_next(plan, resources, scores, view, at, i + 1 < order.count)
        warpgroup.wait_group(0)  # dK
        pipes.q.consumer_release(at.q)
        return at.ahead()

    @cute.jit
    def first_deferred(
        self, resources: Resources, scores: ScoreSide,
        grads: GradSide, view: KeyView, at: Cursors, m_block: Int32,
    ) -> None:  # fmt: skip
        """Deferred schedule, set-up: P and dS of the first block."""
        args, atoms, shared, pipes = resources
        await_full(pipes.q, at.q)
        issue_s(atoms, scores, at.q.index)
        await_full(pipes.do, at.do)
        issue_dp(atoms, grads, at.do)
        warpgroup.wait_group(1)
        make_p(self.plan, args, lse_of(shared, view, at.q.index), scores.acc_S, view, m_block, True)
        warpgroup.wait_group(0)
        grad_columns(acc_as_rows(scores.acc_S), acc_as_rows(grads.acc_dP), delta_of(shared, view, at.do.index))
        to_operand(scores.acc_S, scores.tVrP, self.plan.dtype)
        to_operand(grads.acc_dP, grads.tKrdS, self.plan.dtype)

    @cute.jit
    def step_deferred(
        self, resources: Resources, scores: ScoreSide,
        grads: GradSide, view: KeyView, at: Cursors, order: QuerySchedule, i: Int32, is_masked: Constexpr[bool],
    ) -> Cursors:  # fmt: skip
        """Deferred schedule, steady state: S and dP of visit i, dV and dK of the block before it, at which `at` stands."""
        args, atoms, shared, pipes = resources
        ahead = at.ahead()
        await_full(pipes.q, ahead.q)
        issue_s(atoms, scores, ahead.q.index)
        await_full(pipes.do, ahead.do)
        issue_dp(atoms, grads, ahead.do)
        issue_dv(atoms, scores, at.do)
        issue_dk(atoms, grads, at.q)
        warpgroup.wait_group(3)  # S
        make_p(self.plan, args, lse_of(shared, view, ahead.q.index), scores.acc_S, view, order.start + i, is_masked)
        self.keep_order(pipes, ahead)
        warpgroup.wait_group(2)  # dP
        grad_columns(acc_as_rows(scores.acc_S), acc_as_rows(grads.acc_dP), delta_of(shared, view, ahead.do.index))
        self.keep_order(pipes, ahead)
        warpgroup.wait_group(0)  # dV and dK: their stage is free, and P and dS may be overwritten
        pipes.do.consumer_release(at.do)
        pipes.q.consumer_release(at.q)
        to_operand(scores.acc_S, scores.tVrP, self.plan.dtype)
        to_operand(grads.acc_dP, grads.tKrdS, self.plan.dtype)
        return ahead

    def keep_order(self, pipes: Pipelines, at: Cursors) -> None:
        """A wait that passes at once: a branch, without which ptxas moves the next wgmma wait above the exponentials.

        H200, 2026-11, d=64, full, 4k: 586 -> 637 TFLOP/s.
        """
        await_full(pipes.q, at.q)
