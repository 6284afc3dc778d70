"""Visible intervals, block ranges and tile order against brute force: every small shape, and random large ones."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_hopper.geometry.arith import ceil_div, clamp, maximum, minimum, round_up
from flash_hopper.geometry.blocks import WARPGROUP_ROWS, Blocks, key_blocks, query_blocks, warpgroup_blocks
from flash_hopper.geometry.masks import UNBOUNDED, Lengths, MaskBounds, visible_keys, visible_queries
from flash_hopper.geometry.tiles import (
    FEWEST_PAIRS,
    KEY_SECTION_BYTES,
    SECTION_BYTES,
    SHARED_ROWS,
    TileCoord,
    heads_per_section,
    query_heads_per_section,
    shares,
    tile_coord,
)
from flash_hopper.problem.mask import Mask

LENGTHS = range(8)
# every kind, each bound absent, at its least and larger, chunks smaller and larger than the windows
MASKS = {
    "full": [Mask()],
    "causal": [Mask(None, 0)],
    "local": [
        Mask(left, right) for left in (None, 0, 1, 3) for right in (None, 0, 2) if (left, right or 0) != (None, 0)
    ],
    "chunk": [Mask(*ends, chunk) for ends in product((None, 0, 1, 3), (None, 0, 2)) for chunk in (1, 2, 3, 5)],
}
KINDS = pytest.mark.parametrize("kind", MASKS)


def keys_of(row, seqlen_q, seqlen_k, mask):
    """The mask in words, as a range: keys that exist, neither bound away from the diagonal, in the diagonal's chunk."""
    diagonal = row - seqlen_q + seqlen_k
    firsts, ends = [0], [seqlen_k]
    if mask.left is not None:
        firsts.append(diagonal - mask.left)
    if mask.right is not None:
        ends.append(diagonal + mask.right + 1)
    if mask.chunk:
        firsts.append(math.floor(diagonal / mask.chunk) * mask.chunk)
        ends.append(firsts[-1] + mask.chunk)
    return range(max(firsts), max(*firsts, min(ends)))


def bounds_of(mask):
    left, right = (UNBOUNDED if end is None else end for end in (mask.left, mask.right))
    return MaskBounds(mask.kind, left, right, mask.chunk)


def small_cases(kind):
    for mask, seqlen_q, seqlen_k in product(MASKS[kind], LENGTHS, LENGTHS):
        assert mask.kind == kind
        yield mask, seqlen_q, seqlen_k


@KINDS
def test_visible_keys_are_the_mask_of_every_row(kind):
    for mask, seqlen_q, seqlen_k in small_cases(kind):
        for row in range(seqlen_q):
            first, end = visible_keys(row, Lengths(seqlen_q, seqlen_k), bounds_of(mask))
            assert end <= seqlen_k
            seen = list(keys_of(row, seqlen_q, seqlen_k, mask))
            assert seen == list(range(max(first, 0), end)), (mask, seqlen_q, seqlen_k, row)


@KINDS
def test_visible_queries_are_the_mask_of_every_key(kind):
    for mask, seqlen_q, seqlen_k in small_cases(kind):
        for key in range(seqlen_k):
            first, end = visible_queries(key, Lengths(seqlen_q, seqlen_k), bounds_of(mask))
            assert end <= seqlen_q
            seen = [row for row in range(seqlen_q) if key in keys_of(row, seqlen_q, seqlen_k, mask)]
            assert seen == list(range(max(first, 0), end)), (mask, seqlen_q, seqlen_k, key)


@KINDS
@pytest.mark.parametrize("visible", [visible_keys, visible_queries])
def test_both_ends_of_what_is_visible_grow_with_the_row_or_key(kind, visible):
    for mask, seqlen_q, seqlen_k in small_cases(kind):
        places = range(seqlen_q if visible is visible_keys else seqlen_k)
        found = [visible(place, Lengths(seqlen_q, seqlen_k), bounds_of(mask)) for place in places]
        assert all(a.first <= b.first and a.end <= b.end for a, b in pairwise(found)), (mask, seqlen_q, seqlen_k)


def check_order(found, count, shape):
    start, inner_start, inner_end, end = found
    assert 0 <= start <= inner_start <= end <= max(count, 1) and start <= inner_end <= end, shape
    assert start < end, f"a tile without a block: {shape}"


