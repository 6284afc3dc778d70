"""A consumer warpgroup of the e4m3 kernel: 64 query rows of every tile.

Tiles, blocks, masks and pipelines are those of the 16-bit kernel (`kernels/forward/consumer.py`). What is of this kernel is
what happens to a block: weights that fill the range of e4m3, products whose sums are kept short, and descales.
"""

from typing import Any, NamedTuple

from flash_hopper.device.descales import LAST, BlockFactors, change_unit, make_descales, start_units
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
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.pipelines import await_stage, skip_stage
from flash_hopper.device.registers import to_operand_e4m3
from flash_hopper.device.softmax import scale_rows
from flash_hopper.device.softmax_e4m3 import E4m3State, advance, fold, make_state, move_reference, weights
from flash_hopper.geometry.blocks import Blocks
from flash_hopper.geometry.masks import Lengths
from flash_hopper.kernels.forward.args import Pipelines
from flash_hopper.kernels.forward.consumer import UNCUT, Consumer, Ends
from flash_hopper.kernels.forward.storage import WG_ROWS
from flash_hopper.kernels.forward_fp8.args import Fp8Args, Fp8Atoms
from flash_hopper.kernels.forward_fp8.epilogue import Fp8Epilogue
from flash_hopper.kernels.forward_fp8.storage import Fp8SharedTensors
from flash_hopper.plan.forward_fp8 import SUM_COLUMNS, ForwardFp8Plan

BUFFERS = 2  # pieces of PV in flight
ALL = 16  # parts of a block's columns


class Fp8Fragments(NamedTuple):
    """Operands and accumulators of one warpgroup."""

    tSrQ: cute.Tensor  # (MMA, M, K, slot) in shared memory
    tSrK: cute.Tensor  # (MMA, N, K, stage) in shared memory
    tOrVt: tuple[cute.Tensor, ...]  # of each piece of V^T's rows: (MMA, N, K, stage) in shared memory
    tOrP: cute.Tensor  # (MMA, M, K) in registers, 8 bit
    acc_S: cute.Tensor  # 64 x tile_n, float32
    acc_O: cute.Tensor  # 64 x tile_hdimv, float32
    acc_T: tuple[cute.Tensor, ...]  # 64 x a piece, float32: PV of one block; none if O is the accumulator
    tOrOnes: cute.Tensor | None  # (MMA, N, K, 1) in shared memory
    acc_sums: cute.Tensor | None  # 64 x SUM_COLUMNS, float32: row sums of one block, if they are a product of their own


class Fp8Part(NamedTuple):
    """As `Part` of the 16-bit kernel, with what the tile's descales are."""

    head: Int32
    band: Int32
    first_row: Int32
    lane_col: Int32
    lengths: Lengths
    blocks: Blocks
    before: Int32
    behind: Int32
    idle: Int32
    scales: Any


