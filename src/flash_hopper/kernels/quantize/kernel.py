"""The quantise kernel: e4m3 codes and scales of a tensor with heads, its Hadamard transform, or codes in another order
(specification 6.2 to 6.4).

Bound by memory: each element is read once, 16 bytes at a time, and up to two more blocks are on their way while one is computed.
"""

from typing import Any

from flash_hopper.device import placeholders
from flash_hopper.device.dsl import (
    ELEMENT_TYPES,
    Float8E4M3FN,
    Float32,
    Int32,
    SmemAllocator,
    const_expr,
    cuda,
    cute,
    cutlass,
    make_fake_tensor,
)
from flash_hopper.device.ptx import copy_async_16
from flash_hopper.device.registers import anew
from flash_hopper.geometry.arith import maximum, minimum
from flash_hopper.geometry.strips import BLOCK_ROWS, CHUNK_BYTES, swizzled_pass, transposed_chunk
from flash_hopper.kernels.quantize.args import BLOCK_INTS, Block, LengthArgs, RotaryArgs, ScaleArgs
from flash_hopper.kernels.quantize.blocks import make_blocks
from flash_hopper.kernels.quantize.strips import make_strips
from flash_hopper.plan.quantize import QuantizePlan
from flash_hopper.plan.roles import WARP
from flash_hopper.problem.dtypes import DType

LARGEST = 3.4028234663852886e38  # of float32
E4M3_MAX = 448.0
MOST_PIECES = 8  # of a thread's 16-byte pieces of the result in registers
SMALLEST_SCALE = 2.0**-120  # so that factor / scale is finite


