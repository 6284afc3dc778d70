"""Online softmax for weights that are rounded to e4m3, of one warpgroup's rows, in base 2.

Per row the state is a reference, the sum of weights relative to it, and factors by which earlier results shrink when it
moves. The reference is a scaled score LAG_LOG2 above the largest one when it was set, and its weight 2^REFERENCE_LOG2 near
the largest number of e4m3 (448), so that small weights keep their bits. It stays until a score exceeds it; while none of a
warp does, a block costs no shuffle and no rescale. Specification 4.6 and 6.3, docs/findings/fp8.md.
"""

from typing import NamedTuple

from flash_hopper.device.dsl import Boolean, Constexpr, Float32, const_expr, cute, cutlass
from flash_hopper.device.ptx import sign_bit
from flash_hopper.device.softmax import own_max, quad_reduce, row_maximum
from flash_hopper.geometry.fp8 import LAG_LOG2, REFERENCE_LOG2

# The reference of a row without keys: so low that a finite score is above it, and a finite number, so that nothing is NaN.
NO_KEYS = -(2.0**100)
# More than the relative error of a reference that is multiplied with a factor's approximate reciprocal, and with the factor.
ROUNDING = 2.0**-21


class E4m3State(NamedTuple):
    """Two rows a thread, float32 each.

    row_sum: of the weights, of this thread's columns or of all, as the plan says. rescale: O's factor for the block whose weights are in
    registers; following: for the block whose scores are. units: `device/descales.py`.
    """

    reference: cute.Tensor
    row_sum: cute.Tensor
    rescale: cute.Tensor
    following: cute.Tensor
    units: cute.Tensor


def make_state() -> E4m3State:
    """Registers of a fresh state; `move_reference` with is_first=True fills them."""
    return E4m3State(*(cute.make_rmem_tensor(n, Float32) for n in (2, 2, 2, 2, 3)))


@cute.jit
def move_reference(
    state: E4m3State, rows: cute.Tensor, factor: Float32, inverse: Float32, is_first: Constexpr[bool]
) -> Boolean:
    """Bring the references up to a block's scores, and set `following`; whether one of the warp moved.

    rows: (2, N/4) raw scores of this thread; factor: what makes them logarithms to base 2, inverse: its reciprocal.
    """
    reference, _, _, following, _ = state
    moves = Boolean(True)
    if const_expr(is_first):
        for r in cutlass.range_constexpr(2):
            top = row_maximum(rows, r, -Float32.inf) * factor
            reference[r] = cute.arch.fmax(top + LAG_LOG2, Float32(NO_KEYS))
            state.row_sum[r] = Float32(0.0)
            following[r] = Float32(1.0)
    else:
        raw = [reference[r] * inverse for r in (0, 1)]
        own = [own_max(rows, r, raw[r]) for r in (0, 1)]
        grew = (own[0] > raw[0]) | (own[1] > raw[1])
        is_negative = sign_bit(own[0]) | sign_bit(own[1])
        following[0] = Float32(1.0)
        following[1] = Float32(1.0)
        moves = cute.arch.vote_any_sync(grew | is_negative)
        if moves:
            top_0, top_1 = own
            if cute.arch.vote_any_sync(is_negative):  # as integers negative floats sort the wrong way round
                top_0, top_1 = row_maximum(rows, 0, -Float32.inf), row_maximum(rows, 1, -Float32.inf)
            for r in cutlass.range_constexpr(2):
                top = quad_reduce(top_0 if r == 0 else top_1, cute.arch.fmax) * factor
                # raw * factor may round to more than the reference, which must not move by itself
                limit = cute.math.fma(cute.math.absf(reference[r]), Float32(ROUNDING), reference[r])
                moved = cutlass.select_(top > limit, top + LAG_LOG2, reference[r])
                following[r] = cute.math.exp2(reference[r] - moved, fastmath=True)
                reference[r] = moved
    return moves


@cute.jit
def weights(
    state: E4m3State, rows: cute.Tensor, factor: Float32, has_sums: Constexpr[bool], first: Constexpr[int],
    end: Constexpr[int],
) -> None:  # fmt: skip
    """Scores to weights, in place, elements [first, end) of each row; with `has_sums` this thread's are added to its row sums.

    After `move_reference`. A weight is at most 2^REFERENCE_LOG2.
    """
    for r in cutlass.range_constexpr(2):
        bias = Float32(REFERENCE_LOG2) - state.reference[r]
        part = [Float32(0.0), Float32(0.0)]
        for i in cutlass.range_constexpr(first, end):
            e = cute.math.exp2(rows[r, i] * factor + bias, fastmath=True)
            rows[r, i] = e
            if const_expr(has_sums):
                part[i % 2] = part[i % 2] + e
        if const_expr(has_sums):
            before = state.row_sum[r] * state.following[r] if const_expr(first == 0) else state.row_sum[r]
            state.row_sum[r] = before + (part[0] + part[1])


def advance(state: E4m3State) -> None:
    """The weights of the block whose scores were in registers are there now: its factors are those of O."""
    for r in range(2):
        state.rescale[r] = state.following[r]


@cute.jit
def fold(o: cute.Tensor, part: cute.Tensor, factors: tuple[Float32, Float32]) -> None:
    """O <- O * factor + part in float32, row by row: the second level of accumulation, in place of O's rescale.

    o, part: accumulators of the same columns, flat (element 4 i + 2 row + e); part may be longer.
    """
    for i in cutlass.range_constexpr(cute.size(o)):
        o[i] = o[i] * factors[i // 2 % 2] + part[i]
