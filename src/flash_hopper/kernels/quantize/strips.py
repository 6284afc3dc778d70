"""A thread's 64 or 128 values of a block: out of shared memory, turned and transformed, and back as codes.

`RowStrips` are consecutive elements (of one row, or of parts of several, if rows are shorter): rotary embedding and Hadamard
transform live here. `KeyStrips` are 8 elements of 8 keys, whose codes go back transposed, `CodeStrips` 16 codes of 4 keys.
Layouts: `geometry/strips.py`.

The Hadamard transform of n = 2^k neighbours, H[i][j] = (-1)^popcount(i & j), is k steps of sums and differences. Those between
elements of a strip are a thread's own; if n is 2 or 4 strips one or two follow between lanes. The input is multiplied by 1 / n
first, so that no sum overflows; what is missing then is in the factor that the kernel is given.

Two lanes with long strips x and y exchange halves (`QuantizePlan.exchanges`): one gives the upper half of x and gets the lower
one of y, so that each has sums and differences of half of the columns. That takes half as many shuffles as giving everything,
and as max(|a + b|, |a - b|) = |a| + |b|, rounded the same way, half as many maxima.
"""

from typing import Any

from flash_hopper.device.dsl import ELEMENT_TYPES, Constexpr, Float8E4M3FN, Float32, Int32, const_expr, cute, cutlass
from flash_hopper.geometry.arith import minimum
from flash_hopper.geometry.fp8 import key_at
from flash_hopper.geometry.strips import (
    CODE_COLUMNS,
    CODE_KEYS,
    COLUMNS,
    KEYS,
    STRIP,
    code_key,
    code_place,
    code_word,
    exchanged_chunk,
    piece_column,
    swizzled,
    swizzled_beside,
    transpose_place,
    transposed_word,
)
from flash_hopper.kernels.quantize.args import Block, RotaryArgs
from flash_hopper.plan.quantize import QuantizePlan
from flash_hopper.problem.dtypes import DType

UNUSED_NAN = 0x7FFFE5E5  # arithmetic gives another one
SIGN_BITS = (0x8000, -0x80000000)  # of the halves of a word
UPPER_HALF = -0x10000  # of a word
# Of prmt, which takes its bytes from two words, 0 to 3 and 4 to 7: pairs of their low and high bytes, and of halves
LOW_BYTES, HIGH_BYTES, LOW_HALVES, HIGH_HALVES = 0x5140, 0x7362, 0x5410, 0x7632


