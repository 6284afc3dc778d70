"""A consumer warpgroup: 64 query rows of every tile, from scores to output.

Per key block it issues QK(j + 1) and PV(j) together, waits for QK, and does softmax(j + 1) while the tensor core works
for the other warpgroups (specification 4.4, 4.5). The steady-state loop is `step`; it is one function because cutting
it would hide the overlap.
"""

from typing import Any, NamedTuple

from flash_hopper.device.barriers import Turns
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Boolean,
    Constexpr,
    Float32,
    Int32,
    const_expr,
    cute,
    cutlass,
    warpgroup,
)
from flash_hopper.device.gemm import issue
from flash_hopper.device.layouts import acc_as_operand_a, acc_as_rows, transposed
from flash_hopper.device.masking import mask_columns
from flash_hopper.device.pipelines import await_stage, consumer_state, producer_state, skip_stage
from flash_hopper.device.ptx import await_phase
from flash_hopper.device.registers import to_operand
from flash_hopper.device.sequences import make_batch
from flash_hopper.device.softmax import SoftmaxState, make_state, scale_rows, update
from flash_hopper.geometry.blocks import Blocks, key_blocks, warpgroup_blocks
from flash_hopper.geometry.masks import Lengths, visible_keys
from flash_hopper.geometry.tiles import shares
from flash_hopper.kernels.forward.args import ForwardArgs, ForwardAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.forward.epilogue import Epilogue
from flash_hopper.kernels.forward.storage import WG_ROWS
from flash_hopper.plan.forward import ForwardPlan
from flash_hopper.plan.roles import TILE_SLOTS


class Fragments(NamedTuple):
    """Operands and accumulators of one warpgroup."""

    tSrQ: cute.Tensor  # (MMA, M, K, slot) in shared memory
    tSrK: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tOrVt: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tOrP: cute.Tensor  # (MMA, M, K) in registers, 16 bit
    acc_S: cute.Tensor  # 64 x tile_n, float32
    acc_O: cute.Tensor  # 64 x tile_hdimv, float32


class Ends(NamedTuple):
    """At which ends of a block keys may be invisible."""

    left: bool
    right: bool


UNCUT, LEFT, RIGHT, BOTH = Ends(False, False), Ends(True, False), Ends(False, True), Ends(True, True)


class Part(NamedTuple):
    """A warpgroup's part of a tile, and what a thread needs to know about it."""

    head: Int32
    band: Int32  # of 64 rows of that head
    first_row: Int32  # of its two rows, the other is 8 below
    lane_col: Int32  # its first column within a key block
    lengths: Lengths  # of the tile's sequence
    blocks: Blocks  # that its rows see
    before: Int32  # blocks of the tile that come first and are for other warpgroups
    behind: Int32  # and last
    idle: Int32  # and all but the first, if it has no row


class Cursors(NamedTuple):
    """Positions in the pipelines, kept over tiles."""

    q: Any
    k: Any
    v: Any
    held: Any  # the tile before's position in Q, if its buffer holds O


