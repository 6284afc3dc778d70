"""The error that each element of an e4m3 call may have, from the arithmetic that a right kernel must do.

The oracle is attention in float64 of what the codes stand for, so that quantisation of q, k and v does not count. With w_j the
weight of key j relative to the row's largest, W their sum, p_j = w_j / W:

- Weights are rounded to e4m3, the largest of a row being 2^WEIGHT_LOG2 = 2^6 or more. So a weight is off by at most e_j = w_j / 16,
  and by min(w_j, 2^-16) below 2^-12, where e4m3 has no more exponents. Roundings of different scores are independent: 6
  standard deviations, each at most e_j / sqrt(3), or the worst case if there are fewer than 12 keys. As row sums are of rounded
  weights, what a weight's error changes is (v_j - out) p_j.
- Where scores are almost alike, roundings are alike as well. So twice the largest error is allowed that plain rounding makes in
  the row: e4m3 of 2^(6 + x) w_j for x = 0, 1/4, 1/2 and 3/4, the rest in float64. Elsewhere this is less than the above. Plain
  rounding may cancel where that of a kernel, relative to an earlier maximum, does not: sums of weights may be off by all e_j
  together, and out by as much of itself, or by sum_j e_j |v_j - out| if that is less, times exp(-(S / 0.1)^2 / 2), S the standard deviation of the row's scores under p; a step of e4m3 is 0.06 to 0.13.
- Weights below 2^-14 are all rounded down: T_j = min(w_j, 2^-16), added up as they are.
- The tensor core keeps 14 bits of a sum. A score is a sum of d / 32 steps, a random error with a standard deviation of
  L_j = 2^-11 / 6 |scale| ||q|| ||k_j||; products of one sign lose up to 0.4 % of it, which matters as far as q and k_j are parallel:
  C_j = 0.004 |s_j| |cos(q, k_j)|, alike for all keys of a row. Then out moves by at most sqrt(sum p C^2) sqrt(Var_p v).
- A sum of 128 keys' products may lose 0.5 % of sum_j p_j |v_j|. Sums of more must be added up in float32: this is what
  tells them from sums in the tensor core alone, which lose 25 % of 16k values of one sign.
- out is rounded to 16 bits.

For lse, the same errors of weights without v: their sum is off by its share of each, and the row's logits by C.

`testing.run` and `tests/` call this; `compare.py` has the rule for 16-bit tensors.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.geometry.fp8 import WEIGHT_LOG2
from flash_hopper.problem.mask import Mask
from flash_hopper.testing.compare import SCORES, SMALLEST, Expected
from flash_hopper.testing.pieces import FULL, Batch, Lengths, Matrices, by_head

ROUNDING = 2.0**-4  # of a weight, relative
LARGEST_WEIGHT = 2.0**WEIGHT_LOG2
PLAIN_WEIGHTS = tuple(LARGEST_WEIGHT * 2.0 ** (x / 4) for x in range(4))
NO_EXPONENT = 2.0**-6 / LARGEST_WEIGHT  # of the largest weight: below it the spacing of e4m3 stays the same
SPACING = 2.0**-10 / LARGEST_WEIGHT  # half of it
FLUSHED = 4 * SPACING
DEVIATIONS = 6.0
STEP = 0.1
SCORE_NOISE = 2.0**-11
SCORE_LOSS = 0.004
SUM_LOSS = 0.005
_LSE_RELATIVE = 2.0**-21
_ABSOLUTE = 1e-5


@torch.no_grad()
def expect_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    lengths: Lengths | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Expected:
    """The right result for what the codes stand for, float64 q (batch, seqlen_q, heads, d), k and v, and the allowances.

    `lengths` as in `compare.expect`.
    """
    batch = Batch(q, k, v, softmax_scale, mask, lengths)
    out, allowed = (q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64) for _ in range(2))
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    lse_allowed = torch.full_like(lse, SMALLEST)
    for piece in batch.pieces(SCORES[q.device.type]):
        given, place = batch.cut(piece), piece.of("dq")
        found = _of_piece(given, softmax_scale)
        for total, part in ((out, found.out), (allowed, found.out_allowed)):
            total[place] = by_head(part, given.shape)
        for total, part in ((lse, found.lse), (lse_allowed, found.lse_allowed)):
            total[piece.batch, piece.heads, piece.rows] = by_head(part.unsqueeze(2), given.shape)[..., 0].mT
    info = torch.finfo(out_dtype)
    rounding = info.eps / 2 * out.abs().clamp_min(info.smallest_normal)
    rounding = torch.where(allowed > 0, rounding, 0.0)  # nothing is rounded where no key is seen
    return Expected(out=out, lse=lse, out_allowed=allowed + rounding + SMALLEST, lse_allowed=lse_allowed)


def _of_piece(given: Matrices, softmax_scale: float) -> Expected:
    """out (matrices, rows, dv) and lse (matrices, rows), and what may be wrong with them before out is rounded."""
    v = given.v
    scores = (given.q * softmax_scale) @ given.k.mT
    seen = scores if given.hidden is None else scores.masked_fill(given.hidden, -torch.inf)
    top = seen.amax(dim=-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    w = torch.exp(seen - top)
    total = w.sum(dim=-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    p = w / total
    out, lse = p @ v, (total.log() + top).masked_fill(blind, -torch.inf)

    of_weights = _of_weights(w, v, total, out, scores)
    of_scores = _of_scores(given, p, out, scores, softmax_scale)
    out_allowed = of_weights.out + of_scores.out + (SUM_LOSS + 2.0**-20) * (p @ v.abs())
    rounding = _LSE_RELATIVE * lse.abs().nan_to_num(0.0, 0.0, 0.0) + _ABSOLUTE
    lse_allowed = (of_weights.lse + of_scores.lse + SUM_LOSS + rounding).masked_fill(blind, SMALLEST)
    return Expected(out, lse.squeeze(-1), out_allowed, lse_allowed.squeeze(-1))


class _Part(NamedTuple):
    """A part of what is allowed: of out, (matrices, rows, dv), and of lse, (matrices, rows, 1)."""

    out: Tensor
    lse: Tensor


def _of_weights(w: Tensor, v: Tensor, total: Tensor, out: Tensor, scores: Tensor) -> _Part:
    """What rounding of weights costs."""
    small = w.clamp_max(SPACING)
    e = torch.where(w < NO_EXPONENT, small, ROUNDING * w) / total
    squares = e.square() / 3
    factor = (3.0 * (w > 0).sum(dim=-1, keepdim=True)).sqrt().clamp_max(DEVIATIONS)
    of_sums = squares.sum(dim=-1, keepdim=True)
    around_out = squares @ v.square() - 2 * out * (squares @ v) + out.square() * of_sums
    plain = _plain_error(w, v, total, out)
    independent = _Part(factor * around_out.clamp_min(0.0).sqrt(), factor * of_sums.sqrt())

    p = w / total
    centred = torch.where(p > 0, scores - (p * torch.where(p > 0, scores, 0.0)).sum(dim=-1, keepdim=True), 0.0)
    variance = (p * centred.square()).sum(dim=-1, keepdim=True)
    share, of_all = torch.exp(-variance / (2 * STEP**2)), e.sum(dim=-1, keepdim=True)
    around_out = e @ v.square() - 2 * out * (e @ v) + out.square() * of_all
    alike = _Part(
        share * torch.minimum(of_all * out.abs(), (of_all * around_out.clamp_min(0.0)).sqrt()), share * of_all
    )
    flushed = torch.where(w < FLUSHED, small, 0.0) / total
    lost = flushed.sum(dim=-1, keepdim=True)
    return _Part(
        torch.maximum(independent.out, 2 * plain.out) + alike.out + lost * out.abs() + flushed @ v.abs(),
        torch.maximum(independent.lse, 2 * plain.lse) + alike.lse + lost,
    )


def _plain_error(w: Tensor, v: Tensor, total: Tensor, out: Tensor) -> _Part:
    """Of weights rounded relative to the row's largest, which is one of `PLAIN_WEIGHTS`: the largest error of out in a row, and that of
    log sums."""
    worst = _Part(torch.zeros_like(total), torch.zeros_like(total))
    for largest in PLAIN_WEIGHTS:
        codes = (w * largest).float().to(torch.float8_e4m3fn).to(torch.float64) / largest
        sums = codes.sum(dim=-1, keepdim=True)
        sums = torch.where(sums == 0, 1.0, sums)
        errors = (codes @ v / sums - out).abs()
        of_rows = errors.amax(dim=-1, keepdim=True) if v.shape[-1] else torch.zeros_like(total)
        worst = _Part(torch.maximum(worst.out, of_rows), torch.maximum(worst.lse, (sums / total).log().abs()))
    return worst


def _of_scores(given: Matrices, p: Tensor, out: Tensor, scores: Tensor, softmax_scale: float) -> _Part:
    """What sums of scores in the tensor core cost."""
    lengths = torch.linalg.vector_norm(given.q, dim=2)[..., None] * torch.linalg.vector_norm(given.k, dim=2)[:, None]
    lengths = lengths * abs(softmax_scale)
    noise = (p * lengths * (SCORE_NOISE / DEVIATIONS)).square()
    loss = SCORE_LOSS * scores.square() / lengths.clamp_min(SMALLEST)
    of_sums = noise.sum(dim=-1, keepdim=True)
    v2 = given.v.square()
    around_out = (noise @ v2 - 2 * out * (noise @ given.v) + out.square() * of_sums).clamp_min(0.0)
    deviation = (p @ v2 - out.square()).clamp_min(0.0).sqrt()
    return _Part(
        DEVIATIONS * around_out.sqrt() + (p * loss.square()).sum(dim=-1, keepdim=True).sqrt() * deviation,
        DEVIATIONS * of_sums.sqrt() + (p * loss).sum(dim=-1, keepdim=True),
    )
