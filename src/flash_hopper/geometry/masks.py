"""Visible keys of a query and visible queries of a key, as half-open intervals of run-time integers.

With p = row + seqlen_k - seqlen_q (aligned bottom-right) a row sees keys p - left .. p + right that exist and, with
chunks, lie in the chunk of p. Both ends of both intervals grow with the row or key: `blocks.py` builds on that.
"""

from typing import NamedTuple

from flash_hopper.geometry.arith import Int, floor_div, maximum, minimum
from flash_hopper.problem.mask import Mask

UNBOUNDED = 2**29  # a bound that cuts nothing: sequences are shorter, and sums of bounds and lengths fit 32 bits


class Lengths(NamedTuple):
    """Queries and keys of one sequence."""

    q: Int
    k: Int


class MaskBounds(NamedTuple):
    """`kind` is compile-time (`problem/mask.py`); the rest are run-time values, read only by the kinds that need them."""

    kind: str
    left: Int = UNBOUNDED
    right: Int = UNBOUNDED
    chunk: Int = 0


class Interval(NamedTuple):
    """[first, end); empty if end <= first. Ends may lie outside the sequence unless said otherwise."""

    first: Int
    end: Int


def visible_keys(row: Int, lengths: Lengths, mask: MaskBounds) -> Interval:
    """Keys that query `row` sees; the end is at most lengths.k, the first may be negative."""
    if mask.kind == "full":
        return Interval(0, lengths.k)
    p = row + lengths.k - lengths.q
    if mask.kind == "causal":
        return Interval(0, minimum(lengths.k, p + 1))
    first, end = p - mask.left, p + mask.right + 1
    if mask.kind == "chunk":
        chunk = floor_div(p, mask.chunk) * mask.chunk
        first, end = maximum(first, chunk), minimum(end, chunk + mask.chunk)
    return Interval(first, minimum(end, lengths.k))


def visible_queries(key: Int, lengths: Lengths, mask: MaskBounds) -> Interval:
    """Rows that see `key`, for a key that exists; the end is at most lengths.q, the first may be negative."""
    if mask.kind == "full":
        return Interval(0, lengths.q)
    shift = lengths.k - lengths.q
    if mask.kind == "causal":
        return Interval(key - shift, lengths.q)
    first, end = key - mask.right, key + mask.left + 1  # as diagonals p
    if mask.kind == "chunk":
        chunk = key // mask.chunk * mask.chunk
        first, end = maximum(first, chunk), minimum(end, chunk + mask.chunk)
    return Interval(first - shift, minimum(end, lengths.k) - shift)


def kernel_bounds(mask: Mask) -> tuple[int | None, int | None, int | None]:
    """left, right and chunk as kernels take them: run-time values of windows and chunks, absent for other masks."""
    if mask.kind in ("full", "causal"):
        return None, None, None
    left, right = (UNBOUNDED if bound is None else bound for bound in (mask.left, mask.right))
    return left, right, mask.chunk
