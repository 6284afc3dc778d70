"""Lengths of the sequences of a ragged batch, written in a word: `zipf`, `zipf7`, `3.0.17`.

A word, with digits behind it as its seed, stands for lengths of up to a given longest one; numbers with dots between them
are the lengths themselves. The same text gives the same lengths everywhere. Cases, benchmarks and tests use it.
"""

import random
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from flash_hopper.problem.errors import ArgumentError

Draw = Callable[[random.Random, int, int], list[int]]

WORDS = {
    "equal": "all of the longest length",
    "random": "any length, uniformly",
    "zipf": "the longest divided by 1, 2, 3, ... in random order",
    "one_long": "one of the longest, at a random place; the others a few rows",
    "tiny": "0 to 8",
    "edges": "just below, at and just above multiples of 64",
    "empty_first": "any length from 1, the first empty",
    "empty_middle": "any length from 1, one in the middle empty",
    "empty_last": "any length from 1, the last empty",
    "empty_run": "any length from 1, half of them empty, in a row",
    "empty_every": "any length from 1, every second one empty",
    "empty_most": "all empty but one",
    "empty_all": "all empty",
    "same": "those of the other side (keys only)",
}
"""How lengths are drawn, by word."""

_TINY = 8
_EDGE = 64


@lru_cache(maxsize=1024)
def lengths_of(text: str, batch: int, longest: int) -> tuple[int, ...]:
    """`batch` lengths of at most `longest`. Raises ArgumentError for text that says anything else."""
    if text[:1].isdigit():
        return _listed(text, batch, longest)
    word = text.rstrip("0123456789")
    if word not in _DRAWS:
        raise ArgumentError(f"lengths must be numbers with dots between them or of {', '.join(WORDS)}, got {text!r}")
    # by batch and longest as well, so that the two sides of a call differ
    draw = random.Random(f"{text} {batch} {longest}")
    return tuple(_DRAWS[word](draw, batch, longest)) if batch else ()


def _listed(text: str, batch: int, longest: int) -> tuple[int, ...]:
    parts = text.split(".")
    if not all(part.isdigit() for part in parts):
        raise ArgumentError(f"cannot read lengths {text!r}: numbers with dots between them are expected")
    found = tuple(map(int, parts))
    if len(found) != batch or max(found) > longest:
        raise ArgumentError(f"lengths {text!r} must be {batch} numbers of at most {longest}")
    return found


def _any(draw: random.Random, batch: int, longest: int) -> list[int]:
    return [draw.randint(0, longest) for _ in range(batch)]


def _not_empty(draw: random.Random, batch: int, longest: int) -> list[int]:
    return [draw.randint(min(1, longest), longest) for _ in range(batch)]


def _zipf(draw: random.Random, batch: int, longest: int) -> list[int]:
    found = [max(min(1, longest), longest // rank) for rank in range(1, batch + 1)]
    draw.shuffle(found)
    return found


def _one_long(draw: random.Random, batch: int, longest: int) -> list[int]:
    shortest = min(1, longest)
    found = [draw.randint(shortest, max(shortest, longest // 32)) for _ in range(batch)]
    found[draw.randrange(batch)] = longest
    return found


def _edges(draw: random.Random, batch: int, longest: int) -> list[int]:
    return [
        min(longest, max(0, _EDGE * draw.randint(0, longest // _EDGE) + draw.choice((-1, 0, 1)))) for _ in range(batch)
    ]


def _without(places: Callable[[int], range]) -> Draw:
    """Lengths from 1, but for the places that are empty."""

    def lengths(draw: random.Random, batch: int, longest: int) -> list[int]:
        empty = places(batch)
        return [0 if i in empty else n for i, n in enumerate(_not_empty(draw, batch, longest))]

    return lengths


_DRAWS: dict[str, Draw] = {
    "equal": lambda draw, batch, longest: [longest] * batch,
    "random": _any,
    "zipf": _zipf,
    "one_long": _one_long,
    "tiny": lambda draw, batch, longest: _any(draw, batch, min(longest, _TINY)),
    "edges": _edges,
    "empty_first": _without(lambda batch: range(1)),
    "empty_middle": _without(lambda batch: range(batch // 2, batch // 2 + 1)),
    "empty_last": _without(lambda batch: range(batch - 1, batch)),
    "empty_run": _without(lambda batch: range(batch // 4, batch // 4 + max(1, batch // 2))),
    "empty_every": _without(lambda batch: range(0, batch, 2)),
    "empty_most": lambda draw, batch, longest: [longest if i == batch // 2 else 0 for i in range(batch)],
    "empty_all": lambda draw, batch, longest: [0] * batch,
}


class Side(NamedTuple):
    """How the sequences of queries or of keys lie: a packed tensor of `rows` rows, or a padded batch of `rows` each.

    `offsets`: where sequences begin, and where the last one's space ends; None for a padded batch. `lengths`: rows used.
    """

    lengths: tuple[int, ...]
    offsets: tuple[int, ...] | None
    rows: int

    @property
    def starts(self) -> tuple[tuple[int, int], ...]:
        """(batch entry, row) of the first row of each sequence; a packed tensor counts as one batch entry."""
        if self.offsets is None:
            return tuple((b, 0) for b in range(len(self.lengths)))
        return tuple((0, start) for start in self.offsets[:-1])


@lru_cache(maxsize=1024)
def packed_side(lengths: tuple[int, ...], has_used: bool, slack: int) -> Side:
    """Sequences one after another, with `slack` unused rows behind the last.

    With used lengths of their own, 0 to `slack` unused rows follow every sequence as well.
    """
    offsets = [0]
    for b, length in enumerate(lengths):
        gap = (7 * b + 3) % (slack + 1) if has_used else 0
        offsets.append(offsets[-1] + length + gap)
    return Side(lengths, tuple(offsets), offsets[-1] + slack)
