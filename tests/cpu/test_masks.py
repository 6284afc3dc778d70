"""The canonical mask: what a row sees, what may be left out for given lengths, and how much work is visible."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_hopper.problem.attention import LONGEST, AttentionOptions, requested_features, requested_mask
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import FULL, Mask

LENGTHS = range(9)
ENDS = (None, 0, 1, 3, 20)
MASKS = [Mask(*fields) for fields in product(ENDS, ENDS, (0, 1, 2, 3, 5, 20))]


def sees(row, key, seqlen_q, seqlen_k, mask):
    """The mask in words: the key is not too far left or right of the row's diagonal, and in the diagonal's chunk."""
    diagonal = row - seqlen_q + seqlen_k
    return (
        (mask.left is None or diagonal - key <= mask.left)
        and (mask.right is None or key - diagonal <= mask.right)
        and (mask.chunk == 0 or math.floor(key / mask.chunk) == math.floor(diagonal / mask.chunk))
    )


def all_visible(mask, seqlen_q, seqlen_k):
    return [list(mask.visible_range(row, seqlen_q, seqlen_k)) for row in range(seqlen_q)]


def test_a_row_sees_what_left_right_and_chunk_say():
    for mask, seqlen_q, seqlen_k in product(MASKS, LENGTHS, LENGTHS):
        want = [[key for key in range(seqlen_k) if sees(row, key, seqlen_q, seqlen_k, mask)] for row in range(seqlen_q)]
        assert all_visible(mask, seqlen_q, seqlen_k) == want, (mask, seqlen_q, seqlen_k)


def test_the_number_of_visible_scores_is_that_of_all_rows():
    for mask, seqlen_q, seqlen_k in product(MASKS, LENGTHS, LENGTHS):
        want = sum(map(len, all_visible(mask, seqlen_q, seqlen_k)))
        assert mask.visible_scores(seqlen_q, seqlen_k) == want, (mask, seqlen_q, seqlen_k)


FAR = st.one_of(st.none(), st.integers(0, 400))


@settings(deadline=None)
@given(st.builds(Mask, FAR, FAR, st.integers(0, 400)), st.integers(0, 300), st.integers(0, 300))
def test_the_number_of_visible_scores_of_longer_sequences_too(mask, seqlen_q, seqlen_k):
    assert mask.visible_scores(seqlen_q, seqlen_k) == sum(map(len, all_visible(mask, seqlen_q, seqlen_k)))


def test_visible_scores_of_the_longest_sequences_are_counted_without_walking_them():
    n = LONGEST
    assert Mask().visible_scores(n, n) == n * n
    assert Mask(None, 0).visible_scores(n, n) == n * (n + 1) // 2
    assert Mask(1023, 0).visible_scores(n, n) == 1024 * n - 1023 * 1024 // 2
    assert Mask(None, 0, 1 << 20).visible_scores(1 << 31, 1 << 31) == (1 << 11) * (1 << 19) * ((1 << 20) + 1)


@pytest.mark.parametrize("bound_q", [0, 1, 2, 5])
def test_a_simplified_mask_is_the_same_for_all_lengths_up_to_the_bounds(bound_q):
    for mask, bound_k in product(MASKS, (0, 1, 2, 3, 6)):
        simple = mask.simplified(bound_q, bound_k)
        for seqlen_q, seqlen_k in product(range(bound_q + 1), range(bound_k + 1)):
            same = all_visible(simple, seqlen_q, seqlen_k) == all_visible(mask, seqlen_q, seqlen_k)
            assert same, (mask, simple, bound_q, bound_k, seqlen_q, seqlen_k)


def test_bounds_that_cut_nothing_are_dropped_and_needed_ones_kept():
    assert Mask(99, 99).simplified(100, 100) == FULL
    assert Mask(98, 98).simplified(100, 100) == Mask(98, 98)
    assert Mask(99, 0).simplified(100, 100) == Mask(None, 0)
    assert Mask(None, 0, 100).simplified(100, 100) == Mask(None, 0)
    assert Mask(None, 0, 99).simplified(100, 100) == Mask(None, 0, 99)
    assert Mask(63, 63, 64).simplified(100, 100) == Mask(None, None, 64)
    assert Mask(62, 0, 64).simplified(100, 100) == Mask(62, 0, 64)
    assert Mask(None, 0).simplified(1, 100) == FULL


@given(st.builds(Mask, FAR, FAR, st.integers(0, LONGEST)), st.integers(0, 500), st.integers(0, 500))
def test_a_simplified_mask_holds_no_number_beyond_the_lengths(mask, seqlen_q, seqlen_k):
    simple = mask.simplified(seqlen_q, seqlen_k)
    assert simple.left is None or simple.left < seqlen_k
    assert simple.right is None or simple.right < seqlen_q
    assert simple.chunk <= max(seqlen_k, 1)
    assert simple.simplified(seqlen_q, seqlen_k) == simple


def test_the_kind_is_the_least_that_a_kernel_must_do():
    for mask in MASKS:
        if mask.chunk:
            assert mask.kind == "chunk"
        elif mask.left is not None or mask.right not in (None, 0):
            assert mask.kind == "local"
        else:
            assert mask.kind == ("full" if mask.right is None else "causal")


def asked(**options):
    given_options = AttentionOptions(**options)
    return requested_mask(given_options), requested_features(given_options)


def test_causal_sets_the_right_end_whatever_the_window_says():
    for left, right in product((None, -1, 0, 7), (None, -1, 0, 7, 100)):
        mask, features = asked(causal=True, window_size=(left, right))
        assert mask == Mask(None if left == -1 else left, 0)
        assert Feature.CAUSAL in features
        assert (Feature.WINDOW in features) == (mask.left is not None)


def test_unbounded_ends_are_one_mask_however_they_are_written():
    for left, right in product((None, -1, LONGEST, 2**63), (None, -1, LONGEST, 10**30)):
        assert asked(window_size=(left, right)) == (FULL, set())
        assert asked(window_size=[left, 0]) == asked(causal=True)


def test_windows_and_chunks_are_features_of_their_own():
    for causal, window, chunk in product((False, True), ((None, None), (5, None), (None, 5), (0, 0)), (0, 3, 2**40)):
        mask, features = asked(causal=causal, window_size=window, attention_chunk=chunk)
        assert mask == Mask(window[0], 0 if causal else window[1], min(chunk, LONGEST))
        assert (Feature.CHUNK in features) == (chunk > 0)
        assert (Feature.CAUSAL in features) == (causal or window[1] == 0)
        assert (Feature.WINDOW in features) == (window[0] is not None or (not causal and window[1] == 5))
