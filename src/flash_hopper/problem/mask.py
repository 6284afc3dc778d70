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
        left = None if self.left is not None and self.left >= seqlen_k - 1 else self.left
        right = None if self.right is not None and self.right >= seqlen_q - 1 else self.right
        # queries above the first key (p < 0) lie in a chunk without keys, so chunks matter to them unless causal
        chunk = 0 if self.chunk >= seqlen_k and self.right == 0 else self.chunk
        return Mask(left, right, chunk)

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
        """How many (query, key) pairs of one head of one sequence are visible."""
        if self.kind == "full":
            return seqlen_q * seqlen_k
        return sum(len(self.visible_range(row, seqlen_q, seqlen_k)) for row in range(seqlen_q))