class Fp8Consumer(Consumer):
    """`plan` is compile-time. `warpgroup` counts consumers from 0, `thread` runs within the warpgroup."""

    plan: ForwardFp8Plan
    epilogue: Fp8Epilogue

    def __init__(self, plan: ForwardFp8Plan) -> None:
        super().__init__(plan)
        self.epilogue = Fp8Epilogue(plan)
        self.descales = make_descales(plan.descales)

    def make_state(self) -> E4m3State:  # type: ignore[override]
        """Registers of the softmax."""
        return make_state()

    def fragments(self, atoms: Fp8Atoms, shared: Fp8SharedTensors) -> Fp8Fragments:  # type: ignore[override]
        """Descriptors of the shared operands, registers of the rest."""
        plan = self.plan
        qk, part = atoms.mma_qk.get_slice(0), atoms.mma_part.get_slice(0)
        rows = plan.value_rows // plan.pieces
        pieces = [
            cute.local_tile(shared.sV_operand, (rows, plan.tile_n, plan.kv_stages), (i, 0, 0))
            for i in range(plan.pieces)
        ]
        parts = min(BUFFERS, plan.pieces) if plan.is_two_level else 0
        ones, sums = None, None
        if plan.has_ones_apart:
            ones = atoms.mma_sums.make_fragment_B(atoms.mma_sums.get_slice(0).partition_B(shared.sOnes))
            sums = cute.make_rmem_tensor(atoms.mma_sums.partition_shape_C((WG_ROWS, SUM_COLUMNS)), Float32)
        part_shape = atoms.mma_part.partition_shape_C((WG_ROWS, rows))
        return Fp8Fragments(
            tSrQ=atoms.mma_qk.make_fragment_A(qk.partition_A(shared.sQ)),
            tSrK=atoms.mma_qk.make_fragment_B(qk.partition_B(shared.sK)),
            tOrVt=tuple(atoms.mma_part.make_fragment_B(part.partition_B(piece)) for piece in pieces),
            tOrP=cute.make_rmem_tensor(((4, 2, 2), 1, plan.tile_n // 32), ELEMENT_TYPES[plan.dtype]),
            acc_S=cute.make_rmem_tensor(atoms.mma_qk.partition_shape_C((WG_ROWS, plan.tile_n)), Float32),
            acc_O=cute.make_rmem_tensor(atoms.mma_pv.partition_shape_C((WG_ROWS, plan.tile_hdimv)), Float32),
            acc_T=tuple(cute.make_rmem_tensor(part_shape, Float32) for _ in range(parts)),
            tOrOnes=ones,
            acc_sums=sums,
        )

    def part(self, args: Fp8Args, tile: Any, wg: Int32, thread: Int32) -> Fp8Part:  # type: ignore[override]
        """This warpgroup's part of a tile."""
        part = super().part(args, tile, wg, thread)
        row = tile.block * self.plan.tile_m + wg * WG_ROWS
        return Fp8Part(*part, self.descales.of_tile(args, self.batch, tile, row))

    @cute.jit
    def first_probabilities(  # type: ignore[override]
        self,
        args: Fp8Args,
        atoms: Fp8Atoms,
        pipes: Pipelines,
        frags: Fp8Fragments,
        state: E4m3State,
        part: Fp8Part,
        v_state: Any,
        wg: Int32,
        n_block: Int32,
    ) -> None:
        """Weights of a tile's first block, whose masked scores are in registers, and PV if nothing is to run beside it."""
        factors = self.descales.of_block(args, part.scales, n_block)
        if const_expr(self.descales.has_units):
            start_units(state.units)
        value = self.descales.of_values(args, part.scales, n_block)
        self.move_reference(frags, state, factors, True)
        self.weigh(frags, state, factors, 0, ALL)
        to_operand_e4m3(frags.acc_S, frags.tOrP)
        advance(state)
        if const_expr(not self.plan.overlaps):
            self.add_values(atoms, pipes, frags, state, value, v_state)

    @cute.jit
    def step(  # type: ignore[override]
        self,
        args: Fp8Args,
        atoms: Fp8Atoms,
        pipes: Pipelines,
        frags: Fp8Fragments,
        state: E4m3State,
        part: Fp8Part,
        q_slot: Int32,
        k_state: Any,
        v_state: Any,
        wg: Int32,
        n_block: Int32,
        ends: Constexpr[Ends],
    ) -> tuple[Any, Any]:
        """Steady state: scores of `n_block`, and PV of the block before it; or, if not beside each other, PV of its own."""
        factors = self.descales.of_block(args, part.scales, n_block)
        # of the block whose PV is added in this step
        value = self.descales.of_values(args, part.scales, n_block + 1 if const_expr(self.plan.overlaps) else n_block)
        if const_expr(not self.plan.overlaps):  # of the block before
            pipes.v.consumer_release(v_state)
            v_state.advance()
        await_stage(pipes.k, k_state, self.plan.frees_unseen)
        issue(
            atoms.mma_qk, frags.acc_S, frags.tSrQ[None, None, None, q_slot],
            frags.tSrK[None, None, None, k_state.index], True,
        )  # fmt: skip
        if const_expr(self.plan.overlaps):
            await_stage(pipes.v, v_state, self.plan.frees_unseen)
            self.issue_values(atoms, frags, v_state.index)
        if const_expr(self.plan.overlaps):
            warpgroup.wait_group(1)  # QK done, PV may still run
        else:
            warpgroup.wait_group(0)
        pipes.k.consumer_release(k_state)
        k_state.advance()
        if const_expr(self.plan.negates_scores):
            self.negate_scores(frags)
        if const_expr(ends != UNCUT):
            self.mask_scores(args, frags, part, n_block, True, ends)
        moves = self.move_reference(frags, state, factors, False)
        if const_expr(self.plan.overlaps):
            if const_expr(self.plan.weights_ahead > 0):
                self.weigh(frags, state, factors, 0, self.plan.weights_ahead)
            warpgroup.wait_group(0)  # PV done: V is free
            pipes.v.consumer_release(v_state)
            v_state.advance()
            if const_expr(self.plan.is_two_level):
                self.fold_all(frags, state, value)
            elif moves:
                scale_rows(acc_as_rows(frags.acc_O), state.following)
        self.weigh(frags, state, factors, self.plan.weights_ahead, ALL)
        to_operand_e4m3(frags.acc_S, frags.tOrP)
        advance(state)
        if const_expr(not self.plan.overlaps):
            self.add_values(atoms, pipes, frags, state, value, v_state)
        return k_state, v_state

    @cute.jit
    def skip_idle(  # type: ignore[override]
        self, pipes: Pipelines, k_state: Any, v_state: Any, count: Int32, wg: Int32
    ) -> tuple[Any, Any]:
        """Blocks of a tile in which this warpgroup has no row. Without overlap it holds a stage of V."""
        if const_expr(self.plan.overlaps):
            k_state, v_state = self.skip(pipes, k_state, v_state, count, wg)
        else:
            for _ in cutlass.range(count, unroll=1):
                pipes.v.consumer_release(v_state)
                v_state.advance()
                k_state = skip_stage(pipes.k, k_state, self.plan.frees_unseen)
                await_stage(pipes.v, v_state, self.plan.frees_unseen)
        return k_state, v_state

    @cute.jit
    def drain(  # type: ignore[override]
        self,
        args: Fp8Args,
        atoms: Fp8Atoms,
        pipes: Pipelines,
        frags: Fp8Fragments,
        state: E4m3State,
        part: Fp8Part,
        v_state: Any,
        wg: Int32,
    ) -> None:
        """Issue PV of a tile's last block, if that is not done yet."""
        if const_expr(self.plan.overlaps):
            if const_expr(self.descales.has_units):
                state.units[LAST] = self.descales.of_values(args, part.scales, part.blocks.start)
            await_stage(pipes.v, v_state, self.plan.frees_unseen)
            self.issue_values(atoms, frags, v_state.index)

    @cute.jit
    def finish_sums(  # type: ignore[override]
        self, frags: Fp8Fragments, state: E4m3State, tile: Any, part: Fp8Part, wg: Int32, thread: Int32
    ) -> None:
        """Until O is complete but for its factors, which are then in `state.rescale`, and may be staged."""
        self.epilogue.await_buffer(wg, thread)
        if const_expr(self.plan.overlaps):
            if const_expr(self.plan.looks_ahead):
                warpgroup.wait_group(1)  # PV done, the first scores may still be computed
            else:
                warpgroup.wait_group(0)
            if const_expr(self.plan.is_two_level):
                self.fold_all(frags, state, state.units[LAST])
        value = self.descales.of_output(part.scales, state.units)
        self.epilogue.normalise(state, value, tile, part.first_row)

    @cute.jit
    def move_reference(
        self, frags: Fp8Fragments, state: E4m3State, factors: BlockFactors, is_first: Constexpr[bool]
    ) -> Boolean:
        """Bring the rows' references up to the scores in registers; whether one of this warp moved."""
        rows = acc_as_rows(frags.acc_S)
        return move_reference(state, rows, factors.scores, factors.inverse, is_first)

    def weigh(self, frags: Fp8Fragments, state: E4m3State, factors: BlockFactors, first: int, end: int) -> None:
        """Scores to weights, parts [first, end) of `ALL`."""
        rows = acc_as_rows(frags.acc_S)
        first, end = (part * self.plan.tile_n // 4 // ALL for part in (first, end))
        weights(state, rows, factors.scores, not self.plan.has_sum_columns, first, end)

    def issue_values(self, atoms: Fp8Atoms, frags: Fp8Fragments, stage: Int32) -> None:
        """PV of a block, not waited for: a sum of its own, or added to O by the tensor core."""
        acc = frags.acc_T[0] if self.plan.is_two_level else frags.acc_O
        issue(atoms.mma_part, acc, frags.tOrP, frags.tOrVt[0][None, None, None, stage], self.plan.is_two_level)

    @cute.jit
    def add_values(
        self,
        atoms: Fp8Atoms,
        pipes: Pipelines,
        frags: Fp8Fragments,
        state: E4m3State,
        value: Float32 | None,
        v_state: Any,
    ) -> None:
        """PV of a block, piece by piece, added to O; the next piece is computed while one is added."""
        pieces, buffers = self.plan.pieces, len(frags.acc_T)
        await_stage(pipes.v, v_state, self.plan.frees_unseen)

        def start(i: int) -> None:
            piece = frags.tOrVt[i][None, None, None, v_state.index]
            issue(atoms.mma_part, frags.acc_T[i % buffers], frags.tOrP, piece, True)

        if const_expr(self.plan.has_ones_apart):
            issue(atoms.mma_sums, frags.acc_sums, frags.tOrP, frags.tOrOnes[None, None, None, 0], True)
        for i in cutlass.range_constexpr(buffers):
            start(i)
        change = self.change_of_unit(state, value)
        for i in cutlass.range_constexpr(pieces):
            warpgroup.wait_group(min(buffers - 1, pieces - 1 - i))
            self.fold_piece(frags, state, change, i)
            if const_expr(i + buffers < pieces):
                start(i + buffers)

    def fold_all(self, frags: Fp8Fragments, state: E4m3State, value: Float32 | None) -> None:
        """Add PV of a block to O; value: its descale."""
        self.fold_piece(frags, state, self.change_of_unit(state, value), 0)

    def change_of_unit(self, state: E4m3State, value: Float32 | None) -> tuple[Float32, Float32, Boolean] | None:
        """Of what O is counted in, if it may change."""
        return change_unit(state.units, value) if self.descales.has_units else None

    @cute.jit
    def fold_piece(self, frags: Fp8Fragments, state: E4m3State, change: Any, i: Constexpr[int]) -> None:
        """Add a piece of a block's PV to O, and with the first one its row sums to those before."""
        acc = frags.acc_T[i % len(frags.acc_T)]
        part = cute.make_tensor(acc.iterator, cute.make_layout(cute.size(acc)))
        width = cute.size(frags.acc_O) // self.plan.pieces
        o = cute.make_tensor(frags.acc_O.iterator + i * width, cute.make_layout(width))
        factors = (state.rescale[0], state.rescale[1])
        if const_expr(self.plan.has_sum_columns and i == 0):
            sums = frags.acc_sums if const_expr(self.plan.has_ones_apart) else part
            first = 0 if const_expr(self.plan.has_ones_apart) else width
            for r in cutlass.range_constexpr(2):
                state.row_sum[r] = state.row_sum[r] * factors[r] + sums[first + 2 * r]
        if const_expr(change is not None):
            factor, shrink, is_small = change
            factors = (factors[0] * factor, factors[1] * factor)
            if is_small:
                for j in cutlass.range_constexpr(width):
                    part[j] = part[j] * shrink
        fold(o, part, factors)
