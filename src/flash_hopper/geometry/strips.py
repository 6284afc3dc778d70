"""How a block of 128 rows of one head is cut among the threads of the quantise kernel, and where its pieces lie in shared memory.

A block is a row of 16-byte chunks, row after row. Chunks of the input lie at `swizzled` places, so that threads that read
strips of 64 consecutive elements and threads that read single chunks of neighbouring rows both meet 8 different banks of 16
bytes. The result takes the same memory: rows of codes again as chunks, or the transposed block with 128 bytes a row. Integer
functions of Python ints or of the DSL's; `kernels/quantize` traces them, `tests/cpu/test_quantize_layout.py` compares them with
brute force.
"""

import math
from typing import NamedTuple

from flash_hopper.geometry.arith import Int
from flash_hopper.geometry.fp8 import key_at
from flash_hopper.problem.fp8 import FP8_BLOCK

BLOCK_ROWS = FP8_BLOCK  # rows of one head that share a scale, and that a CTA handles at a time
STRIP = 64  # elements of a thread; a Hadamard block is a part of a strip, or 2 or 4 strips
LONG_STRIP = 128  # the same, where so many registers pay
CHUNK_BYTES = 16
COLUMNS = 8  # elements of a row that a thread transposes
KEYS = 8  # keys of them
CODE_COLUMNS = 16  # the same of codes that are only reordered: a chunk of each key
CODE_KEYS = 4  # a word of each column


def threads_of(head_dim: int, strip: int) -> int:
    """Threads of a CTA: a strip each."""
    return BLOCK_ROWS * head_dim // strip


def hadamard_block(head_dim: int) -> int:
    """The largest power of two that divides the head dim: so many neighbouring elements are transformed together."""
    return head_dim & -head_dim


def swizzled(chunk: Int, chunks_per_strip: int) -> Int:
    """Where a chunk of 16 bytes lies, in chunks: the low three bits are turned by the number of the strip."""
    return chunk ^ ((chunk >> swizzle_shift(chunks_per_strip)) & 7)


def swizzle_shift(chunks_per_strip: int) -> int:
    """Which bits of a chunk's number turn the low three: those of the strip's number, or, of short strips, those above."""
    return max(3, chunks_per_strip.bit_length() - 1)


def swizzled_beside(first: Int, i: int, chunks_per_strip: int) -> Int:
    """`swizzled(first + i, chunks_per_strip)` by one operation for each i: no bit of i is set in first, nor is one that turns."""
    turned = first ^ ((first >> swizzle_shift(chunks_per_strip)) & 7)
    return (turned ^ (i % 8)) + i // 8 * 8


def piece_column(thread: Int, i: int, pieces: int, columns: int) -> Int:
    """Which `COLUMNS` elements of its row the i-th of a thread's `pieces` are, where a row has `columns`."""
    if pieces % columns == 0:
        return i % columns
    strips = columns // pieces
    if columns % pieces == 0 and strips & (strips - 1) == 0:
        return (thread & (strips - 1)) * pieces + i
    return (thread * pieces + i) % columns


def swizzled_pass(thread: Int, i: int, threads: int, chunks_per_strip: int) -> Int:
    """`swizzled(thread + i * threads, chunks_per_strip)`, by as few different turns as passes have."""
    turn = 8 << swizzle_shift(chunks_per_strip)
    period = math.lcm(turn, threads) // threads  # passes after which the turns are the same again
    return swizzled(thread + i % period * threads, chunks_per_strip) + i // period * period * threads


def exchanged_chunk(thread: Int, j: int, chunks_per_strip: int) -> tuple[Int, int]:
    """The j-th chunk of the result of a thread that has exchanged half a strip with its neighbour: the lower lane has the lower
    halves of both strips, the upper lane the upper ones. In two parts, for `swizzled_beside`; their sum is the chunk."""
    half = chunks_per_strip // 2
    upper = thread & 1
    return (thread - upper) * chunks_per_strip + upper * half, j // half * chunks_per_strip + j % half


class TransposePlace(NamedTuple):
    """What a thread transposes: `COLUMNS` elements from 8 * `column` on, of the keys 32 * `group` + those of lane `quad`."""

    column: Int
    quad: Int
    group: Int


def transpose_place(thread: Int, head_dim: int) -> TransposePlace:
    """A warp takes 8 columns (or 2 or 4, if the head dim has no more in common) of 4 quads at a time."""
    columns = head_dim // COLUMNS
    width = min(columns & -columns, 8)
    rest = thread // (4 * width)
    column = thread % width + width * (rest % (columns // width))
    return TransposePlace(column, thread // width % 4, rest // (columns // width))


def transposed_word(place: TransposePlace, element: int, half: int) -> Int:
    """Where, in words of 4 bytes, the codes of 4 keys lie: those of element `element` of the columns, half `half` of 32 keys."""
    return transposed_chunk(place.column * COLUMNS + element, 2 * place.group + half) * 4 + place.quad


def transposed_chunk(row: Int, unit: Int) -> Int:
    """Where, in chunks of 16 bytes, keys [16 * unit, 16 * unit + 16) of a row of the transposed block lie."""
    return row * 8 + (unit ^ (row // COLUMNS & 7))


class CodePlace(NamedTuple):
    """Which codes a thread reorders: `CODE_COLUMNS` from 16 * `column` on, of the keys 32 * `group` + 16 * `half` + those of lane
    `quad`."""

    column: Int
    quad: Int
    half: Int
    group: Int


def code_place(thread: Int, head_dim: int) -> CodePlace:
    """A warp takes 4 columns (or 2 or 1, if the head dim has no more in common) of 4 quads and both halves at a time.

    Fewer columns are those of 2 or 4 groups, whose words are then in other banks: 0 and 2 come before 1 and 3.
    """
    columns = head_dim // CODE_COLUMNS
    width = min(columns & -columns, 4)
    rest = thread // (8 * width)
    group = rest % 2 * 2 + rest // 2 % 2
    return CodePlace(thread % width + rest // 4 * width, thread // width % 4, thread // (4 * width) % 2, group)


def code_key(place: CodePlace, i: int) -> Int:
    """The `i`-th key of a thread, in the order of the bytes of a word."""
    return 32 * place.group + 16 * place.half + key_at(CODE_KEYS * place.quad + i)


def code_word(place: CodePlace, element: int) -> Int:
    """Where, in words of 4 bytes, the codes of element `element` of the columns lie in the transposed block."""
    return transposed_chunk(place.column * CODE_COLUMNS + element, 2 * place.group + place.half) * 4 + place.quad
