"""How the quantise kernel cuts a block among its threads: every element has one place and one thread, and banks do not collide."""

import itertools

import pytest
import torch

from flash_hopper.geometry.fp8 import key_at
from flash_hopper.geometry.strips import (
    BLOCK_ROWS,
    CODE_COLUMNS,
    CODE_KEYS,
    COLUMNS,
    KEYS,
    LONG_STRIP,
    STRIP,
    code_key,
    code_place,
    code_word,
    exchanged_chunk,
    hadamard_block,
    piece_column,
    swizzled,
    swizzled_beside,
    swizzled_pass,
    threads_of,
    transpose_place,
    transposed_chunk,
    transposed_word,
)
from flash_hopper.plan.quantize import plan_quantize
from flash_hopper.problem.dtypes import DType
from flash_hopper.reference.quantize import transposed

HEAD_DIMS = range(16, 257, 16)
CHUNKS = (4, 8, 16, 32)  # of a strip: of 8, 16 and 32 bits, and of a long one


def words_of_thread(thread, head_dim):
    """(word, [(key, column)] * 4) that a thread writes, as `KeyStrips.write` does."""
    place = transpose_place(thread, head_dim)
    for element in range(COLUMNS):
        for half in range(2):
            keys = [32 * place.group + 16 * half + key_at(4 * place.quad + j) for j in range(4)]
            yield transposed_word(place, element, half), [(key, place.column * COLUMNS + element) for key in keys]


def reordered_words(thread, head_dim):
    """The same of a thread that moves codes, as `CodeStrips.write` does."""
    place = code_place(thread, head_dim)
    for element in range(CODE_COLUMNS):
        keys = [code_key(place, i) for i in range(CODE_KEYS)]
        yield code_word(place, element), [(key, place.column * CODE_COLUMNS + element) for key in keys]


WRITERS = pytest.mark.parametrize("words_of", [words_of_thread, reordered_words])


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_swizzled_chunks_are_the_chunks_in_another_order(head_dim, chunks):
    count = threads_of(head_dim, STRIP) * chunks
    assert sorted(swizzled(i, chunks) for i in range(count)) == list(range(count))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_passes_of_all_threads_go_to_the_same_places(head_dim, chunks):
    for threads in (threads_of(head_dim, STRIP), 32):
        for i, thread in itertools.product(range(chunks), range(threads)):
            assert swizzled_pass(thread, i, threads, chunks) == swizzled(thread + i * threads, chunks)


@pytest.mark.parametrize("chunks", CHUNKS[1:])
def test_the_part_of_a_warp_is_swizzled_as_the_whole(chunks):
    for warp, chunk in itertools.product(range(16), range(32 * chunks)):
        assert swizzled(warp * 32 * chunks + chunk, chunks) == warp * 32 * chunks + swizzled(chunk, chunks)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_strips_and_rows_of_chunks_meet_eight_banks_of_16_bytes(chunks):
    for first in range(0, 512, 8):
        lanes = range(first, first + 8)
        assert len({swizzled(lane, chunks) % 8 for lane in lanes}) == 8
        for j in range(chunks):
            assert len({swizzled(lane * chunks + j, chunks) % 8 for lane in lanes}) == 8


@pytest.mark.parametrize("chunks", CHUNKS)
def test_chunks_of_a_strip_are_found_from_its_first_one(chunks):
    for thread, i in itertools.product(range(256), range(chunks)):
        assert swizzled_beside(thread * chunks, i, chunks) == swizzled(thread * chunks + i, chunks)
        if chunks == LONG_STRIP // 16:  # of codes
            first, beside = exchanged_chunk(thread, i, chunks)
            assert swizzled_beside(first, beside, 2 * chunks) == swizzled(first + beside, 2 * chunks)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("pieces", [STRIP // COLUMNS, LONG_STRIP // COLUMNS])
def test_a_piece_knows_its_column(head_dim, pieces):
    columns = head_dim // COLUMNS
    for thread, i in itertools.product(range(128 * columns // pieces), range(pieces)):
        assert piece_column(thread, i, pieces, columns) == (thread * pieces + i) % columns


@pytest.mark.parametrize("chunks", CHUNKS)
def test_lanes_that_exchange_have_every_chunk_once_and_write_to_eight_banks(chunks):
    places = [
        [swizzled(sum(exchanged_chunk(thread, j, chunks)), 2 * chunks) for j in range(chunks)] for thread in range(64)
    ]
    assert sorted(itertools.chain(*places)) == list(range(64 * chunks))
    if chunks == LONG_STRIP // 16:  # of codes
        for first, j in itertools.product(range(0, 64, 8), range(chunks)):
            assert len({places[first + lane][j] % 8 for lane in range(8)}) == 8


def test_an_exchange_of_halves_gives_the_sums_and_differences_of_both_strips():
    x, y = torch.arange(2 * LONG_STRIP).reshape(2, -1)
    half, vector = LONG_STRIP // 2, 16
    lower, upper = (
        torch.cat((x[:half] + y[:half], x[:half] - y[:half])),
        torch.cat((x[half:] + y[half:], x[half:] - y[half:])),
    )
    result = torch.empty(2 * LONG_STRIP, dtype=torch.int64)
    for thread, values in enumerate((lower, upper)):
        for j, chunk in enumerate(values.reshape(-1, vector)):
            start = sum(exchanged_chunk(thread, j, LONG_STRIP // vector)) * vector
            result[start : start + vector] = chunk
    assert torch.equal(result, torch.cat((x + y, x - y)))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_strip_holds_whole_hadamard_blocks_or_is_one_of_two_or_four_lanes_that_do(head_dim):
    size = hadamard_block(head_dim)
    assert head_dim % size == 0 and (head_dim // size) % 2 == 1
    for strip in (STRIP, LONG_STRIP):
        assert strip % size == 0 or (size // strip in (2, 4) and size == head_dim)
    assert threads_of(head_dim, STRIP) % 32 == 0
    for is_transposed, rotary in itertools.product((False, True), ("none", "halves")):
        plan = plan_quantize(DType.BF16, head_dim, "block", is_transposed=is_transposed, rotary=rotary)
        assert plan.threads % 32 == 0 and (plan.strip == STRIP or not is_transposed)


@WRITERS
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_transposing_threads_read_and_write_every_code_once_and_in_the_order_of_the_reference(head_dim, words_of):
    codes = torch.arange(BLOCK_ROWS * head_dim).reshape(BLOCK_ROWS, head_dim)
    words = torch.full((head_dim * 32, 4), -1)
    for thread in range(threads_of(head_dim, STRIP)):
        for word, cells in words_of(thread, head_dim):
            assert words[word, 0] == -1
            words[word] = torch.tensor([codes[cell] for cell in cells])
    chunks = words.reshape(-1, 16)
    order = [transposed_chunk(row, unit) for row in range(head_dim) for unit in range(8)]
    assert torch.equal(chunks[order].reshape(head_dim, BLOCK_ROWS), transposed(codes))
    assert KEYS * COLUMNS == CODE_KEYS * CODE_COLUMNS == STRIP


@pytest.mark.parametrize(
    ("head_dim", "words_of"),
    [*((d, words_of_thread) for d in (64, 128, 192, 256)), *((d, reordered_words) for d in HEAD_DIMS)],
)
def test_no_two_lanes_of_a_warp_write_words_to_one_bank(head_dim, words_of):
    for warp in range(threads_of(head_dim, STRIP) // 32):
        lanes = [list(words_of(32 * warp + lane, head_dim)) for lane in range(32)]
        for step in range(2 * COLUMNS):
            assert len({lane[step][0] % 32 for lane in lanes}) == 32
