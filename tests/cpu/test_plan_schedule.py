"""The table of a ragged batch, how its tiles are counted and in which order they come: checked by brute force.

What the device makes of it is run, without a GPU, in `tests/compile/test_tile_search.py`.
"""

from bisect import bisect_right
from itertools import accumulate, product

from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.tiles import (
    SECTION_BYTES,
    SECTION_PAIRS,
    heads_per_section,
    rows_per_section,
    sequence_section,
    tile_coord,
)
from flash_hopper.launch.ragged import most_tiles
from flash_hopper.plan.schedule import COLUMNS, COUNTERS, HEADER, table_ints

LENGTHS = st.lists(st.integers(0, 700), max_size=70)
TILES = st.sampled_from([64, 128, 192, 256])


def test_a_table_has_room_for_its_header_a_row_and_a_place_in_the_order_for_each_sequence_and_the_unused_rows():
    for batch in (0, 1, 2, 31, 32, 62, 993, 2000, 1 << 20):
        assert table_ints(batch) == HEADER + (batch + 1) * len(COLUMNS) * 2 + (batch + 1)
    assert len(set(COLUMNS)) == len(COLUMNS)
    # a row is 32 bytes on a 32-byte boundary: one sector of memory
    assert HEADER % 8 == 0 and len(COLUMNS) == 8


def test_kernels_of_one_call_draw_from_counters_of_their_own():
    assert all(0 <= place < HEADER for place in COUNTERS.values())
    backward = [place for kernel, place in COUNTERS.items() if kernel.startswith("backward")]
    assert len(set(backward)) == len(backward) == 2


@given(used=LENGTHS, unused=st.integers(0, 700), tile=TILES)
def test_no_layout_of_the_rows_has_more_tiles_than_a_grid_is_made_for(used, unused, tile):
    tiles = sum(ceil_div(rows, tile) for rows in (*used, unused))
    assert tiles <= most_tiles(sum(used) + unused, len(used), tile)
    assert most_tiles(0, 0, tile) >= 1


@given(
    length=st.integers(0, 1 << 20),
    row_bytes=st.integers(1, 2048),
    heads_k=st.integers(1, 16),
    group=st.integers(1, 16),
    is_uneven=st.booleans(),
)
def test_heads_of_a_sequence_run_side_by_side_as_in_a_dense_batch_of_one_such_sequence(
    length, row_bytes, heads_k, group, is_uneven
):
    heads = heads_k * group
    found = sequence_section(rows_per_section(row_bytes, is_uneven), length, heads, group)
    assert found == heads_per_section(max(length, 1) * row_bytes, is_uneven, heads, 1, group)
    assert 1 <= found <= heads
    if found > SECTION_PAIRS:
        assert found * length * row_bytes <= SECTION_BYTES * group


@given(lengths=LENGTHS, tile=TILES, heads=st.integers(1, 5), rows=st.sampled_from([0, 1, 2000, 1 << 20]))
def test_numbers_lead_to_every_tile_of_every_sequence_once_whatever_is_side_by_side(lengths, tile, heads, rows):
    """The search in words: tiles of all sequences in a row, a number's sequence by their prefix sums, its tile within."""
    blocks = [ceil_div(length, tile) for length in lengths]
    ends = list(accumulate(n * heads for n in blocks))
    found = set()
    for number in range(ends[-1] if ends else 0):
        sequence = bisect_right(ends, number)
        first = ends[sequence] - blocks[sequence] * heads
        section = sequence_section(rows, lengths[sequence], heads, 1)
        coord = tile_coord(number - first, blocks[sequence], heads, 1, section)
        assert coord.batch == 0
        found.add((sequence, coord.head, coord.block))
    assert found == {cell for s, n in enumerate(blocks) for cell in product([s], range(heads), range(n))}
    assert len(found) == sum(n * heads for n in blocks)
