"""Where the sequences of a ragged batch lie: `cu_seqlens` and `seqused` read, checked, and turned into views.

`tiled` calls it with tensors in host memory; reading them elsewhere would wait for the device. What the lengths mean is
said in `problem/ragged.py`.
"""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from flash_hopper.problem.errors import ArgumentError


class Span(NamedTuple):
    """Rows [start, start + length) of a packed tensor, or of entry `entry` of a padded batch."""

    entry: int | None
    start: int
    length: int

    def rows(self, x: Tensor) -> Tensor:
        """The sequence of x, (total, heads, d) or (batch, seqlen, heads, d), as a view (1, length, heads, d)."""
        if self.entry is None:
            return x.narrow(0, self.start, self.length).unsqueeze(0)
        return x.narrow(0, self.entry, 1).narrow(1, self.start, self.length)

    def columns(self, x: Tensor) -> Tensor:
        """The sequence of x, (heads, total) or (batch, heads, seqlen), as a view (1, heads, length)."""
        if self.entry is None:
            return x.narrow(1, self.start, self.length).unsqueeze(0)
        return x.narrow(0, self.entry, 1).narrow(2, self.start, self.length)


class Sequence(NamedTuple):
    """The queries and the keys of one sequence."""

    q: Span
    k: Span


def sequences(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
) -> tuple[Sequence, ...]:
    """All sequences of a batch whose shapes and dtypes `problem.varlen_problem` has checked.

    Raises ArgumentError, naming the argument, if offsets do not start at 0, decrease or end past the tensor, or if a
    used length is negative or larger than the space of its sequence.
    """
    spans = zip(_spans("q", q, cu_seqlens_q, seqused_q), _spans("k", k, cu_seqlens_k, seqused_k), strict=True)
    return tuple(Sequence(span_q, span_k) for span_q, span_k in spans)


def _spans(side: str, x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> list[Span]:
    if cu_seqlens is None:
        allotted = [Span(entry, 0, x.shape[1]) for entry in range(x.shape[0])]
    else:
        offsets = _checked_offsets(f"cu_seqlens_{side}", cu_seqlens.tolist(), side, x.shape[0])
        allotted = [Span(None, start, end - start) for start, end in pairwise(offsets)]
    if seqused is None:
        return allotted
    used = zip(allotted, seqused.tolist(), strict=True)
    return [
        space._replace(length=_checked_used(f"seqused_{side}", b, length, space.length))
        for b, (space, length) in enumerate(used)
    ]


def _checked_offsets(name: str, offsets: list[int], side: str, total: int) -> list[int]:
    if offsets[0] != 0:
        raise ArgumentError(f"{name} must start at 0, got {offsets[0]}")
    for b, (start, end) in enumerate(pairwise(offsets)):
        if end < start:
            raise ArgumentError(f"{name} must not decrease, got {start} and then {end} at entry {b + 1}")
    if offsets[-1] > total:
        raise ArgumentError(f"{name} must end within the {total} rows of {side}, got {offsets[-1]}")
    return offsets


def _checked_used(name: str, b: int, length: int, space: int) -> int:
    if not 0 <= length <= space:
        raise ArgumentError(
            f"{name} must be from 0 to the space of each sequence, got {length} of {space} at entry {b}"
        )
    return length
