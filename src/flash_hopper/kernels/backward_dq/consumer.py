"""A consumer warpgroup of the query-parallel backward kernel: 64 query rows of every tile, from scores to dQ.

Per key block it issues S and dP together, makes P while dP runs, then dS, then issues dQ; while it makes P and dS the
tensor core works for the other warpgroups. V is free as soon as dP is done, K when dQ is.
"""

from typing import Any, NamedTuple

from flash_hopper.device.accumulate import add_to_rows
from flash_hopper.device.barriers import Turns, epilogue_sync
from flash_hopper.device.dsl import ELEMENT_TYPES, Constexpr, Float32, Int32, const_expr, cute, cutlass, warp, warpgroup
from flash_hopper.device.gemm import issue
from flash_hopper.device.layouts import acc_as_operand_a, acc_as_rows, transposed
from flash_hopper.device.pipelines import await_full, consumer_state, partition, skip_stage
from flash_hopper.device.probabilities import clear_rows, exponentials, grad_rows, hide_columns
from flash_hopper.device.registers import to_operand
from flash_hopper.device.sequences import make_batch
from flash_hopper.geometry.arith import maximum
from flash_hopper.geometry.blocks import key_blocks
from flash_hopper.geometry.masks import Lengths, visible_keys
from flash_hopper.kernels.backward_dq.args import DqArgs, DqAtoms, Pipelines, SharedTensors
from flash_hopper.kernels.backward_dq.storage import WG_ROWS
from flash_hopper.plan.backward import BackwardDqPlan
from flash_hopper.plan.roles import TILE_SLOTS


class Fragments(NamedTuple):
    """Operands and accumulators of one warpgroup."""

    tSrQ: cute.Tensor  # (MMA, M, K) in shared memory
    tSrK: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tPrdO: cute.Tensor  # (MMA, M, K) in shared memory
    tPrV: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tQrdS: cute.Tensor  # (MMA, M, K) in registers, 16 bit
    tQrKt: cute.Tensor  # (MMA, N, K, stage) in shared memory
    acc_S: cute.Tensor  # 64 x tile_n, float32
    acc_dP: cute.Tensor  # 64 x tile_n, float32
    acc_dQ: cute.Tensor  # 64 x tile_hdim, float32


class RowView(NamedTuple):
    """A thread's two rows, 8 apart, and their statistics."""

    first_row: Int32
    lane_col: Int32
    lse_log2: cute.Tensor
    delta: cute.Tensor
    lengths: Lengths  # of the tile's sequence