class Consumer:
    """`plan` is compile-time. `wg` counts the CTA's consumers from 0, over all streams, `thread` runs within the warpgroup."""

    def __init__(self, plan: ForwardPlan) -> None:
        self.plan = plan
        self.turns = Turns(plan.consumer_warpgroups, plan.has_pingpong, plan.streams)
        self.batch = make_batch(plan.is_ragged)
        self.is_windowed = plan.mask in ("local", "chunk")
        self.ends = BOTH if self.is_windowed else RIGHT  # of a block that the right end of what is visible cuts
        self.epilogue = Epilogue(plan)
        self.has_o_in_q, self.has_o_in_v = plan.o_place == "q", plan.o_place == "v"

    @cute.jit
    def run(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        shared: SharedTensors,
        pipes: Pipelines,
        wg: Int32,
        thread: Int32,
    ) -> None:
        """All tiles that the scheduler posts.

        With `plan.looks_ahead` the first scores of the next tile are issued together with the last PV of this one, and
        computed while this one's output is normalised and stored.
        """
        plan = self.plan
        frags = self.fragments(atoms, shared)
        softmax = self.make_state()
        q_state, tile_state = consumer_state(plan.q_stages), consumer_state(TILE_SLOTS)
        k_state, v_state = consumer_state(plan.kv_stages), consumer_state(plan.kv_stages)
        held, holds = q_state.clone(), Boolean(False)  # the stage of Q whose buffer holds the last output
        self.turns.start(wg)
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        part = self.part(args, tile, wg, thread)
        skipped = part.before  # blocks since the last one that was used
        if const_expr(plan.looks_ahead):
            k_state = self.jump(k_state, skipped)
            self.issue_first(atoms, pipes, frags, tile, q_state, k_state, wg)
            k_state = self.finish_first(pipes, tile, k_state)
            frags.acc_O.fill(0.0)
        while tile.block >= 0:
            if const_expr(plan.looks_ahead):
                self.skip_turns(part.before, wg)
                v_state = self.jump(v_state, skipped)
            else:
                k_state, v_state = self.skip(pipes, k_state, v_state, part.before, wg)
                self.issue_first(atoms, pipes, frags, tile, q_state, k_state, wg)
                frags.acc_O.fill(0.0)
                k_state = self.finish_first(pipes, tile, k_state)
            k_state, v_state = self.tile(
                args, atoms, pipes, frags, softmax, part, Cursors(q_state, k_state, v_state, held), holds, wg, thread
            )
            own, own_part, own_q, own_v = tile, part, q_state.clone(), v_state.clone()
            q_state.advance()
            v_state.advance()
            if const_expr(plan.looks_ahead):
                self.skip_turns(own_part.behind, wg)
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()
            part = self.part(args, tile, wg, thread)
            if const_expr(plan.looks_ahead):
                skipped = own_part.behind + part.before
                k_state = self.jump(k_state, skipped)
                self.issue_first(atoms, pipes, frags, tile, q_state, k_state, wg)
            self.finish_sums(frags, softmax, own, own_part, wg, thread)
            pipes.v.consumer_release(own_v)
            if const_expr(not plan.looks_ahead):
                k_state, v_state = self.skip(pipes, k_state, v_state, own_part.behind, wg)
            if const_expr(not plan.frees_q_early and not self.has_o_in_q):
                pipes.q.consumer_release(own_q)
            slot = self.in_tile(wg)
            if const_expr(self.has_o_in_q):
                slot = own_q.index * plan.consumer_warpgroups + slot
            if const_expr(self.has_o_in_v):
                slot = self.value_stage(pipes, v_state, slot)
            self.epilogue.store_o(
                args,
                atoms,
                shared.sO[None, None, slot],
                frags.acc_O,
                softmax,
                own,
                own_part.head,
                own_part.band,
                wg,
                thread,
            )
            if const_expr(plan.looks_ahead):
                k_state = self.finish_first(pipes, tile, k_state)
                frags.acc_O.fill(0.0)
            if const_expr(self.has_o_in_v):
                self.return_stage(pipes, thread)
            if const_expr(plan.has_lse):
                self.epilogue.store_lse(args, softmax, own, own_part.head, own_part.first_row, thread % 32)
            if const_expr(self.has_o_in_q):
                held, holds = own_q.clone(), Boolean(True)
                if const_expr(plan.q_stages == 1):
                    self.release_held(pipes, held, thread)
        if thread < 32:
            self.epilogue.wait_stored()  # shared memory must outlive the last store

    @cute.jit
    def finish_sums(
        self, frags: Fragments, softmax: SoftmaxState, tile: Any, part: Part, wg: Int32, thread: Int32
    ) -> None:
        """Until the last PV is done; what need not wait for it comes first."""
        self.epilogue.begin(softmax, tile, part.first_row, wg, thread)
        if const_expr(self.plan.looks_ahead):
            warpgroup.wait_group(1)  # PV done, the first scores may still be computed
        else:
            warpgroup.wait_group(0)

    @cute.jit
    def release_held(self, pipes: Pipelines, held: Any, thread: Int32) -> None:
        """Free a stage of Q whose buffer holds O, once the store has read it."""
        if thread < 32:
            self.epilogue.wait_stored()
        cute.arch.sync_warp()
        pipes.q.consumer_release(held)

    @cute.jit
    def free_q(self, pipes: Pipelines, part: Part, n_block: Int32) -> None:
        """With `plan.frees_q_early`, free the only stage of Q if the scores that are done are those of the part's last block."""
        if const_expr(self.plan.frees_q_early):
            if n_block == part.blocks.start:
                pipes.q.consumer_release(consumer_state(1))

    @cute.jit
    def value_stage(self, pipes: Pipelines, v_state: Any, place: Int32) -> Int32:
        """The stage of V in which this warpgroup, number `place` of its tile's, stages O, when all have read it: the first, second ...
        that the next tile will fill.

        v_state: the cursor behind the tile. This warpgroup has waited for every stage before it, so that the barrier of a free stage
        cannot be a round behind, which its parity would not tell.
        """
        stage = v_state.clone()
        for _ in cutlass.range(place, unroll=1):
            stage.advance()
        await_phase(pipes.v.sync_object_empty.get_barrier(stage.index), stage.phase ^ 1)
        return stage.index

    @cute.jit
    def return_stage(self, pipes: Pipelines, thread: Int32) -> None:
        """Tell the producer that the store has read O, so that the stage is V's again. At once: the next tile's first blocks may be
        some of which this warpgroup sees nothing, and it waits for their V before it does anything else."""
        if thread < 32:
            self.epilogue.wait_stored()
            with cute.arch.elect_one():
                pipes.o.producer_commit(producer_state(1))
        cute.arch.sync_warp()

    def in_tile(self, wg: Int32) -> Int32:
        """Which of its tile's warpgroups this one is."""
        return wg if self.plan.streams == 1 else wg % self.plan.consumer_warpgroups

    def make_state(self) -> SoftmaxState:
        """Registers of the softmax."""
        return make_state()

    def fragments(self, atoms: ForwardAtoms, shared: SharedTensors) -> Fragments:
        """Descriptors of the shared operands, registers of the rest."""
        plan = self.plan
        qk, pv = atoms.mma_qk.get_slice(0), atoms.mma_pv.get_slice(0)
        acc_S = cute.make_rmem_tensor(atoms.mma_qk.partition_shape_C((WG_ROWS, plan.tile_n)), Float32)
        return Fragments(
            tSrQ=atoms.mma_qk.make_fragment_A(qk.partition_A(shared.sQ)),
            tSrK=atoms.mma_qk.make_fragment_B(qk.partition_B(shared.sK)),
            tOrVt=atoms.mma_pv.make_fragment_B(pv.partition_B(transposed(shared.sV))),
            tOrP=cute.make_rmem_tensor(acc_as_operand_a(acc_S.layout), ELEMENT_TYPES[plan.dtype]),
            acc_S=acc_S,
            acc_O=cute.make_rmem_tensor(atoms.mma_pv.partition_shape_C((WG_ROWS, plan.tile_hdimv)), Float32),
        )

    def part(self, args: ForwardArgs, tile: Any, wg: Int32, thread: Int32) -> Part:
        """This warpgroup's part of a tile, of which it need not compute every key block."""
        plan, wg = self.plan, self.in_tile(wg)
        wgs, row = plan.consumer_warpgroups, tile.block * plan.tile_m
        lengths, mask = self.batch.lengths(tile, args.mQ, args.mK), args.mask(plan.mask)
        whole = key_blocks(row, plan.tile_m, lengths, plan.tile_n, mask)
        head, band = tile.head, tile.block * wgs + wg
        first, others = 0, 0  # blocks of other heads in front of its own, and all of them
        if const_expr(plan.shares_tiles):
            share, each = shares(tile.allocated_q, wgs), whole.end - whole.start
            head, band = share.head(tile.head, wg), share.band(tile.block, tile.head, wg)
            first = (head - share.head(tile.head, 0)) * each
            others = (share.heads(tile.head, args.work.heads) - 1) * each
            own, row = warpgroup_blocks(band * WG_ROWS, 0, lengths, plan.tile_n, mask), band * WG_ROWS
        else:
            own, row = warpgroup_blocks(row, wg, lengths, plan.tile_n, mask), row + wg * WG_ROWS
        before, behind, idle = first + whole.end - own.end, others - first + own.start - whole.start, 0
        if const_expr(plan.has_idle):
            # it computes on the tile's first block of keys, the cheapest way through, and nothing comes of it
            is_idle = row >= lengths.q
            if const_expr(plan.shares_tiles):
                is_missing = head >= args.work.heads
                is_idle = is_idle | is_missing
                row = cutlass.select_(is_missing, tile.allocated_q, row)  # no row is written
            start = whole.start
            alone = (start, start, start, start + 1)
            own = Blocks(*(cutlass.select_(is_idle, Int32(a), Int32(b)) for a, b in zip(alone, own, strict=True)))
            idle = cutlass.select_(is_idle, Int32(others + whole.end - 1 - start), Int32(0))
            before, behind = (cutlass.select_(is_idle, Int32(0), Int32(n)) for n in (before, behind))
        return Part(
            head,
            band,
            row + thread // 32 * 16 + thread % 32 // 4,
            thread % 4 * 2,
            Lengths(*(Int32(n) for n in lengths)),
            Blocks(*(Int32(n) for n in own)),
            Int32(before),
            Int32(behind),
            Int32(idle),
        )

    @cute.jit
    def issue_first(
        self, atoms: ForwardAtoms, pipes: Pipelines, frags: Fragments, tile: Any, q_state: Any, k_state: Any, wg: Int32
    ) -> None:
        """A tile's first scores, not waited for. Without a tile nobody loads anything, and the product is of no use."""
        if tile.block >= 0:
            pipes.q.consumer_wait(q_state)
            await_stage(pipes.k, k_state, self.plan.frees_unseen)
        q_slot = q_state.index * self.plan.consumer_warpgroups + self.in_tile(wg)
        issue(
            atoms.mma_qk, frags.acc_S, frags.tSrQ[None, None, None, q_slot],
            frags.tSrK[None, None, None, k_state.index], True,
        )  # fmt: skip

    @cute.jit
    def finish_first(self, pipes: Pipelines, tile: Any, k_state: Any) -> Any:
        """Wait for what `issue_first` issued, and free its stage of K."""
        warpgroup.wait_group(0)
        if tile.block >= 0:
            pipes.k.consumer_release(k_state)
        k_state.advance()
        return k_state

    @cute.jit
    def tile(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        pipes: Pipelines,
        frags: Fragments,
        softmax: SoftmaxState,
        part: Part,
        cursors: Cursors,
        holds: Boolean,
        wg: Int32,
        thread: Int32,
    ) -> tuple[Any, Any]:
        """From a tile's first scores to its last PV, which is issued and not waited for; returns the K and V cursors."""
        plan, blocks = self.plan, part.blocks
        q_state, k_state, v_state, held = cursors
        q_slot = q_state.index * plan.consumer_warpgroups + self.in_tile(wg)
        last = blocks.end - 1
        is_cut_left = last < blocks.inner_start if const_expr(self.is_windowed) else False
        if const_expr(plan.negates_scores):
            self.negate_scores(frags)
        if const_expr(self.is_windowed):
            self.mask_scores(args, frags, part, last, is_cut_left, BOTH)
        self.mask_scores(args, frags, part, last, not is_cut_left and last >= blocks.inner_end, RIGHT)
        self.free_q(pipes, part, last)
        self.first_probabilities(args, atoms, pipes, frags, softmax, part, v_state, wg, last)
        if const_expr(self.has_o_in_q and plan.q_stages > 1):
            if holds:  # by now the store has read it
                self.release_held(pipes, held, thread)
        if const_expr(plan.has_idle):
            k_state, v_state = self.skip_idle(pipes, k_state, v_state, part.idle, wg)
        # steady state: blocks cut on the right, whole blocks, blocks cut on the left
        cut = Int32(0)  # without a mask only the first block can reach past the last key
        if const_expr(plan.mask != "full"):
            cut = cutlass.max(last - blocks.inner_end, 0)
            for i in cutlass.range(cut, unroll=1):
                k_state, v_state = self.step(
                    args, atoms, pipes, frags, softmax, part, q_slot, k_state, v_state, wg, last - 1 - i, self.ends
                )
        inner = last - cut
        if const_expr(self.is_windowed):
            inner = cutlass.max(inner - blocks.inner_start, 0)
        for i in cutlass.range(inner, unroll=1):
            k_state, v_state = self.step(
                args, atoms, pipes, frags, softmax, part, q_slot, k_state, v_state, wg, last - 1 - cut - i, UNCUT
            )
        if const_expr(self.is_windowed):
            rest = last - cut - inner
            for i in cutlass.range(rest - blocks.start, unroll=1):
                k_state, v_state = self.step(
                    args, atoms, pipes, frags, softmax, part, q_slot, k_state, v_state, wg, rest - 1 - i, LEFT
                )
        self.drain(args, atoms, pipes, frags, softmax, part, v_state, wg)
        return k_state, v_state

    @cute.jit
    def first_probabilities(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        pipes: Pipelines,
        frags: Fragments,
        softmax: SoftmaxState,
        part: Part,
        v_state: Any,
        wg: Int32,
        n_block: Int32,
    ) -> None:
        """P of a tile's first block, whose masked scores are in registers."""
        update(softmax, acc_as_rows(frags.acc_S), args.scale_log2, True)
        to_operand(frags.acc_S, frags.tOrP, self.plan.dtype)

    @cute.jit
    def drain(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        pipes: Pipelines,
        frags: Fragments,
        softmax: SoftmaxState,
        part: Part,
        v_state: Any,
        wg: Int32,
    ) -> None:
        """Issue PV of a tile's last block."""
        await_stage(pipes.v, v_state, self.plan.frees_unseen)
        issue(atoms.mma_pv, frags.acc_O, frags.tOrP, frags.tOrVt[None, None, None, v_state.index], False)

    @cute.jit
    def jump(self, state: Any, count: Int32) -> Any:
        """The cursor behind `count` stages that the producer frees in this warpgroup's place (`Producer.free_unseen`)."""
        if const_expr(self.plan.mask != "full"):
            for _ in cutlass.range(count, unroll=1):
                state.advance()
        return state

    @cute.jit
    def skip(self, pipes: Pipelines, k_state: Any, v_state: Any, count: Int32, wg: Int32) -> tuple[Any, Any]:
        """Blocks in which this warpgroup has no visible key: take the turn, pass it on, and free the stages."""
        if const_expr(self.plan.mask != "full" or self.plan.has_idle):
            for _ in cutlass.range(count, unroll=1):
                self.turns.wait(wg)
                self.turns.pass_on(wg)
                k_state = skip_stage(pipes.k, k_state, self.plan.frees_unseen)
                v_state = skip_stage(pipes.v, v_state, self.plan.frees_unseen)
        return k_state, v_state

    @cute.jit
    def skip_idle(self, pipes: Pipelines, k_state: Any, v_state: Any, count: Int32, wg: Int32) -> tuple[Any, Any]:
        """Blocks of a tile in which this warpgroup has no row, behind the one that it computes."""
        return self.skip(pipes, k_state, v_state, count, wg)

    @cute.jit
    def skip_turns(self, count: Int32, wg: Int32) -> None:
        """Take the turns of so many blocks that this warpgroup does not compute, and pass them on."""
        if const_expr(self.turns.is_on and self.plan.mask != "full"):
            for _ in cutlass.range(count, unroll=1):
                self.turns.wait(wg)
                self.turns.pass_on(wg)

    @cute.jit
    def step(
        self,
        args: ForwardArgs,
        atoms: ForwardAtoms,
        pipes: Pipelines,
        frags: Fragments,
        softmax: SoftmaxState,
        part: Part,
        q_slot: Int32,
        k_state: Any,
        v_state: Any,
        wg: Int32,
        n_block: Int32,
        ends: Constexpr[Ends],
    ) -> tuple[Any, Any]:
        """Steady state: scores of `n_block`, and PV of the block before it, whose P is in registers."""
        await_stage(pipes.k, k_state, self.plan.frees_unseen)
        self.turns.wait(wg)
        issue(
            atoms.mma_qk, frags.acc_S, frags.tSrQ[None, None, None, q_slot],
            frags.tSrK[None, None, None, k_state.index], True,
        )  # fmt: skip
        await_stage(pipes.v, v_state, self.plan.frees_unseen)
        issue(atoms.mma_pv, frags.acc_O, frags.tOrP, frags.tOrVt[None, None, None, v_state.index], False)
        self.turns.pass_on(wg)
        warpgroup.wait_group(1)  # QK done, PV may still run
        pipes.k.consumer_release(k_state)
        k_state.advance()
        self.free_q(pipes, part, n_block)
        if const_expr(self.plan.negates_scores):
            self.negate_scores(frags)
        if const_expr(ends != UNCUT):
            self.mask_scores(args, frags, part, n_block, True, ends)
        moves = update(softmax, acc_as_rows(frags.acc_S), args.scale_log2, False)
        warpgroup.wait_group(0)  # PV done: V is free, and P may be overwritten
        pipes.v.consumer_release(v_state)
        v_state.advance()
        to_operand(frags.acc_S, frags.tOrP, self.plan.dtype)
        if moves:
            scale_rows(acc_as_rows(frags.acc_O), softmax.rescale)
        return k_state, v_state

    @cute.jit
    def negate_scores(self, frags: Fragments) -> None:
        """For a negative scale: the softmax knows positive ones only."""
        for i in cutlass.range_constexpr(cute.size(frags.acc_S)):
            frags.acc_S[i] = -frags.acc_S[i]

    @cute.jit
    def mask_scores(
        self, args: ForwardArgs, frags: Fragments, part: Part, n_block: Int32, is_cut: Any, ends: Constexpr[Ends]
    ) -> None:
        """If `is_cut`, hide what the rows do not see of a block that what they see may end in, on the left or right."""
        plan = self.plan
        if is_cut:
            visible = tuple(visible_keys(part.first_row + 8 * r, part.lengths, args.mask(plan.mask)) for r in (0, 1))
            columns = n_block * plan.tile_n + part.lane_col
            mask_columns(acc_as_rows(frags.acc_S), visible, columns, ends.left, ends.right)
