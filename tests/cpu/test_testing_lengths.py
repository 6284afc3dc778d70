"""Lengths in words: what each word says, the same every time, and how packed sequences lie."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.lengths import WORDS, Side, lengths_of, packed_side

DRAWN = sorted(set(WORDS) - {"same"})


@given(st.sampled_from(DRAWN), st.integers(0, 99), st.integers(0, 70), st.integers(0, 400))
def test_every_word_gives_lengths_up_to_the_longest_and_the_same_ones_again(word, seed, batch, longest):
    found = lengths_of(f"{word}{seed}", batch, longest)
    assert len(found) == batch
    assert all(0 <= n <= longest for n in found)
    lengths_of.cache_clear()
    assert lengths_of(f"{word}{seed}", batch, longest) == found


def test_a_seed_gives_other_lengths():
    for word in ("random", "zipf", "one_long", "edges", "tiny", "empty_run"):
        assert lengths_of(word, 50, 300) != lengths_of(f"{word}1", 50, 300) != lengths_of(f"{word}2", 50, 300)


@pytest.mark.parametrize(
    ("word", "claim"),
    [
        ("equal", lambda n: set(n) == {640}),
        ("random", lambda n: min(n) < 100 and max(n) > 500),
        ("zipf", lambda n: sorted(n, reverse=True)[:4] == [640, 320, 213, 160] and n != tuple(sorted(n))),
        ("one_long", lambda n: sorted(n)[-1] == 640 and sorted(n)[-2] <= 20),
        ("tiny", lambda n: set(n) == set(range(9))),
        ("edges", lambda n: {x % 64 for x in n} == {0, 1, 63}),
        ("empty_first", lambda n: [i for i, x in enumerate(n) if not x] == [0]),
        ("empty_middle", lambda n: [i for i, x in enumerate(n) if not x] == [50]),
        ("empty_last", lambda n: [i for i, x in enumerate(n) if not x] == [99]),
        ("empty_run", lambda n: [i for i, x in enumerate(n) if not x] == list(range(25, 75))),
        ("empty_every", lambda n: [i for i, x in enumerate(n) if not x] == list(range(0, 100, 2))),
        ("empty_most", lambda n: sorted(n)[-2:] == [0, 640]),
        ("empty_all", lambda n: set(n) == {0}),
    ],
)
def test_lengths_are_what_their_words_say(word, claim):
    assert claim(lengths_of(word, 100, 640))


def test_numbers_are_the_lengths():
    assert lengths_of("3.0.17", 3, 17) == (3, 0, 17)
    for text in ("3.0", "3.0.18", "3..1", "3.0.x", "", "often"):
        with pytest.raises(ArgumentError):
            lengths_of(text, 3, 17)


@given(st.lists(st.integers(0, 9), max_size=12), st.booleans(), st.integers(0, 5))
def test_packed_sequences_follow_each_other_with_unused_rows_where_used_lengths_say_so(lengths, has_used, slack):
    side = packed_side(tuple(lengths), has_used, slack)
    gaps = [end - start - n for start, end, n in zip(side.offsets, side.offsets[1:], lengths, strict=False)]
    assert side.offsets[0] == 0
    assert all(0 <= gap <= (slack if has_used else 0) for gap in gaps)
    assert side.rows == side.offsets[-1] + slack
    assert side.starts == tuple((0, start) for start in side.offsets[:-1])
    assert Side(tuple(lengths), None, 9).starts == tuple((b, 0) for b in range(len(lengths)))