class QuantizeKernel:
    """A CTA computes blocks of 128 rows of one head, one after the other.

    Shared memory: `plan.stages` blocks of the input, in whose place the result is put together; the block's place in the tensors,
    and the warps' maxima, per stage. A team, which shares rows of a block and their places in shared memory, is the CTA, or, with
    `plan.by_warp`, each warp. Per block:

      1. wait for its stage; the team meets: its chunks are there, and its part of the stage before is free
      2. start loading the block `stages` - 1 further on, into that stage
      3. each thread reads a strip, turns and transforms it in registers; largest magnitude of the warps
      4. barrier: the maxima are there, and nobody reads the stage any more; without maxima the team meets
      5. codes into the team's part of the stage, as they lie in the result
      6. the team meets; the result to global memory, neighbouring threads next to each other

    Maxima of a stage are written again after a barrier that everybody passes who has read them: that of the block between, or,
    of a single stage, those in front of a load.
    """

    def __init__(self, plan: QuantizePlan) -> None:
        self.plan = plan
        self.blocks = make_blocks(plan.is_ragged)
        self.strips = make_strips(plan)
        self.threads = plan.threads
        self.team = WARP if plan.by_warp else plan.threads
        self.teams = plan.threads // self.team
        self.vector = 16 // plan.dtype.itemsize  # elements of a chunk
        self.row_chunks = plan.head_dim // self.vector
        self.dtype = element_type(plan.dtype)
        self.out_dtype = self.dtype if plan.purpose == "transform" else Float8E4M3FN

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor | None,
        scales: ScaleArgs,
        signs: cute.Tensor | None,
        rotary: RotaryArgs | None,
        lengths: LengthArgs | None,
        factor: Float32,
        ctas: Int32,
        stream: cuda.CUstream,
    ):
        """x: (batch, seqlen, heads, head_dim); out: codes like x, or transposed (batch, heads, head_dim, 128 * blocks), or of the
        dtype of x; of a ragged batch both are without the batch. signs: (head_dim,) float32, +-1. factor: what results are
        multiplied by, which includes `plan.hadamard` (see `strips.py`)."""
        x, out = self.blocks.entries(x), self.blocks.entries(out)
        if const_expr(self.plan.purpose == "block"):
            scales = scales._replace(descale=self.blocks.entries(scales.descale))
        columns = self.blocks.count(x, lengths)
        total = columns * x.shape[2] * x.shape[0]
        self.kernel(x, out, scales, signs, rotary, lengths, factor, columns, total).launch(
            grid=[ctas, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.plan.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        mX: cute.Tensor,
        mOut: cute.Tensor | None,
        scales: ScaleArgs,
        mSigns: cute.Tensor | None,
        rotary: RotaryArgs | None,
        lengths: LengthArgs | None,
        factor: Float32,
        columns: Int32,
        total: Int32,
    ):
        """All blocks of a CTA."""
        plan, stages = self.plan, self.plan.stages
        thread, _, _ = cute.arch.thread_idx()
        first, _, _ = cute.arch.block_idx()
        step, _, _ = cute.arch.grid_dim()
        memory = SmemAllocator()
        chunks = self.row_chunks * plan.block_bytes // (plan.head_dim * plan.dtype.itemsize)
        sX = memory.allocate_tensor(self.dtype, cute.make_layout((self.vector, chunks, stages)), 128)
        sBlocks = memory.allocate_tensor(Int32, cute.make_layout((BLOCK_INTS, self.teams, stages)), 16)
        sMaxima = memory.allocate_tensor(Float32, cute.make_layout((self.threads // WARP, stages)), 16)
        cute.arch.griddepcontrol_wait()  # the input may come from the kernel before, which may still read the results' memory
        sSigns = None
        if const_expr(plan.has_signs):
            sSigns = memory.allocate_tensor(Int32, cute.make_layout(self.strips.sign_words), 16)
            self.strips.write_signs(sSigns, mSigns, thread)
            if const_expr(plan.by_warp):
                cute.arch.barrier()  # other warps' signs are there
        window = self.blocks.make_window(mX, lengths)
        for i in cutlass.range_constexpr(stages - 1):
            self.load(mX, sX, sBlocks, lengths, window, first + i * step, columns, total, Int32(i), thread)
        stage = Int32(0)
        for number in cutlass.range(first, total, step, unroll=1):
            if const_expr(stages == 1):
                cute.arch.barrier()  # the result of the block before is out of the stage
                self.load(mX, sX, sBlocks, lengths, window, number, columns, total, stage, thread)
                cute.arch.cp_async_wait_group(0)
                cute.arch.barrier()
            else:
                cute.arch.cp_async_wait_group(stages - 2)
                self.meet()
                free = stage + stages - 1 if stage == 0 else stage - 1
                ahead = number + (stages - 1) * step
                if const_expr(not plan.loads_late):
                    self.load(mX, sX, sBlocks, lengths, window, ahead, columns, total, free, thread)
            team, _ = self.place_of(thread)
            block = Block(*(sBlocks[i, team, stage] for i in range(BLOCK_INTS)))
            sStage, sTops = sX[None, None, stage], sMaxima[None, stage]
            if const_expr(plan.loads_late):
                values = self.strips.registers()
                self.strips.read_pieces(sStage, values, block, sSigns, rotary, anew(thread, block.written))
                self.load(mX, sX, sBlocks, lengths, window, ahead, columns, total, free, thread)
                self.finish(mOut, sStage, values, sTops, scales, factor, block, thread)
            elif const_expr(self.plan.is_ragged and not self.plan.is_transposed):
                if block.written > 0:
                    self.compute(mOut, sStage, sTops, scales, sSigns, rotary, factor, block, thread)
                else:
                    self.pass_over(scales, block, thread)
            else:
                self.compute(mOut, sStage, sTops, scales, sSigns, rotary, factor, block, thread)
            stage = stage + 1 if stage + 1 < stages else Int32(0)
        cute.arch.griddepcontrol_launch_dependents()

    def place_of(self, thread: Int32) -> tuple[Any, Int32]:
        """(team, which thread of it)."""
        return (thread // WARP, thread % WARP) if self.plan.by_warp else (0, thread)

    @cute.jit
    def meet(self) -> None:
        """What a thread of the team wrote to shared memory the others may read, and write over what they read."""
        if const_expr(self.plan.by_warp):
            cute.arch.sync_warp()
        else:
            cute.arch.barrier()

    @cute.jit
    def load(
        self, mX: cute.Tensor, sX: cute.Tensor, sBlocks: cute.Tensor, lengths: LengthArgs | None, window: cute.Tensor | None,
        number: Int32, columns: Int32, total: Int32, stage: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """Start loading a block, if there is one of that number, and say where it lies. Rows that do not count become zeros."""
        thread = anew(thread, number)
        if const_expr(self.plan.loads_late):  # without a branch, so that what follows is computed beside it
            self.start(
                mX, sX, sBlocks, lengths, window, minimum(number, total - 1), number < total, columns, stage, thread
            )
        elif number < total:
            self.start(mX, sX, sBlocks, lengths, window, number, True, columns, stage, thread)
        cute.arch.cp_async_commit_group()

    def start(
        self, mX: cute.Tensor, sX: cute.Tensor, sBlocks: cute.Tensor, lengths: LengthArgs | None, window: cute.Tensor | None,
        number: Int32, exists: Any, columns: Int32, stage: Int32, thread: Int32,
    ) -> None:  # fmt: skip
        """The loads of a block; zeros if it does not exist."""
        block = self.blocks.block(number, columns, mX, lengths, window)
        used = block.used if exists is True else cutlass.select_(exists, block.used, Int32(0))
        team, member = self.place_of(thread)
        self.note(block, sBlocks, team, member, stage)
        column, rows_per_pass = member % self.row_chunks, self.team // self.row_chunks
        row = team * (BLOCK_ROWS // self.teams) + member // self.row_chunks
        passes = self.plan.strip // self.vector
        gX = mX[block.entry, None, block.head, None]
        rows = passes, rows_per_pass, self.strips.is_tight
        sources = chunks_of_rows(gX, block.row + row, column, self.vector, *rows)
        for i in range(passes):
            chunk = team * (self.team * passes) + swizzled_pass(member, i, self.team, passes)
            place = sX[None, chunk, stage]
            size = cutlass.select_(row + i * rows_per_pass < used, Int32(CHUNK_BYTES), Int32(0))
            copy_async_16(place.iterator, sources[i].iterator, size)

    @cute.jit
    def note(self, block: Block, sBlocks: cute.Tensor, team: Any, member: Int32, stage: Int32) -> None:
        """Where the block lies, for its team."""
        if member == 0:
            for i in cutlass.range_constexpr(BLOCK_INTS):
                sBlocks[i, team, stage] = block[i]

    @cute.jit
    def compute(
        self, mOut: cute.Tensor | None, sX: cute.Tensor, sMaxima: cute.Tensor, scales: ScaleArgs, sSigns: cute.Tensor | None,
        rotary: RotaryArgs | None, factor: Float32, block: Block, thread: Int32,
    ) -> None:  # fmt: skip
        """A block that lies in sX (vector, chunks)."""
        values = self.strips.registers()
        self.strips.read_pieces(sX, values, block, sSigns, rotary, anew(thread, block.written))
        self.finish(mOut, sX, values, sMaxima, scales, factor, block, thread)

    @cute.jit
    def finish(
        self, mOut: cute.Tensor, sX: cute.Tensor, values: cute.Tensor, sMaxima: cute.Tensor, scales: ScaleArgs, factor: Float32,
        block: Block, thread: Int32,
    ) -> None:  # fmt: skip
        """The same from where the values are read."""
        purpose = self.plan.purpose
        thread = anew(thread, block.written)
        tops = self.strips.transform(values, thread)
        if const_expr(purpose in ("block", "absmax")):
            self.post_largest(values if tops is None else tops, sMaxima, thread)
            cute.arch.barrier()
        else:
            self.meet()
        if const_expr(purpose == "block"):
            scale = scale_of(self.largest(sMaxima, factor))
            factor = factor / scale
            if thread == 0:
                scales.descale[block.entry, block.head, block.column] = scale
        elif const_expr(purpose == "absmax"):
            if thread == 0:
                self.raise_group(scales, block, self.largest(sMaxima, factor))
        elif const_expr(purpose == "scaled"):
            factor = factor / self.group_scale(scales, block, thread)
        if const_expr(purpose != "absmax"):
            size = 128 // self.out_dtype.width
            team, member = self.place_of(thread)
            start = sX[None, team * (self.team * (self.plan.strip // self.vector))]
            pointer = cute.recast_ptr(start.iterator, dtype=self.out_dtype)
            sOut = cute.make_tensor(pointer, cute.make_layout((size, self.team * (self.plan.strip // size))))
            self.strips.write(sOut, values, factor, member)
            self.meet()
            self.store(mOut, sOut, block, thread)

    @cute.jit
    def pass_over(self, scales: ScaleArgs, block: Block, thread: Int32) -> None:
        """A block without rows, of which a ragged batch has some: a scale is all that it has."""
        if const_expr(self.plan.by_warp and self.plan.purpose in ("block", "absmax")):
            cute.arch.barrier()  # the maxima of the block before were read
        if const_expr(self.plan.purpose == "block"):
            if thread == 0:
                scales.descale[block.entry, block.head, block.column] = Float32(1.0)
        elif const_expr(self.plan.purpose == "scaled"):
            self.group_scale(scales, block, thread)

    def post_largest(self, values: cute.Tensor, sMaxima: cute.Tensor, thread: Int32) -> None:
        """The largest magnitude of a warp's values to shared memory. NaNs do not count."""
        tops = [Float32(0.0)] * 4
        for i in range(cute.size(values)):
            tops[i % 4] = cute.arch.fmax(tops[i % 4], cute.math.absf(values[i]))
        top = cute.arch.fmax(cute.arch.fmax(tops[0], tops[1]), cute.arch.fmax(tops[2], tops[3]))
        top = cute.arch.warp_reduction(top, cute.arch.fmax, threads_in_group=WARP)
        self.post(sMaxima, top, thread)

    @cute.jit
    def post(self, sMaxima: cute.Tensor, top: Float32, thread: Int32) -> None:
        """One lane's write."""
        if thread % WARP == 0:
            sMaxima[thread // WARP] = top

    def largest(self, sMaxima: cute.Tensor, factor: Float32) -> Float32:
        """The largest magnitude of the block's results, finite."""
        top = sMaxima[0]
        for i in range(1, self.threads // WARP):
            top = cute.arch.fmax(top, sMaxima[i])
        return cute.arch.fmin(top * factor, Float32(LARGEST))

    @cute.jit
    def raise_group(self, scales: ScaleArgs, block: Block, largest: Float32) -> None:
        """The group's maximum in memory; floats that are not negative sort like integers."""
        if block.sequence < scales.absmax.shape[0]:
            place = cute.domain_offset((block.sequence, block.head // scales.group), scales.absmax).iterator
            cute.arch.red(
                cute.recast_ptr(place, dtype=Int32), bits_of(largest), op="max", dtype="s32", sem="relaxed", scope="gpu"
            )

    @cute.jit
    def group_scale(self, scales: ScaleArgs, block: Block, thread: Int32) -> Float32:
        """The scale of the block's group; the group's first block writes it."""
        scale = Float32(1.0)
        if block.sequence < scales.absmax.shape[0]:
            group = block.head // scales.group
            scale = scale_of(scales.absmax[block.sequence, group])
            if thread == 0 and block.position == 0 and group * scales.group == block.head:
                scales.descale[block.sequence, group] = scale
        return scale

    @cute.jit
    def store(self, mOut: cute.Tensor, sOut: cute.Tensor, block: Block, thread: Int32) -> None:
        """The team's result in sOut (vector, chunks) to global memory, 16 bytes a thread and neighbouring threads beside each other."""
        if const_expr(self.plan.is_transposed):
            row_chunks = 8
        else:
            row_chunks = self.plan.head_dim * self.out_dtype.width // 128
        size = cute.size(sOut, mode=[0])
        passes, rows_per_pass = self.plan.strip // size, self.team // row_chunks
        team, member = self.place_of(thread)
        row, column = member // row_chunks, member % row_chunks
        if const_expr(not self.plan.is_transposed):
            row = row + team * (BLOCK_ROWS // self.teams)
        rows = passes, rows_per_pass, self.strips.is_tight
        if const_expr(self.plan.is_transposed):
            gOut = mOut[block.entry, block.head, None, None]
            targets = chunks_of_rows(gOut, row, block.column * row_chunks + column, size, *rows)
        else:
            gOut = mOut[block.entry, None, block.head, None]
            targets = chunks_of_rows(gOut, block.row + row, column, size, *rows)
        group = min(passes, MOST_PIECES)
        for first in cutlass.range_constexpr(0, passes, group):
            pieces = cute.make_rmem_tensor((size, group), self.out_dtype)
            for i in cutlass.range_constexpr(group):
                if const_expr(self.plan.is_transposed):
                    place = transposed_chunk(row + (first + i) * rows_per_pass, column)
                else:
                    place = swizzled_pass(member, first + i, self.team, self.plan.result_period)
                cute.autovec_copy(sOut[None, place], pieces[None, i])
            for i in cutlass.range_constexpr(group):
                at = row + (first + i) * rows_per_pass
                if const_expr(self.plan.is_transposed):
                    cute.autovec_copy(pieces[None, i], targets[first + i])
                else:
                    if at < block.written:
                        cute.autovec_copy(pieces[None, i], targets[first + i])


def chunks_of_rows(
    g: cute.Tensor, row: Int32, column: Int32, size: int, rows: int, step: int, is_tight: bool
) -> list[cute.Tensor]:
    """Chunk `column`, of `size` elements, of the rows `row`, `row` + step, ... of g (rows, elements).

    One product for all of them, as that of a row's place, 64 bits wide, takes six instructions. is_tight: one for each, which
    keeps fewer registers from block to block.
    """
    if is_tight:
        return [cute.local_tile(g[row + i * step, None], (size,), (column,)) for i in range(rows)]
    first = cute.local_tile(g[row, None], (size,), (column,))
    whole = cute.make_tensor(first.iterator, cute.make_layout((size, rows), stride=(1, step * g.stride[0])))
    return [whole[None, i] for i in range(rows)]


def bits_of(value: Float32) -> Int32:
    """The bit pattern."""
    pattern = cute.make_rmem_tensor(1, Float32)
    pattern[0] = value
    return cute.recast_tensor(pattern, Int32)[0]


@cute.jit
def scale_of(largest: Float32) -> Float32:
    """What codes are multiplied by to give values up to `largest`; 1 if that is 0."""
    scale = maximum(largest * (1.0 / E4M3_MAX), Float32(SMALLEST_SCALE))
    if largest == 0.0:
        scale = Float32(1.0)
    return scale


def element_type(dtype: DType) -> Any:
    """The DSL's type."""
    return Float32 if dtype is DType.FP32 else ELEMENT_TYPES[dtype]


def placeholder_arguments(plan: QuantizePlan) -> tuple[Any, ...]:
    """Arguments for `cute.compile`."""
    dtype = element_type(plan.dtype)
    batch = () if plan.is_ragged else (placeholders.size(),)
    seqlen, heads, padded = (placeholders.size() for _ in range(3))
    rows = (*batch, seqlen, heads, plan.head_dim)
    if plan.purpose == "absmax":
        out = None
    elif plan.is_transposed:
        out = chunked(Float8E4M3FN, *batch, heads, plan.head_dim, padded)
    else:
        out = chunked(dtype if plan.purpose == "transform" else Float8E4M3FN, *rows)
    return (
        chunked(dtype, *rows),
        out,
        scale_placeholders(plan, batch, heads),
        make_fake_tensor(Float32, (plan.head_dim,), (1,), assumed_align=4) if plan.has_signs else None,
        rotary_placeholders(plan),
        length_placeholders(plan),
        Float32(1.0),
        Int32(1),
        placeholders.stream(),
    )


def chunked(dtype: Any, *shape: Any) -> Any:
    """A tensor whose rows can be read and written 16 bytes at a time."""
    multiple = 128 // dtype.width
    strides = (*(cute.sym_int64(divisibility=multiple) for _ in shape[1:]), 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=16)


def scale_placeholders(plan: QuantizePlan, batch: tuple[Any, ...], heads: Any) -> ScaleArgs:
    """Of the tensors that the purpose needs."""

    def floats(*shape: Any) -> Any:
        return make_fake_tensor(Float32, shape, tuple(cute.sym_int64() for _ in shape), assumed_align=4)

    groups = (placeholders.size(), placeholders.size())
    descale = {"block": (*batch, heads, placeholders.size()), "scaled": groups}.get(plan.purpose)
    absmax = groups if plan.purpose in ("absmax", "scaled") else None
    return ScaleArgs(descale and floats(*descale), absmax and floats(*absmax), Int32(1))


def rotary_placeholders(plan: QuantizePlan) -> RotaryArgs | None:
    """Of the tables, if there are any."""
    if plan.rotary == "none":
        return None
    table = Float32 if plan.has_wide_table else element_type(plan.dtype)
    shape = (placeholders.size(), plan.rotary_dim // 2)
    offsets = make_fake_tensor(Int32, (placeholders.size(),), (1,), assumed_align=4) if plan.has_offsets else None
    return RotaryArgs(chunked(table, *shape), chunked(table, *shape), offsets, Int32(0))


def length_placeholders(plan: QuantizePlan) -> LengthArgs | None:
    """Of the tensors that say how long sequences are, if there are any."""

    def ints() -> Any:
        return make_fake_tensor(Int32, (placeholders.size(),), (1,), assumed_align=4)

    if not (plan.is_ragged or plan.has_seqused):
        return None
    return LengthArgs(ints() if plan.is_ragged else None, ints() if plan.has_seqused else None)