class RowStrips:
    """Strips along rows."""

    def __init__(self, plan: QuantizePlan) -> None:
        self.plan = plan
        self.vector = 16 // plan.dtype.itemsize  # elements of a chunk
        self.chunks = plan.strip // self.vector  # of a strip

    def registers(self) -> cute.Tensor:
        """For the values of a strip."""
        return cute.make_rmem_tensor(self.plan.strip, Float32)

    @property
    def is_tight(self) -> bool:
        """Whether angles leave so few registers that one piece at a time is turned."""
        return self.pieces_at_once == 1

    @property
    def has_packed_signs(self) -> bool:
        """Signs are applied to 16-bit elements as they lie in memory, else to float32 values."""
        return self.plan.dtype.itemsize == 2 and self.plan.rotary == "none"

    @property
    def sign_words(self) -> int:
        """int32 words of a row's signs: a sign bit in each half, or 8 signs in the low bits of each."""
        return self.plan.head_dim // (2 if self.has_packed_signs else COLUMNS)

    @cute.jit
    def write_signs(self, sSigns: cute.Tensor, signs: cute.Tensor, thread: Int32) -> None:
        """Fill sSigns (sign_words,) int32 from signs (head_dim,) float32."""
        per_word = self.plan.head_dim // self.sign_words
        if thread < self.sign_words:
            word = Int32(0)
            for i in cutlass.range_constexpr(per_word):
                if signs[thread * per_word + i] < 0.0:
                    word = word | (SIGN_BITS[i] if self.has_packed_signs else 1 << i)
            sSigns[thread] = word

    @cute.jit
    def read_pieces(
        self, sX: cute.Tensor, values: cute.Tensor, block: Block, sSigns: cute.Tensor | None, rotary: RotaryArgs | None,
        thread: Int32,
    ) -> None:  # fmt: skip
        """values (strip,) float32: the strip of a stage sX (vector, chunks), turned and with its signs."""
        plan = self.plan
        group = self.pieces_at_once
        for first in cutlass.range_constexpr(0, plan.strip // COLUMNS, group):
            angles: list[Any] = [None] * group
            if const_expr(plan.rotary != "none" and group > 1):
                numbers = [thread * (plan.strip // COLUMNS) + first + j for j in range(group)]
                angles = [self.angles(block, rotary, number) for number in numbers]
            for j in cutlass.range_constexpr(group):
                piece = cute.make_tensor(values.iterator + (first + j) * COLUMNS, cute.make_layout(COLUMNS))
                own = thread
                if const_expr(group == 1 and first > 0):
                    own = after(thread, [values[(first - 1) * COLUMNS + i] for i in range(COLUMNS)])
                self.read_piece(sX, piece, block, rotary, angles[j], sSigns, own, first + j)

    @cute.jit
    def read_piece(
        self, sX: cute.Tensor, piece: cute.Tensor, block: Block, rotary: RotaryArgs | None, angles: Any,
        sSigns: cute.Tensor | None, thread: Int32, i: Constexpr[int],
    ) -> None:  # fmt: skip
        """The i-th 8 elements, turned and with their signs, as float32."""
        plan, pieces, columns = self.plan, self.plan.strip // COLUMNS, self.plan.head_dim // COLUMNS
        number, column = thread * pieces + i, piece_column(thread, i, pieces, columns)
        own = strip_piece(sX, thread, i, self.chunks)
        if const_expr(plan.has_signs and self.has_packed_signs):
            self.change_packed_signs(own, sSigns, column)
        widen(own, piece)
        if const_expr(plan.rotary != "none"):
            if const_expr(plan.rotary_dim < plan.head_dim):
                if column < plan.rotary_dim // COLUMNS:
                    self.turn(sX, piece, block, rotary, angles, number)
            else:
                self.turn(sX, piece, block, rotary, angles, number)
        if const_expr(plan.has_signs and not self.has_packed_signs):
            self.change_signs(piece, sSigns, column)

    @property
    def pieces_at_once(self) -> int:
        """Pieces of a strip whose angles are on their way from memory at the same time: as many as there are registers for."""
        if self.plan.rotary == "none":
            return self.plan.strip // COLUMNS
        if self.plan.dtype is DType.FP32:
            return 1
        if self.plan.has_wide_table:
            return 4 if self.plan.rotary == "interleaved" else 1
        return 8 if self.plan.rotary == "interleaved" else 4

    @property
    def table_step(self) -> int:
        """Angles of a piece."""
        return COLUMNS // 2 if self.plan.rotary == "interleaved" else COLUMNS

    def change_packed_signs(self, piece: cute.Tensor, sSigns: cute.Tensor, column: Int32) -> None:
        """In place, 8 elements of 16 bits of which a row has 8 * `column` others before."""
        bits = cute.make_rmem_tensor(COLUMNS // 2, Int32)
        cute.autovec_copy(cute.local_tile(sSigns, (COLUMNS // 2,), (column,)), bits)
        words = cute.recast_tensor(piece, Int32)
        for i in range(COLUMNS // 2):
            words[i] = words[i] ^ bits[i]

    def change_signs(self, piece: cute.Tensor, sSigns: cute.Tensor, column: Int32) -> None:
        """The same for float32."""
        bits, words = sSigns[column], cute.recast_tensor(piece, Int32)
        for i in range(COLUMNS):
            words[i] = words[i] ^ (bits << (31 - i)) & SIGN_BITS[1]

    def angles(self, block: Block, rotary: RotaryArgs, number: Int32) -> tuple[cute.Tensor, cute.Tensor]:
        """cos and sin for piece `number` of the block, as they are in the tables; any where nothing is turned."""
        columns, last = self.plan.head_dim // COLUMNS, self.plan.rotary_dim // (2 * self.table_step) - 1
        offset = rotary.offset
        if rotary.offsets is not None:
            offset = offset + rotary.offsets[block.sequence]
        position = minimum(block.position + number // columns + offset, rotary.cos.shape[0] - 1)
        index = number % columns
        if self.plan.rotary == "halves":
            index = index % (last + 1)
        else:
            index = minimum(index, last)
        return self.table_part(rotary.cos, position, index), self.table_part(rotary.sin, position, index)

    def table_part(self, table: cute.Tensor, position: Int32, index: Int32) -> cute.Tensor:
        """(table_step,) of a table's row."""
        found = cute.make_rmem_tensor(self.table_step, table.element_type)
        cute.autovec_copy(cute.local_tile(table[position, None], (self.table_step,), (index,)), found)
        return found

    def turn(
        self, sX: cute.Tensor, own: cute.Tensor, block: Block, rotary: RotaryArgs, angles: Any, number: Int32
    ) -> None:
        """Rotary embedding of the 8 elements `own` (float32), piece `number` of the block, by `angles` or those of the tables."""
        columns = self.plan.head_dim // COLUMNS
        row, column = number // columns, number % columns
        cos, sin = map(widened, angles or self.angles(block, rotary, number))
        if self.plan.rotary == "interleaved":
            self.turn_neighbours(own, cos, sin)
        else:
            self.turn_halves(sX, own, cos, sin, row * columns, column)

    def turn_neighbours(self, own: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor) -> None:
        """(x0, x1) -> (x0 cos - x1 sin, x0 sin + x1 cos) for elements 2 i and 2 i + 1."""
        for i in range(COLUMNS // 2):
            x0, x1 = own[2 * i], own[2 * i + 1]
            own[2 * i] = x0 * cos[i] - x1 * sin[i]
            own[2 * i + 1] = x0 * sin[i] + x1 * cos[i]

    def turn_halves(
        self, sX: cute.Tensor, own: cute.Tensor, cos: cute.Tensor, sin: cute.Tensor, row_start: Int32, column: Int32
    ) -> None:
        """The same for elements i and i + rotary_dim / 2, of which one is in shared memory; row_start: the row's first piece."""
        half = self.plan.rotary_dim // (2 * COLUMNS)
        is_upper = column // half  # 0 or 1
        partner = widened(packed_piece(sX, row_start + column + half - 2 * half * is_upper, self.chunks))
        sign = Float32(2 * is_upper - 1)
        for i in range(COLUMNS):
            own[i] = own[i] * cos[i] + sign * (partner[i] * sin[i])

    @cute.jit
    def transform(self, values: cute.Tensor, thread: Int32) -> cute.Tensor | None:
        """Hadamard transform / n of each n values; with an exchange, the lane's half of the columns of both strips.

        Returns some magnitudes, whose largest is that of the values, if they are known.
        """
        tops = None
        if const_expr(self.plan.hadamard > 1):
            tops = self.transform_blocks(values, thread)
        return tops

    @cute.jit
    def transform_blocks(self, values: cute.Tensor, thread: Int32) -> cute.Tensor | None:
        """The same where there is a transform."""
        size, strip = self.plan.hadamard, self.plan.strip
        for i in cutlass.range_constexpr(0, strip, 2):
            a, b = values[i], values[i + 1] * (1.0 / size)
            values[i] = cute.math.fma(a, Float32(1.0 / size), b)
            values[i + 1] = cute.math.fma(a, Float32(1.0 / size), -b)
        sign = Float32(1 - 2 * (thread & 1))
        for step in (2, 4, 8, 16, 32, 64):
            if const_expr(step < min(size, strip)):
                for i in cutlass.range_constexpr(strip):
                    if const_expr(i & step == 0):
                        a, b = values[i], values[i + step]
                        if const_expr(self.plan.exchanges and 2 * step == strip):
                            values[i], values[i + step] = cute.math.fma(b, sign, a), cute.math.fma(a, sign, -b)
                        else:
                            values[i], values[i + step] = a + b, a - b
        tops = None
        if const_expr(self.plan.exchanges):
            tops = self.exchange(values, sign)
        else:
            for lanes in (1, 2):
                if const_expr(lanes * strip < size):
                    sign = Float32(1 - 2 * (thread // lanes & 1))
                    for i in cutlass.range_constexpr(strip):
                        other = cute.arch.shuffle_sync_bfly(values[i], offset=lanes)
                        values[i] = cute.math.fma(values[i], sign, other)
        return tops

    def exchange(self, values: cute.Tensor, sign: Float32) -> cute.Tensor:
        """The last step: sums and differences of the values that stay, in the first half, and those that come for the second half.

        sign: 1 in the lower lane, -1 in the upper one, whose own values are the subtrahends, and which sends its second half,
        the sums, negated: then all of this is one operation each. Returns 4 magnitudes.
        """
        half = self.plan.strip // 2
        tops = cute.make_rmem_tensor(4, Float32)
        tops.fill(0.0)
        for i in range(half):
            own, other = values[i], cute.arch.shuffle_sync_bfly(values[i + half], offset=1)
            tops[i % 4] = cute.arch.fmax(tops[i % 4], cute.math.absf(own) + cute.math.absf(other))
            values[i], values[i + half] = cute.math.fma(other, -sign, own), cute.math.fma(own, sign, other)
        return tops

    @cute.jit
    def write(self, sOut: cute.Tensor, values: cute.Tensor, factor: Float32, thread: Int32) -> None:
        """values * factor to the strip's chunks of the team's result, sOut (vector, chunks); thread: of the team."""
        vector = 16 * 8 // sOut.element_type.width
        for j in cutlass.range_constexpr(self.plan.strip // vector):
            scaled = cute.make_rmem_tensor(vector, Float32)
            for i in cutlass.range_constexpr(vector):
                scaled[i] = values[j * vector + i] * factor
            codes = cute.make_rmem_tensor(vector, sOut.element_type)
            codes.store(scaled.load().to(sOut.element_type))
            first, beside = self.result_chunk(thread, j, vector)
            cute.autovec_copy(codes, sOut[None, swizzled_beside(first, beside, self.plan.result_period)])

    def result_chunk(self, thread: Int32, j: int, vector: int) -> tuple[Int32, int]:
        """Where in the team's result the j-th chunk of a thread belongs, as a sum."""
        per_strip = self.plan.strip // vector
        if self.plan.exchanges:
            return exchanged_chunk(thread, j, per_strip)
        return thread * per_strip, j


class KeyStrips:
    """8 elements of each of 8 keys, as the transposed block wants them."""

    is_tight = False

    def __init__(self, plan: QuantizePlan) -> None:
        self.plan = plan
        self.chunks = STRIP * plan.dtype.itemsize // 16

    def registers(self) -> cute.Tensor:
        """For the values of a strip."""
        return cute.make_rmem_tensor(STRIP, Float32)

    @cute.jit
    def read_pieces(
        self, sX: cute.Tensor, values: cute.Tensor, block: Block, sSigns: None, rotary: None, thread: Int32
    ) -> None:
        """values (64,) float32: 8 elements of each key, key after key."""
        place = transpose_place(thread, self.plan.head_dim)
        for k in cutlass.range_constexpr(KEYS):
            key = 32 * place.group + 16 * (k // 4) + key_at(4 * place.quad + k % 4)
            found = widened(packed_piece(sX, key * (self.plan.head_dim // COLUMNS) + place.column, self.chunks))
            for i in cutlass.range_constexpr(COLUMNS):
                values[k * COLUMNS + i] = found[i]

    def transform(self, values: cute.Tensor, thread: Int32) -> None:
        """Nothing is transformed."""

    @cute.jit
    def write(self, sOut: cute.Tensor, values: cute.Tensor, factor: Float32, thread: Int32) -> None:
        """Codes of values * factor, four keys a word, to the transposed block in sOut (16, chunks)."""
        place = transpose_place(thread, self.plan.head_dim)
        words = cute.make_tensor(cute.recast_ptr(sOut.iterator, dtype=Int32), cute.make_layout(32 * self.plan.head_dim))
        for i in cutlass.range_constexpr(COLUMNS):
            for half in cutlass.range_constexpr(2):
                scaled = cute.make_rmem_tensor(4, Float32)
                for j in cutlass.range_constexpr(4):
                    scaled[j] = values[(4 * half + j) * COLUMNS + i] * factor
                codes = cute.make_rmem_tensor(4, Float8E4M3FN)
                codes.store(scaled.load().to(Float8E4M3FN))
                words[transposed_word(place, i, half)] = cute.recast_tensor(codes, Int32)[0]


class CodeStrips:
    """16 codes of each of 4 keys, which go back transposed as they are."""

    is_tight = False

    def __init__(self, plan: QuantizePlan) -> None:
        self.plan = plan
        self.chunks = STRIP // CODE_COLUMNS

    def registers(self) -> cute.Tensor:
        """For the codes of a strip."""
        return cute.make_rmem_tensor(CODE_COLUMNS, Int32)

    @cute.jit
    def read_pieces(
        self, sX: cute.Tensor, words: cute.Tensor, block: Block, sSigns: None, rotary: None, thread: Int32
    ) -> None:
        """words (16,): the codes of 4 keys for each column."""
        place = code_place(thread, self.plan.head_dim)
        found = cute.make_rmem_tensor((CODE_COLUMNS // 4, CODE_KEYS), Int32)  # 4 columns a word, of each key
        for k in cutlass.range_constexpr(CODE_KEYS):
            chunk = code_key(place, k) * (self.plan.head_dim // CODE_COLUMNS) + place.column
            source = cute.recast_tensor(sX[None, swizzled(chunk, self.chunks)], Int32)
            cute.autovec_copy(source, found[None, k])
        for i in cutlass.range_constexpr(CODE_COLUMNS // 4):
            a, b, c, d = (found[i, k] for k in range(CODE_KEYS))
            for j, pairs in ((0, LOW_BYTES), (2, HIGH_BYTES)):
                low, high = cute.arch.prmt(a, b, pairs), cute.arch.prmt(c, d, pairs)
                words[4 * i + j] = cute.arch.prmt(low, high, LOW_HALVES)
                words[4 * i + j + 1] = cute.arch.prmt(low, high, HIGH_HALVES)

    def transform(self, values: cute.Tensor, thread: Int32) -> None:
        """Nothing is transformed."""

    @cute.jit
    def write(self, sOut: cute.Tensor, words: cute.Tensor, factor: Float32, thread: Int32) -> None:
        """The words to the transposed block in sOut (16, chunks). There is no factor: codes stay what they are."""
        place = code_place(thread, self.plan.head_dim)
        target = cute.make_tensor(
            cute.recast_ptr(sOut.iterator, dtype=Int32), cute.make_layout(32 * self.plan.head_dim)
        )
        for i in cutlass.range_constexpr(CODE_COLUMNS):
            target[code_word(place, i)] = words[i]


def make_strips(plan: QuantizePlan) -> RowStrips | KeyStrips | CodeStrips:
    """The object for a plan."""
    if plan.purpose == "reorder":
        return CodeStrips(plan)
    return KeyStrips(plan) if plan.is_transposed else RowStrips(plan)


def after(thread: Int32, values: list[Float32]) -> Int32:
    """The same thread, as a number that is not there before values that were computed.

    Otherwise ptxas starts the loads of all pieces at once, for which there are too few registers; so it does for the elements of
    a piece of which the number does not depend.
    """
    top = values[0]
    for value in values[1:]:
        top = cute.arch.fmax(top, value)
    pattern = cute.make_rmem_tensor(1, Float32)
    pattern[0] = top
    return thread + Int32(cute.recast_tensor(pattern, Int32)[0] == UNUSED_NAN)


def packed_piece(sX: cute.Tensor, number: Int32, chunks_per_strip: int) -> cute.Tensor:
    """Piece `number` of 8 elements of a stage sX (vector, chunks): one chunk, or two of float32."""
    per_piece = COLUMNS // cute.size(sX, mode=[0])
    return joined(sX, [swizzled(number * per_piece + j, chunks_per_strip) for j in range(per_piece)])


def strip_piece(sX: cute.Tensor, thread: Int32, i: int, chunks: int) -> cute.Tensor:
    """The i-th 8 elements of a thread's strip, which has so many chunks."""
    per_piece = COLUMNS // cute.size(sX, mode=[0])
    return joined(sX, [swizzled_beside(thread * chunks, i * per_piece + j, chunks) for j in range(per_piece)])


def joined(sX: cute.Tensor, places: list[Int32]) -> cute.Tensor:
    """The elements of chunks of a stage sX (vector, chunks), one after the other, in registers."""
    vector = cute.size(sX, mode=[0])
    found = cute.make_rmem_tensor(vector * len(places), sX.element_type)
    for i, place in enumerate(places):
        part = cute.make_tensor(found.iterator + i * vector, cute.make_layout(vector))
        cute.autovec_copy(sX[None, place], part)
    return found


def widened(values: cute.Tensor) -> cute.Tensor:
    """The same as float32."""
    wide = cute.make_rmem_tensor(cute.size(values), Float32)
    widen(values, wide)
    return wide


def widen(values: cute.Tensor, wide: cute.Tensor) -> None:
    """values (n,) to wide (n,) float32. A bfloat16 is the upper half of a float32: one operation each, where a conversion takes two."""
    if values.element_type is not ELEMENT_TYPES[DType.BF16]:
        wide.store(values.load().to(Float32))
        return
    pairs, bits = cute.recast_tensor(values, Int32), cute.recast_tensor(wide, Int32)
    for i in range(cute.size(pairs)):
        bits[2 * i], bits[2 * i + 1] = pairs[i] << 16, pairs[i] & UPPER_HALF
