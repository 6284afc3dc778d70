"""Which keys a query sees, in one canonical form for causal, sliding windows and attention chunks.

With the diagonal p = i + seqlen_k - seqlen_q of query i (aligned bottom-right) a query sees keys p - left .. p + right,
ends included, and with chunks only those in the chunk of `chunk` keys in which p lies.
"""

from dataclasses import dataclass
from typing import Literal

MaskKind = Literal["full", "causal", "local", "chunk"]


@dataclass(frozen=True, slots=True)
class Mask:
    """`left` and `right` are None where unbounded; `chunk` is 0 if there are no chunks. Causal is right = 0."""

    left: int | None = None
    right: int | None = None
    chunk: int = 0

    @property
    def kind(self) -> MaskKind:
        """What a kernel must be able to do: nothing, a fixed diagonal, two run-time diagonals, or chunks as well."""
        if self.chunk:
            return "chunk"
        if self.left is None:
            return "full" if self.right is None else "causal" if self.right == 0 else "local"
        return "local"

    def simplified(self, seqlen_q: int, seqlen_k: int) -> "Mask":
        """The same mask for lengths up to these, without bounds that never cut anything."""
        # queries above the first key (p < 0) lie in a chunk without keys, so chunks matter to them unless causal
        chunk = 0 if self.chunk >= seqlen_k and self.right == 0 else min(self.chunk, max(seqlen_k, 1))
        keys, queries = (min(x, chunk) if chunk else x for x in (seqlen_k, seqlen_q))
        left = None if self.left is not None and self.left >= keys - 1 else self.left
        right = None if self.right is not None and self.right >= queries - 1 else self.right
        return Mask(left, right, chunk)

    def reach(self, length: int) -> int:
        """At most so many of `length` keys are visible to one query, and of `length` queries to one key."""
        bounded = length if self.left is None or self.right is None else min(length, self.left + self.right + 1)
        return min(bounded, self.chunk) if self.chunk else bounded

    def visible_range(self, row: int, seqlen_q: int, seqlen_k: int) -> range:
        """The keys that query `row` sees."""
        p = row + seqlen_k - seqlen_q
        first = 0 if self.left is None else max(0, p - self.left)
        end = seqlen_k if self.right is None else min(seqlen_k, p + self.right + 1)
        if self.chunk:
            chunk_start = p // self.chunk * self.chunk
            first, end = max(first, chunk_start), min(end, chunk_start + self.chunk)
        return range(first, max(first, end))

    def visible_scores(self, seqlen_q: int, seqlen_k: int) -> int:
        """How many (query, key) pairs of one head of one sequence are visible; a closed form."""
        first = seqlen_k - seqlen_q
        if not self.chunk:
            return self._scores(first, seqlen_k)
        first = max(first, 0)
        if first >= seqlen_k:
            return 0
        head, tail = first // self.chunk, (seqlen_k - 1) // self.chunk
        if head == tail:
            return self._scores(first - head * self.chunk, seqlen_k - head * self.chunk)
        whole = (tail - head - 1) * self._scores(0, self.chunk)
        return (
            self._scores(first - head * self.chunk, self.chunk) + whole + self._scores(0, seqlen_k - tail * self.chunk)
        )

    def _scores(self, first: int, keys: int) -> int:
        """Visible pairs of the diagonals first .. keys - 1 and the keys 0 .. keys - 1 of one chunk.

        Diagonal p sees keys max(0, p - left) .. min(keys, p + right + 1) - 1. With x+ = max(x, 0) these are, for any p
        < keys, (p + right + 1)+ - (p + right + 1 - keys)+ - (p - left)+.
        """
        right = keys - first if self.right is None else self.right
        left = keys if self.left is None else self.left
        return (
            _ramp_sum(first + right + 1, keys + right)
            - _ramp_sum(first + right + 1 - keys, right)
            - _ramp_sum(first - left, keys - 1 - left)
        )


FULL = Mask()


def _ramp_sum(first: int, last: int) -> int:
    """The sum of max(x, 0) over x = first .. last."""
    first, last = max(first, 1), max(last, 0)
    return (first + last) * (last - first + 1) // 2
