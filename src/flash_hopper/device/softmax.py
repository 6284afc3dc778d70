"""Online softmax of one warpgroup's rows, in base 2, with a lazily updated maximum.

Per row the state is a reference score `row_max`, the sum of exponentials relative to it and, in `rescale`, the factor by
which earlier results must shrink when the reference moves. The reference need not be the maximum: as long as no score
exceeds it by more than 2^8 after scaling, exponentials stay below 256 and nothing is rescaled (exact up to rounding, as
the final division uses the same reference). So the usual block costs no shuffle, no rescale of O and one warp vote.
See docs/algorithm.md; section 4.6 of the specification describes the eager form.
"""

from typing import NamedTuple

from flash_hopper.device.dsl import Boolean, Constexpr, Float32, const_expr, cute, cutlass
from flash_hopper.device.ptx import max3_bits, multiply_rounded, sign_bit

LAZY_LOG2 = (
    8.0  # a score may exceed the reference by this many powers of two; 2^8 is far from overflow in bf16 and fp16
)


class SoftmaxState(NamedTuple):
    """Two rows a thread, float32 each: reference score, sum of exponentials of this thread's columns, O's factor."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    rescale: cute.Tensor


def make_state() -> SoftmaxState:
    """Registers of a fresh state; `update` with is_first=True fills them."""
    return SoftmaxState(*(cute.make_rmem_tensor(2, Float32) for _ in range(3)))


def quad_reduce(x: Float32, f: object) -> Float32:
    """Reduce over the four lanes that share a row."""
    for offset in (1, 2):
        x = f(x, cute.arch.shuffle_sync_bfly(x, offset=offset))  # type: ignore[operator]
    return x


def row_maximum(rows: cute.Tensor, r: int, start: Float32) -> Float32:
    """max(start, the whole row): two chains, then the quad."""
    a, b = start, rows[r, 0]
    n = cute.size(rows, mode=[1])
    for i in range(1, n, 2):
        a = cute.arch.fmax(a, rows[r, i])
        if i + 1 < n:
            b = cute.arch.fmax(b, rows[r, i + 1])
    return quad_reduce(cute.arch.fmax(a, b), cute.arch.fmax)


def own_max(rows: cute.Tensor, r: int, start: Float32) -> Float32:
    """max(start, this thread's part of the row) as integers, two chains; wrong only if the result is negative."""
    n = cute.size(rows, mode=[1])
    assert n % 4 == 0 and n >= 8, f"rows of {n} elements a thread; the chains below cover multiples of 4"
    a = max3_bits(start, rows[r, 0], rows[r, 1])
    b = max3_bits(rows[r, 2], rows[r, 3], rows[r, 4])
    for i in range(5, n, 4):
        a = max3_bits(a, rows[r, i], rows[r, i + 1])
        b = max3_bits(b, rows[r, i + 2], rows[r, min(i + 3, n - 1)])
    return max3_bits(a, b, b)


@cute.jit
def update(state: SoftmaxState, rows: cute.Tensor, scale_log2: Float32, is_first: Constexpr[bool]) -> Boolean:
    """Scores to unnormalised probabilities, in place; returns whether O must be multiplied by `state.rescale`.

    rows: (2, N/4) scores of this thread. Uniform within a warp: the result comes from a vote.
    """
    row_max, row_sum, rescale = state
    moves = Boolean(True)
    if const_expr(is_first):
        for r in cutlass.range_constexpr(2):
            row_max[r] = row_maximum(rows, r, -Float32.inf)
            row_sum[r] = Float32(0.0)
    else:
        own = [own_max(rows, r, row_max[r]) for r in (0, 1)]
        grew = ((own[0] - row_max[0]) * scale_log2 > LAZY_LOG2) or ((own[1] - row_max[1]) * scale_log2 > LAZY_LOG2)
        moves = cute.arch.vote_any_sync(grew or sign_bit(own[0]) or sign_bit(own[1]))
        if moves:
            for r in cutlass.range_constexpr(2):
                new_max = row_maximum(rows, r, row_max[r])
                # a row without any key so far: exp2(-inf - 0) = 0; an unchanged reference: exactly 1
                moved = multiply_rounded(row_max[r], scale_log2) - _reference(new_max, scale_log2)
                rescale[r] = cute.math.exp2(moved, fastmath=True)
                row_sum[r] = row_sum[r] * rescale[r]
                row_max[r] = new_max
    for r in cutlass.range_constexpr(2):
        reference = _reference(row_max[r], scale_log2)
        part = [row_sum[r], Float32(0.0)]
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            e = cute.math.exp2(rows[r, i] * scale_log2 - reference, fastmath=True)
            rows[r, i] = e
            part[i % 2] = part[i % 2] + e
        row_sum[r] = part[0] + part[1]
    return moves


def _reference(row_max: Float32, scale_log2: Float32) -> Float32:
    """The scaled reference; 0 for a row that has seen no key, whose scores are all -inf.

    Rounded once, for exponents and factors alike. Contracted into an FMA, the factor of a row whose reference stays would
    be off by up to an ulp of the reference at each visit, all in one direction: LSE drifts (docs/findings/lazy_max.md).
    """
    return cutlass.select_(row_max == -Float32.inf, Float32(0.0), multiply_rounded(row_max, scale_log2))


@cute.jit
def scale_rows(o_rows: cute.Tensor, factors: cute.Tensor) -> None:
    """Multiply the two rows of an accumulator view by their factors."""
    for r in cutlass.range_constexpr(2):
        o_rows[r, None].store(o_rows[r, None].load() * factors[r])