def check_blocks(found, seen, cut_front, cut_end, count, shape):
    """`seen`: blocks in which anything is visible; `cut_front`, `cut_end`: those with something invisible in front of what
    is visible, and behind."""
    check_order(found, count, shape)
    visited = set(range(found.start, found.end))
    if seen:
        assert visited == seen, f"{visited} are visited, {seen} are visible: {shape}"
    else:
        assert len(visited) == 1, f"more than one block for a tile that sees nothing: {shape}"
    if seen:
        assert set(range(found.start, found.inner_start)) == cut_front & visited, f"{found}, {cut_front}: {shape}"
        assert set(range(found.inner_end, found.end)) == cut_end & visited, f"{found}, {cut_end}: {shape}"
    else:
        assert found.inner_start >= found.inner_end, f"the only block of a tile that sees nothing is masked: {shape}"


def check_key_blocks(row, rows, lengths, tile_n, mask):
    """Blocks with a visible key are visited, those that every row sees whole go without mask, and no others do."""
    shape = (row, rows, lengths, tile_n, mask)
    visible = [keys_of(r, *lengths, mask) for r in range(row, min(row + rows, lengths.q))]
    count = ceil_div(lengths.k, tile_n)
    seen = {n for keys in visible if keys for n in range(keys.start // tile_n, (keys.stop - 1) // tile_n + 1)}
    cut_front = {n for n in range(count) if n * tile_n < max(keys.start for keys in visible)}
    cut_end = {n for n in range(count) if (n + 1) * tile_n > min(keys.stop for keys in visible)}
    check_blocks(key_blocks(row, rows, lengths, tile_n, bounds_of(mask)), seen, cut_front, cut_end, count, shape)


def check_query_blocks(key, keys, lengths, tile_m, mask):
    """Blocks with a visible query are visited, those whose rows see every key go without mask, and no others do."""
    shape = (key, keys, lengths, tile_m, mask)
    last = min(key + keys, lengths.k) - 1
    visible = [keys_of(row, *lengths, mask) for row in range(lengths.q)]
    count = ceil_div(lengths.q, tile_m)
    seen = {row // tile_m for row, seen in enumerate(visible) if seen and seen.start <= last and key < seen.stop}
    # a row whose keys start behind the first of these is cut off at its block's front, by the diagonal
    cut_front = {row // tile_m for row, seen in enumerate(visible) if seen.stop <= last}
    cut_end = {row // tile_m for row, seen in enumerate(visible) if seen.start > key}
    check_blocks(query_blocks(key, keys, lengths, tile_m, bounds_of(mask)), seen, cut_front, cut_end, count, shape)


@KINDS
@pytest.mark.parametrize("tile_n", [1, 2, 3])
@pytest.mark.parametrize("tile_m", [1, 2, 3, 5])
def test_key_blocks_visit_what_is_visible_and_mask_what_needs_it(tile_m, tile_n, kind):
    for mask, seqlen_q, seqlen_k in small_cases(kind):
        for row in range(0, seqlen_q, tile_m):
            check_key_blocks(row, tile_m, Lengths(seqlen_q, seqlen_k), tile_n, mask)


@KINDS
@pytest.mark.parametrize("tile_n", [1, 2, 3, 5])
@pytest.mark.parametrize("tile_m", [1, 2, 3])
def test_query_blocks_visit_what_is_visible_and_mask_what_needs_it(tile_m, tile_n, kind):
    for mask, seqlen_q, seqlen_k in small_cases(kind):
        for key in range(0, seqlen_k if seqlen_q else 0, tile_n):
            check_query_blocks(key, tile_n, Lengths(seqlen_q, seqlen_k), tile_m, mask)


@KINDS
def test_tiles_without_rows_or_keys_stay_inside_the_sequence(kind):
    """A tile past the end, or of an empty sequence, visits blocks that exist, or block 0 alone."""
    for (mask, seqlen_q, seqlen_k), tile in product(small_cases(kind), (1, 2, 3)):
        lengths, bounds, shape = Lengths(seqlen_q, seqlen_k), bounds_of(mask), (mask, seqlen_q, seqlen_k, tile)
        for past in (0, tile, 4 * tile):
            row, key = (round_up(length, tile) + past for length in lengths)
            check_order(key_blocks(row, tile, lengths, tile, bounds), ceil_div(seqlen_k, tile), shape)
            check_order(query_blocks(key, tile, lengths, tile, bounds), ceil_div(seqlen_q, tile), shape)


def test_full_and_causal_mask_nothing_but_the_diagonal_and_the_end():
    """Full: at most the block in which the keys end. Causal: as many as the diagonal of a tile crosses."""
    for seqlen_q, seqlen_k, tile_m, tile_n in product((256, 500, 1000), (256, 500, 1000), (64, 128), (64, 80)):
        for row in range(0, seqlen_q, tile_m):
            full = key_blocks(row, tile_m, Lengths(seqlen_q, seqlen_k), tile_n, MaskBounds("full"))
            assert full == Blocks(0, 0, seqlen_k // tile_n, ceil_div(seqlen_k, tile_n))
            causal = key_blocks(row, tile_m, Lengths(seqlen_q, seqlen_k), tile_n, MaskBounds("causal"))
            assert causal.inner_start == causal.start == 0
            assert causal.end - causal.inner_end <= ceil_div(tile_m - 1, tile_n) + 1


LONG = st.integers(1, 3000)
ENDS = st.one_of(st.none(), st.integers(0, 300), st.sampled_from((1024, 4095)))
ANY_MASK = st.builds(Mask, ENDS, st.one_of(ENDS, st.just(0)), st.one_of(st.just(0), st.integers(1, 700)))


@settings(deadline=None)
@given(
    tiles=st.sampled_from([(64, 64), (128, 80), (128, 112), (192, 80), (192, 128), (256, 64)]),
    lengths=st.builds(Lengths, LONG, LONG),
    mask=ANY_MASK,
    block=st.integers(0, 100),
)
def test_key_blocks_of_random_shapes_with_the_kernels_tiles(tiles, lengths, mask, block):
    tile_m, tile_n = tiles
    row = block % ceil_div(lengths.q, tile_m) * tile_m
    check_key_blocks(row, tile_m, lengths, tile_n, mask)


@settings(deadline=None)
@given(
    tiles=st.sampled_from([(64, 64), (64, 128), (96, 64), (96, 128), (128, 64), (128, 128)]),
    lengths=st.builds(Lengths, LONG, LONG),
    mask=ANY_MASK,
    block=st.integers(0, 100),
)
def test_query_blocks_of_random_shapes_with_the_kernels_tiles(tiles, lengths, mask, block):
    tile_m, tile_n = tiles
    key = block % ceil_div(lengths.k, tile_n) * tile_n
    check_query_blocks(key, tile_n, lengths, tile_m, mask)


@settings(deadline=None)
@given(
    tiles=st.sampled_from([(128, 80), (128, 128), (192, 64), (192, 80), (192, 128), (256, 64)]),
    lengths=st.builds(Lengths, LONG, st.integers(0, 3000)),
    mask=ANY_MASK,
    block=st.integers(0, 100),
)
def test_warpgroups_see_what_their_rows_see_and_no_further_from_their_tile_than_their_rows_are(
    tiles, lengths, mask, block
):
    """Also warpgroups without a row: the producer frees at most so many stages for one (`ForwardPlan.frees_unseen`)."""
    (tile_m, tile_n), bounds = tiles, bounds_of(mask)
    row, warpgroups = block % ceil_div(lengths.q, tile_m) * tile_m, tile_m // WARPGROUP_ROWS
    whole = key_blocks(row, tile_m, lengths, tile_n, bounds)
    parts = [warpgroup_blocks(row, wg, lengths, tile_n, bounds) for wg in range(warpgroups)]
    for wg, part in enumerate(parts):
        first = row + wg * WARPGROUP_ROWS
        assert whole.start <= part.start < part.end <= whole.end
        if first < lengths.q:
            assert part == key_blocks(first, WARPGROUP_ROWS, lengths, tile_n, bounds)
        if mask.kind != "chunk":
            assert part.start - whole.start <= ceil_div(WARPGROUP_ROWS * wg, tile_n)
            assert whole.end - part.end <= ceil_div(WARPGROUP_ROWS * (warpgroups - 1 - wg), tile_n)
    assert {n for part in parts for n in range(part.start, part.end)} == set(range(whole.start, whole.end))


class Int32(int):
    """A run-time integer of a kernel: it says so when a value leaves 32 bits."""

    def _checked(self, other, operation):
        value = operation(int(self), int(other))
        assert -(2**31) <= value < 2**31, f"{int(self)} and {int(other)} gave {value}"
        return Int32(value)

    def __add__(self, other):
        return self._checked(other, lambda a, b: a + b)

    def __sub__(self, other):
        return self._checked(other, lambda a, b: a - b)

    def __mul__(self, other):
        return self._checked(other, lambda a, b: a * b)

    def __floordiv__(self, other):
        return self._checked(other, lambda a, b: a // b)

    def __rsub__(self, other):
        return self._checked(other, lambda a, b: b - a)

    __radd__, __rmul__ = __add__, __mul__


@given(
    q=st.integers(0, UNBOUNDED - 1),
    k=st.integers(0, UNBOUNDED - 1),
    left=st.one_of(st.none(), st.integers(0, UNBOUNDED)),
    right=st.one_of(st.none(), st.integers(0, UNBOUNDED)),
    chunk=st.integers(0, UNBOUNDED),
    block=st.integers(0, UNBOUNDED),
)
def test_no_value_leaves_32_bits_for_sequences_shorter_than_unbounded(q, k, left, right, chunk, block):
    mask = Mask(left, right, chunk).simplified(q, k)
    bounds = MaskBounds(mask.kind, *(Int32(value) for value in bounds_of(mask)[1:]))
    lengths = Lengths(Int32(q), Int32(k))
    for blocks, length, visited in ((key_blocks, q, k), (query_blocks, k, q)):
        place = Int32(block % max(ceil_div(length, 128), 1) * 128)
        check_order(blocks(place, 128, lengths, 128, bounds), ceil_div(visited, 128), mask)


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
    pair_bytes=st.integers(0, 1 << 40),
    is_uneven=st.booleans(),
    heads_k=st.integers(1, 64),
    group=st.integers(1, 16),
    batch=st.integers(1, 1000),
    most_bytes=st.sampled_from([SECTION_BYTES, KEY_SECTION_BYTES]),
    least_pairs=st.integers(0, 300),
)
def test_a_section_fits_l2_or_has_the_least_number_of_pairs(
    pair_bytes, is_uneven, heads_k, group, batch, most_bytes, least_pairs
):
    heads = heads_k * group
    section = heads_per_section(pair_bytes, is_uneven, heads, batch, group, most_bytes, least_pairs)
    assert 1 <= section <= heads * batch
    if not is_uneven:
        assert section == 1
    elif section > max(least_pairs, 1):
        assert section * pair_bytes <= most_bytes * group
    else:
        assert section == min(max(least_pairs, 1), heads * batch)


@given(
    pair_bytes=st.integers(0, 1 << 40),
    is_uneven=st.booleans(),
    heads_k=st.integers(0, 64),
    group=st.integers(1, 16),
    batch=st.integers(0, 1000),
    rows=st.integers(0, 132 * 256),
)
def test_sections_of_query_tiles_are_alike_and_exceed_l2_only_while_a_pair_has_several_tiles_in_flight(
    pair_bytes, is_uneven, heads_k, group, batch, rows
):
    heads, total = heads_k * group, max(heads_k * group * batch, 1)
    section = query_heads_per_section(pair_bytes, is_uneven, heads, batch, group, rows)
    assert 1 <= section <= total
    if not is_uneven:
        assert section == 1
        return
    last = total - (ceil_div(total, section) - 1) * section
    assert section - last < ceil_div(total, section)
    if section > FEWEST_PAIRS and section * pair_bytes > SECTION_BYTES * group:
        assert section * pair_bytes <= 2 * SECTION_BYTES * group
        assert section * SHARED_ROWS <= rows
    assert section == total or section >= FEWEST_PAIRS // 2


@given(a=st.integers(-(10**6), 10**6), b=st.integers(1, 1000), low=st.integers(-100, 100), high=st.integers(-100, 100))
def test_integer_arithmetic_is_exact_for_negative_values_too(a, b, low, high):
    assert ceil_div(a, b) == math.ceil(a / b)
    assert a <= round_up(a, b) < a + b
    assert round_up(a, b) % b == 0
    assert (minimum(a, b), maximum(a, b)) == tuple(sorted((a, b)))
    clamped = clamp(a, low, high)
    assert clamped == (low if low > high else sorted((low, a, high))[1])


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_warpgroups_of_the_tiles_of_a_sequence_have_every_band_of_every_head_once(warpgroups):
    for rows, heads in product((*range(1, 200, 7), 64, 65, 128, 129, 1000), (1, 2, 3, 7, 8)):
        share, bands = shares(rows, warpgroups), -(-rows // WARPGROUP_ROWS)
        assert share.is_shared == (bands <= 2 and bands < warpgroups)
        if share.is_shared:
            tiles = [(0, number * warpgroups) for number in range(share.tiles(heads))]
        else:
            tiles = list(product(range(-(-bands // warpgroups)), range(heads)))
            assert share.tiles(heads) == len(tiles)
        found = []
        for block, head in tiles:
            own = [(share.head(head, wg), share.band(block, head, wg)) for wg in range(warpgroups)]
            real = [(h, band) for h, band in own if h < heads and band < bands]
            assert {h for h, _ in real} == set(
                range(share.head(head, 0), share.head(head, 0) + share.heads(head, heads))
            )
            found += real
        assert sorted(found) == list(product(range(heads), range(bands)))
