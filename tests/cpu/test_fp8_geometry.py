"""The order of keys in a transposed V, and where blocks of packed sequences lie: checked by brute force."""

from itertools import accumulate, pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.geometry.fp8 import KEY_GROUP, key_at, packed_block, position_of
from flash_hopper.problem.fp8 import FP8_BLOCK, block_count, packed_block_count, packed_rows, padded_rows


def test_positions_and_keys_are_each_others_inverse_within_every_group():
    keys = [key_at(p) for p in range(FP8_BLOCK)]
    assert [position_of(key) for key in keys] == list(range(FP8_BLOCK))
    for start in range(0, FP8_BLOCK, KEY_GROUP):
        assert sorted(keys[start : start + KEY_GROUP]) == list(range(start, start + KEY_GROUP))


def test_each_lane_finds_the_columns_of_its_scores_at_the_places_of_its_operand():
    """wgmma's layouts as PTX documents them: accumulator columns 8 i + 2 q + e, 8-bit operand A columns 16 h + 4 q + j."""
    for q in range(4):
        held = [8 * i + 2 * q + e for i in range(4) for e in range(2)]  # of 32 keys, in the order of registers
        read = [16 * h + 4 * q + j for h in range(2) for j in range(4)]
        assert [key_at(p) for p in read] == held


def test_tensors_are_permuted_as_integers_are():
    positions = torch.arange(4 * FP8_BLOCK)
    assert key_at(positions).tolist() == [key_at(int(p)) for p in positions]
    assert position_of(key_at(positions)).equal(positions)


@given(st.lists(st.integers(0, 700), min_size=1, max_size=40), st.integers(0, 300))
def test_blocks_of_packed_sequences_do_not_meet_and_fit_the_columns(lengths, unused):
    starts = list(accumulate(lengths, initial=0))
    firsts = [packed_block(start, b) for b, start in enumerate(starts[:-1])]
    ends = [first + block_count(length) for first, length in zip(firsts, lengths, strict=True)]
    assert all(end <= first for end, first in zip(ends, firsts[1:], strict=False))
    assert ends[-1] <= packed_block_count(starts[-1] + unused, len(lengths))
    assert all(a <= b for a, b in pairwise(firsts))
    assert packed_rows(starts[-1], len(lengths)) == packed_block_count(starts[-1], len(lengths)) * FP8_BLOCK


def test_a_sequence_is_padded_to_whole_blocks():
    assert [padded_rows(n) for n in (0, 1, 127, 128, 129, 256)] == [0, 128, 128, 128, 256, 256]