class Consumer:
    """`plan` is compile-time. `wg` counts consumers from 0, `thread` runs within the warpgroup."""

    def __init__(self, plan: BackwardDqPlan) -> None:
        self.plan = plan
        self.batch = make_batch(plan.is_ragged)
        self.turns = Turns(plan.consumer_warpgroups, plan.has_pingpong)

    @cute.jit
    def run(
        self, args: DqArgs, atoms: DqAtoms, shared: SharedTensors, pipes: Pipelines, wg: Int32, thread: Int32
    ) -> None:
        """All tiles that the producer posts."""
        plan = self.plan
        frags = self.fragments(atoms, shared, wg)
        lse_log2, delta = (cute.make_rmem_tensor(2, Float32) for _ in range(2))
        rows_state, tile_state = consumer_state(1), consumer_state(TILE_SLOTS)
        k_state, v_state = consumer_state(plan.k_stages), consumer_state(plan.v_stages)
        self.turns.start(wg)
        tile = pipes.tiles.read(tile_state)
        tile_state.advance()
        while tile.block >= 0:
            first_row = tile.block * plan.tile_m + wg * WG_ROWS + thread // 32 * 16 + thread % 32 // 4
            lengths = self.batch.lengths(tile, args.mQ, args.mK)
            self.load_statistics(args, tile, first_row, lengths.q, lse_log2, delta)
            view = RowView(first_row, thread % 4 * 2, lse_log2, delta, lengths)
            pipes.rows.consumer_wait(rows_state)
            k_state, v_state = self.tile(args, atoms, pipes, frags, view, tile, k_state, v_state, wg)
            if const_expr(plan.accumulates):
                pipes.rows.consumer_release(rows_state)
                self.add_dq(args, frags, tile, lengths.q, wg, thread)
            else:
                if const_expr(plan.is_ragged):
                    clear_rows(frags.acc_dQ, lengths.q - first_row)
                self.store_dq(args, atoms, shared, frags, tile, wg, thread)
                pipes.rows.consumer_release(rows_state)
            rows_state.advance()
            tile = pipes.tiles.read(tile_state)
            tile_state.advance()

    def fragments(self, atoms: DqAtoms, shared: SharedTensors, wg: Int32) -> Fragments:
        """Descriptors of the shared operands, registers of the rest."""
        plan = self.plan
        s, dp, dq = (mma.get_slice(0) for mma in (atoms.mma_s, atoms.mma_dp, atoms.mma_dq))
        acc_S, acc_dP = (
            cute.make_rmem_tensor(mma.partition_shape_C((WG_ROWS, plan.tile_n)), Float32)
            for mma in (atoms.mma_s, atoms.mma_dp)
        )
        return Fragments(
            tSrQ=atoms.mma_s.make_fragment_A(s.partition_A(shared.sQ))[None, None, None, wg],
            tSrK=atoms.mma_s.make_fragment_B(s.partition_B(shared.sK)),
            tPrdO=atoms.mma_dp.make_fragment_A(dp.partition_A(shared.sdO))[None, None, None, wg],
            tPrV=atoms.mma_dp.make_fragment_B(dp.partition_B(shared.sV)),
            tQrdS=cute.make_rmem_tensor(acc_as_operand_a(acc_S.layout), ELEMENT_TYPES[plan.dtype]),
            tQrKt=atoms.mma_dq.make_fragment_B(dq.partition_B(transposed(shared.sK))),
            acc_S=acc_S,
            acc_dP=acc_dP,
            acc_dQ=cute.make_rmem_tensor(atoms.mma_dq.partition_shape_C((WG_ROWS, plan.tile_hdim)), Float32),
        )

    @cute.jit
    def load_statistics(
        self, args: DqArgs, tile: Any, first_row: Int32, seqlen_q: Int32, lse_log2: cute.Tensor, delta: cute.Tensor
    ) -> None:
        """LSE and D of the two rows; rows past the sequence's get P = 0."""
        entry, start = self.batch.padded_entry(tile), self.batch.padded_query(tile)
        for r in cutlass.range_constexpr(2):
            row = first_row + 8 * r
            lse_log2[r] = Float32.inf
            delta[r] = Float32(0.0)
            if row < seqlen_q:
                lse_log2[r] = args.mStatistics[0, entry, tile.head, start + row]
                delta[r] = args.mStatistics[1, entry, tile.head, start + row]

    @cute.jit
    def tile(
        self, args: DqArgs, atoms: DqAtoms, pipes: Pipelines, frags: Fragments, view: RowView, tile: Any,
        k_state: Any, v_state: Any, wg: Int32,
    ) -> tuple[Any, Any]:  # fmt: skip
        """One tile up to unscaled dQ; returns the cursors."""
        plan = self.plan
        row = tile.block * plan.tile_m
        mask = args.mask(plan.mask)
        whole = key_blocks(row, plan.tile_m, view.lengths, plan.tile_n, mask)
        blocks = key_blocks(row + wg * WG_ROWS, WG_ROWS, view.lengths, plan.tile_n, mask)
        for _ in cutlass.range(whole.end - blocks.end, unroll=1):
            k_state, v_state = self.skip(pipes, k_state, v_state, wg)
        frags.acc_dQ.fill(0.0)
        last = blocks.end - 1
        first_inner = blocks.end - blocks.inner_end
        after_inner = maximum(first_inner, blocks.end - blocks.inner_start)
        # Masked blocks, then inner ones and those after them. The inner blocks' loop stands first all the same: ptxas makes
        # the descriptors of a second loop from halves (head dim 128: 25 instructions a step more).
        for part in cutlass.range(2, unroll=1):
            cut = part * after_inner
            for i in cutlass.range(first_inner, cut, unroll=1):
                k_state, v_state = self.step(args, atoms, pipes, frags, view, k_state, v_state, wg, last - i, False)
            for i in cutlass.range(cut, cutlass.select_(part == 0, first_inner, blocks.end - blocks.start), unroll=1):
                k_state, v_state = self.step(args, atoms, pipes, frags, view, k_state, v_state, wg, last - i, True)
        if const_expr(plan.is_windowed):
            for _ in cutlass.range(blocks.start - whole.start, unroll=1):
                k_state, v_state = self.skip(pipes, k_state, v_state, wg)
        return k_state, v_state

    @cute.jit
    def skip(self, pipes: Pipelines, k_state: Any, v_state: Any, wg: Int32) -> tuple[Any, Any]:
        """A block in which this warpgroup has no visible key: free its stages, take the turn and pass it on."""
        self.turns.wait(wg)
        self.turns.pass_on(wg)
        k_state = skip_stage(pipes.k, k_state)
        v_state = skip_stage(pipes.v, v_state)
        return k_state, v_state

    @cute.jit
    def step(
        self, args: DqArgs, atoms: DqAtoms, pipes: Pipelines, frags: Fragments, view: RowView, k_state: Any,
        v_state: Any, wg: Int32, n_block: Int32, is_masked: Constexpr[bool],
    ) -> tuple[Any, Any]:  # fmt: skip
        """One key block from S to dQ."""
        await_full(pipes.k, k_state)
        self.turns.wait(wg)
        self.issue_s(atoms, frags, k_state)
        await_full(pipes.v, v_state)
        self.issue_dp(atoms, frags, v_state)
        self.turns.pass_on(wg)
        warpgroup.wait_group(1)  # S
        self.make_p(args, pipes, frags, view, v_state, n_block, is_masked)
        warpgroup.wait_group(0)  # dP
        pipes.v.consumer_release(v_state)
        v_state.advance()
        grad_rows(acc_as_rows(frags.acc_S), acc_as_rows(frags.acc_dP), view.delta)
        to_operand(frags.acc_dP, frags.tQrdS, self.plan.dtype)
        self.issue_dq(atoms, frags, k_state)
        warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        k_state.advance()
        return k_state, v_state

    def issue_s(self, atoms: DqAtoms, frags: Fragments, k_state: Any) -> None:
        """S = Q K^T."""
        issue(atoms.mma_s, frags.acc_S, frags.tSrQ, frags.tSrK[None, None, None, k_state.index], True)

    def issue_dp(self, atoms: DqAtoms, frags: Fragments, v_state: Any) -> None:
        """dP = dO V^T."""
        issue(atoms.mma_dp, frags.acc_dP, frags.tPrdO, frags.tPrV[None, None, None, v_state.index], True)

    def issue_dq(self, atoms: DqAtoms, frags: Fragments, k_state: Any) -> None:
        """dQ += dS K."""
        issue(atoms.mma_dq, frags.acc_dQ, frags.tQrdS, frags.tQrKt[None, None, None, k_state.index], False)

    @cute.jit
    def make_p(
        self, args: DqArgs, pipes: Pipelines, frags: Fragments, view: RowView, v_state: Any, n_block: Int32,
        is_masked: Constexpr[bool],
    ) -> None:  # fmt: skip
        """Scores to P while dP, from the V at `v_state`, is on its way."""
        plan, rows = self.plan, acc_as_rows(frags.acc_S)
        half = cute.size(rows, mode=[1]) // 2
        exponentials(rows, args.scale_log2, view.lse_log2, 0, half)
        # a wait that passes at once: a branch, without which ptxas moves the wait for dP above all exponentials; the other
        # half goes between the instructions that follow that wait
        await_full(pipes.v, v_state)
        exponentials(rows, args.scale_log2, view.lse_log2, half, 2 * half)
        if const_expr(is_masked):
            mask = args.mask(plan.mask)
            visible = tuple(visible_keys(view.first_row + 8 * r, view.lengths, mask) for r in (0, 1))
            hide_columns(rows, visible, n_block * plan.tile_n + view.lane_col, plan.is_windowed)

    @cute.jit
    def add_dq(self, args: DqArgs, frags: Fragments, tile: Any, seqlen_q: Int32, wg: Int32, thread: Int32) -> None:
        """scale * dQ to float32 values in memory."""
        row, start = tile.block * self.plan.tile_m + wg * WG_ROWS, self.batch.query_row(tile)
        mdQ = args.mdQ[None, None, tile.head, self.batch.entry(tile, args.mdQ.shape[3])]
        add_to_rows(frags.acc_dQ, args.scale, mdQ, start + row, Int32(0), start + seqlen_q, thread)

    @cute.jit
    def store_dq(
        self, args: DqArgs, atoms: DqAtoms, shared: SharedTensors, frags: Fragments, tile: Any, wg: Int32,
        thread: Int32,
    ) -> None:  # fmt: skip
        """scale * dQ through this warpgroup's part of Q, which is done; returns when the store has read it."""
        dtype = ELEMENT_TYPES[self.plan.dtype]
        store_matrix = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), dtype)
        r2s = cute.make_tiled_copy_C(store_matrix, atoms.mma_dq).get_slice(thread)
        rdQ = cute.make_rmem_tensor_like(frags.acc_dQ, dtype)
        rdQ.store((frags.acc_dQ.load() * args.scale).to(dtype))
        sdQ = shared.sQ[None, None, wg]
        epilogue_sync(wg)  # every warp of the warpgroup has finished its wgmmas on Q
        cute.copy(r2s, r2s.retile(rdQ), r2s.partition_D(sdQ))
        cute.arch.fence_proxy("async.shared", space="cta")  # these writes, before the TMA store reads them
        epilogue_sync(wg)  # ... from all threads of the warpgroup
        if thread < 32:
            band = tile.block * self.plan.consumer_warpgroups + wg
            mdQ = self.batch.stored_queries(args.mdQ, tile, tile.head)
            gdQ = cute.local_tile(mdQ, (WG_ROWS, self.plan.tile_hdim), (band, 0))
            dst, src = partition(atoms.tma_dq, gdQ, sdQ)
            with cute.arch.elect_one():
                cute.copy(atoms.tma_dq, src, dst)
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
