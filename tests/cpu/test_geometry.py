"""Block ranges and tile order against brute force, for every small shape and for random large ones."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.geometry.arith import ceil_div, clamp, maximum, minimum, round_up
from flash_hopper.geometry.blocks import first_query, key_blocks, query_blocks, visible_keys
from flash_hopper.geometry.tiles import SECTION_BYTES, SECTION_PAIRS, TileCoord, heads_per_section, tile_coord

LENGTHS = range(1, 12)


def sees(row, key, seqlen_q, seqlen_k, is_causal):
    """The mask in words: row i sees key j if the key exists and, causal, is not after i counted from the end."""
    return 0 <= key < seqlen_k and (not is_causal or key - seqlen_k <= row - seqlen_q)


@pytest.mark.parametrize("is_causal", [False, True])
def test_visible_keys_counts_the_mask_of_every_row(is_causal):
    for seqlen_q, seqlen_k in product(LENGTHS, range(12)):
        for row in range(seqlen_q):
            seen = [key for key in range(seqlen_k) if sees(row, key, seqlen_q, seqlen_k, is_causal)]
            limit = visible_keys(row, seqlen_q, seqlen_k, is_causal)
            assert seen == list(range(max(limit, 0))), (seqlen_q, seqlen_k, row)


def check_blocks(row, rows, seqlen_q, seqlen_k, tile_n, is_causal):
    full, end = key_blocks(row, rows, seqlen_q, seqlen_k, tile_n, is_causal)
    shape = (row, rows, seqlen_q, seqlen_k, tile_n, is_causal)
    real_rows = range(row, min(row + rows, seqlen_q))

    def block_sees(block):
        keys = range(block * tile_n, (block + 1) * tile_n)
        return [sees(r, key, seqlen_q, seqlen_k, is_causal) for r in real_rows for key in keys]

    assert 0 <= full <= end, shape
    assert end >= 1, shape
    assert all(all(block_sees(block)) for block in range(full)), f"a block without a mask needs one: {shape}"
    assert not any(any(block_sees(b)) for b in range(end, ceil_div(seqlen_k, tile_n) + 1)), (
        f"a visible key is missed: {shape}"
    )
    assert end == 1 or any(block_sees(end - 1)), f"the last block sees nothing: {shape}"
    assert full == end or not all(block_sees(full)), f"block {full} needs no mask: {shape}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tile_n", [1, 2, 3, 4])
@pytest.mark.parametrize("tile_m", [1, 2, 3, 5])
def test_key_blocks_visit_what_is_visible_and_mask_what_needs_it(tile_m, tile_n, is_causal):
    for seqlen_q, seqlen_k in product(LENGTHS, LENGTHS):
        for row in range(0, seqlen_q, tile_m):
            check_blocks(row, tile_m, seqlen_q, seqlen_k, tile_n, is_causal)


@given(st.data())
def test_key_blocks_of_random_shapes_with_the_kernels_tiles(data):
    tile_m, tile_n = data.draw(st.sampled_from([(64, 64), (128, 80), (128, 112), (192, 80), (192, 128), (256, 64)]))
    seqlen_q, seqlen_k = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 700))
    row = tile_m * data.draw(st.integers(0, (seqlen_q - 1) // tile_m))
    is_causal = data.draw(st.booleans())
    full, end = key_blocks(row, tile_m, seqlen_q, seqlen_k, tile_n, is_causal)
    last = min(row + tile_m, seqlen_q) - 1
    most = visible_keys(last, seqlen_q, seqlen_k, is_causal)  # the last row sees most, the first least
    least = visible_keys(row, seqlen_q, seqlen_k, is_causal)
    assert end == max(1, math.ceil(most / tile_n))
    assert full == min(end, max(0, least // tile_n))


@pytest.mark.parametrize("is_causal", [False, True])
def test_first_query_is_the_first_row_that_sees_a_key(is_causal):
    for seqlen_q, seqlen_k in product(LENGTHS, LENGTHS):
        for key in range(seqlen_k):
            seen = [row for row in range(seqlen_q) if sees(row, key, seqlen_q, seqlen_k, is_causal)]
            first = first_query(key, seqlen_q, seqlen_k, is_causal)
            assert seen == list(range(max(first, 0), seqlen_q)), (seqlen_q, seqlen_k, key)
            # a row sees a key if and only if the key is one of those that `visible_keys` counts
            assert seen == [r for r in range(seqlen_q) if key < visible_keys(r, seqlen_q, seqlen_k, is_causal)]


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_query_sees_a_key_past_the_end(is_causal):
    for seqlen_q, seqlen_k in product(LENGTHS, LENGTHS):
        for key in range(seqlen_k, seqlen_k + 8):
            assert first_query(key, seqlen_q, seqlen_k, is_causal) >= seqlen_q, (seqlen_q, seqlen_k, key)


def check_query_blocks(key, keys, seqlen_q, seqlen_k, tile_m, is_causal):
    start, full, end = query_blocks(key, keys, seqlen_q, seqlen_k, tile_m, is_causal)
    shape = (key, keys, seqlen_q, seqlen_k, tile_m, is_causal)
    real_keys = range(key, min(key + keys, seqlen_k))

    def block_sees(block):
        rows = range(block * tile_m, min((block + 1) * tile_m, seqlen_q))
        return [sees(row, k, seqlen_q, seqlen_k, is_causal) for row in rows for k in real_keys]

    blocks = ceil_div(seqlen_q, tile_m)
    assert 0 <= start <= full <= end == blocks, shape
    assert start < end, f"a tile without a block: {shape}"
    assert all(all(block_sees(block)) for block in range(full, end)), f"a block without a mask needs one: {shape}"
    assert not any(any(block_sees(block)) for block in range(start)), f"a visible query is missed: {shape}"
    assert any(block_sees(start)), f"the first block sees nothing: {shape}"
    assert full == start or not all(block_sees(full - 1)), f"block {full - 1} needs no mask: {shape}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("tile_n", [1, 2, 3, 5])
@pytest.mark.parametrize("tile_m", [1, 2, 3, 4])
def test_query_blocks_visit_what_is_visible_and_mask_what_needs_it(tile_m, tile_n, is_causal):
    for seqlen_q, seqlen_k in product(LENGTHS, LENGTHS):
        for key in range(0, seqlen_k, tile_n):
            check_query_blocks(key, tile_n, seqlen_q, seqlen_k, tile_m, is_causal)


@given(st.data())
def test_query_blocks_of_random_shapes_with_the_kernels_tiles(data):
    tile_m, keys = data.draw(st.sampled_from([(64, 64), (64, 128), (96, 64), (96, 128), (128, 64), (128, 128)]))
    seqlen_q, seqlen_k = data.draw(st.integers(1, 700)), data.draw(st.integers(1, 700))
    key = keys * data.draw(st.integers(0, (seqlen_k - 1) // keys))
    is_causal = data.draw(st.booleans())
    start, full, end = query_blocks(key, keys, seqlen_q, seqlen_k, tile_m, is_causal)
    last = min(key + keys, seqlen_k) - 1
    first_of_all = max(0, first_query(key, seqlen_q, seqlen_k, is_causal))  # the first key is seen by most queries
    first_of_every = max(0, first_query(last, seqlen_q, seqlen_k, is_causal))
    assert end == math.ceil(seqlen_q / tile_m)
    assert start == first_of_all // tile_m
    assert full == min(end, math.ceil(first_of_every / tile_m))


@pytest.mark.parametrize("is_causal", [False, True])
def test_key_blocks_and_query_blocks_agree_on_which_pairs_of_blocks_are_visited(is_causal):
    """What the query-parallel kernel visits for a block of rows, the key-parallel one visits for the block of keys."""
    for tile_m, tile_n, seqlen_q, seqlen_k in product((2, 3), (2, 3), LENGTHS, LENGTHS):
        by_rows = {
            (m, n)
            for m in range(ceil_div(seqlen_q, tile_m))
            for n in range(key_blocks(m * tile_m, tile_m, seqlen_q, seqlen_k, tile_n, is_causal).end)
        }
        by_keys = set()
        for n in range(ceil_div(seqlen_k, tile_n)):
            blocks = query_blocks(n * tile_n, tile_n, seqlen_q, seqlen_k, tile_m, is_causal)
            by_keys |= {(m, n) for m in range(blocks.start, blocks.end)}
        assert by_keys <= by_rows
        # rows that see no key visit one block all the same
        blind = {m for m in range(ceil_div(seqlen_q, tile_m)) if not any(m == pair[0] for pair in by_keys)}
        assert by_rows - by_keys == {(m, 0) for m in blind}


def test_every_tile_is_handed_out_once_whatever_the_section():
    for m_blocks, heads, batch in product(range(1, 6), range(1, 5), range(1, 5)):
        every = {TileCoord(*c) for c in product(range(m_blocks), range(heads), range(batch))}
        for section in range(1, heads * batch + 2):
            handed = [tile_coord(t, m_blocks, heads, batch, section) for t in range(m_blocks * heads * batch)]
            assert len(handed) == len(every)
            assert set(handed) == every, (m_blocks, heads, batch, section)


def test_a_section_runs_from_the_longest_causal_tile_to_the_shortest():
    for m_blocks, heads, batch in product(range(1, 6), range(1, 5), range(1, 5)):
        for section in range(1, heads * batch + 1):
            for start in range(0, heads * batch, section):
                pairs = min(section, heads * batch - start)
                tiles = [
                    tile_coord(start * m_blocks + t, m_blocks, heads, batch, section) for t in range(pairs * m_blocks)
                ]
                assert [t.block for t in tiles] == [m for m in reversed(range(m_blocks)) for _ in range(pairs)]
                assert {t.batch * heads + t.head for t in tiles} == set(range(start, start + pairs))


def test_tiles_of_keys_are_handed_out_once_from_the_longest_causal_tile_to_the_shortest():
    for blocks, heads, batch in product(range(1, 6), range(1, 5), range(1, 5)):
        every = {TileCoord(*c) for c in product(range(blocks), range(heads), range(batch))}
        for section in range(1, heads * batch + 2):
            handed = [
                tile_coord(t, blocks, heads, batch, section, is_descending=False) for t in range(blocks * heads * batch)
            ]
            assert len(handed) == len(every)
            assert set(handed) == every, (blocks, heads, batch, section)
            for start in range(0, heads * batch, section):
                pairs = min(section, heads * batch - start)
                first = start * blocks
                ascending = [t.block for t in handed[first : first + pairs * blocks]]
                assert ascending == [n for n in range(blocks) for _ in range(pairs)]


@given(
    key_bytes=st.integers(0, 1 << 40),
    is_causal=st.booleans(),
    heads_k=st.integers(1, 64),
    group=st.integers(1, 16),
    batch=st.integers(1, 1000),
)
def test_a_section_fits_l2_or_has_the_least_number_of_pairs(key_bytes, is_causal, heads_k, group, batch):
    heads = heads_k * group
    section = heads_per_section(key_bytes, is_causal, heads, batch, group)
    assert 1 <= section <= heads * batch
    if not is_causal:
        assert section == 1
    elif section > SECTION_PAIRS:
        assert section * key_bytes <= SECTION_BYTES * group
    else:
        assert section == min(SECTION_PAIRS, heads * batch)


@given(a=st.integers(-(10**6), 10**6), b=st.integers(1, 1000), low=st.integers(-100, 100), high=st.integers(-100, 100))
def test_integer_arithmetic_is_exact_for_negative_values_too(a, b, low, high):
    assert ceil_div(a, b) == math.ceil(a / b)
    assert a <= round_up(a, b) < a + b
    assert round_up(a, b) % b == 0
    assert (minimum(a, b), maximum(a, b)) == tuple(sorted((a, b)))
    clamped = clamp(a, low, high)
    assert clamped == (low if low > high else sorted((low, a, high))[1])
