"""Is a result right? The allowance for every element of out and lse, and the comparison itself.

For an element (row r, column c) of out, with everything in float64 by the formula (`pieces`, which tests hold to
`reference.naive`):

    |got - ref| <= max(2 E_r, F) + 1e-5 min(1, max |v|),   F = u (2 |ref| + min(A, 4 B)) + 2 D_r A

- E_r is the largest error that plain PyTorch attention (matmul, softmax, matmul in the input dtype) makes in the
  row. A row is the unit because PyTorch may hit one element exactly by luck, while a row in which it goes astray,
  by cancellation or overflow of its rounded scores, must not loosen the others. Where PyTorch gives NaN, E_r counts
  it as exact.
- F is what rounding costs any algorithm that, like ours, keeps float32 and rounds P and out to the input dtype.
  Without it a right kernel fails wherever PyTorch is lucky in a whole row, as it is with one key or two. u is half
  an ulp of 1. Rounding out costs u |ref|. Errors of P that are all alike cost another u |ref|; different ones at
  most u A, A = sum_j p_j |v_jc|, and, being independent, no more than 4 u B, B^2 = sum_j p_j^2 v_jc^2 (6 standard
  deviations; a few keys have A < 4 B).
- D_r bounds the float32 error of the row's logits: (d / 16 + 4) 2^-23 |scale| ||q_r|| max_j ||k_j||, a truncated
  sum over d / 16 steps of a tensor core and the roundings of the softmax. It matters for logits in the hundreds
  only.
- The last term is that of the contract, made relative for values below 1, where 1e-5 would hide everything.

A leaked or missing key, a row of another head and a wrong scale stand out, as the tests show by damaging right
results. For lse, which is float32:

    |got - ref| <= 2 D_r + 2^-21 |ref| + 1e-5

NaN and infinities must be where float64, rounded to the dtype, has them. `testing.run` and `tests/` call this; the rule
for gradients is in `testing.gradients`.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.problem.mask import Mask
from flash_hopper.testing.pieces import FULL, Batch, Lengths, Matrices, by_head, plain_scores, probabilities

_LSE_RELATIVE = 2.0**-21
_ABSOLUTE = 1e-5
SMALLEST = 1e-300  # allowed where only the exact value is right, so that 0 / allowed stays 0
# elements of a scores matrix held at once; a step holds about 5 such matrices in float64
SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}


@dataclass(frozen=True)
class Expected:
    """float64 out (batch, seqlen_q, heads, dv) and lse (batch, heads, seqlen_q), with the error allowed in each."""

    out: Tensor
    lse: Tensor
    out_allowed: Tensor
    lse_allowed: Tensor


class Target(NamedTuple):
    """float64 values and the error allowed in each."""

    want: Tensor
    allowed: Tensor


@dataclass(frozen=True)
class Comparison:
    """`worst_error` is the largest absolute error, `worst_ratio` the largest error as a multiple of what is allowed.

    `message` is empty if all elements passed. A NaN or infinity in the wrong place makes both infinite.
    """

    worst_error: float
    worst_ratio: float
    message: str

    @property
    def passed(self) -> bool:
        """True if every element is within its allowance."""
        return not self.message


@torch.no_grad()
def expect(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: Mask = FULL, lengths: Lengths | None = None
) -> Expected:
    """The right result for q (batch, seqlen_q, heads, d), k and v, and the allowances that the module defines.

    `lengths` makes the entries of a padded batch shorter: rows behind them have out = 0 and lse = -inf.
    """
    batch = Batch(q, k, v, softmax_scale, mask, lengths)
    out, absolute, spread, plain = (q.new_zeros((*q.shape[:3], v.shape[3]), dtype=torch.float64) for _ in range(4))
    lse = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float64)
    for piece in batch.pieces(SCORES[q.device.type]):
        given, place = batch.cut(piece), piece.of("dq")
        of_rows = _exact(given, softmax_scale)
        for total, part in ((out, of_rows.out), (absolute, of_rows.absolute), (spread, of_rows.spread)):
            total[place] = by_head(part, given.shape)
        lse[piece.batch, piece.heads, piece.rows] = by_head(of_rows.lse.unsqueeze(2), given.shape)[..., 0].mT
        plain[place] = by_head(plain_attention(given, softmax_scale).to(torch.float64), given.shape)
    plain_error = (plain - out).abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=3, keepdim=True)
    info = torch.finfo(q.dtype)
    rounding = info.eps / 2 * (2 * out.abs().clamp_min(info.smallest_normal) + torch.minimum(absolute, 4 * spread))
    logit_error = _logit_error(q, k, softmax_scale)
    of_logits = 2 * logit_error.transpose(1, 2).unsqueeze(3) * absolute
    size = float(v.abs().nan_to_num(0.0, 1.0).amax().clamp_max(1.0)) if v.numel() else 1.0
    return Expected(
        out=out,
        lse=lse,
        out_allowed=torch.maximum(2 * plain_error, rounding + of_logits) + _ABSOLUTE * size,
        lse_allowed=2 * logit_error + _LSE_RELATIVE * lse.abs().nan_to_num(0.0, 0.0, 0.0) + _ABSOLUTE,
    )


def compare(name: str, got: Tensor, want: Tensor, allowed: Tensor) -> Comparison:
    """Compare `got` with float64 `want` of the same shape; the message shows the worst coordinate."""
    if got.numel() == 0:
        return Comparison(0.0, 0.0, "")
    rounded = want.to(got.dtype)
    finite = torch.isfinite(rounded)
    same = (got == rounded) | (got.isnan() & rounded.isnan())
    misplaced = torch.where(same, 0.0, torch.inf)
    error = torch.where(finite, (got.to(torch.float64) - want).abs().nan_to_num(torch.inf, torch.inf), misplaced)
    ratio = torch.where(finite, error / allowed, misplaced)
    worst = int(ratio.argmax())
    worst_error, worst_ratio = float(error.max()), float(ratio.flatten()[worst])
    if worst_ratio <= 1.0:
        return Comparison(worst_error, worst_ratio, "")
    at = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(worst), got.shape))
    failed = int((ratio > 1.0).sum())
    return Comparison(
        worst_error,
        worst_ratio,
        f"{name}[{at}] = {float(got.flatten()[worst]):.9g}, float64 has {float(want.flatten()[worst]):.9g} (error "
        f"{float(error.flatten()[worst]):.3g}, allowed {float(allowed.flatten()[worst]):.3g}); "
        f"{failed} of {got.numel()} elements are wrong",
    )


def plain_attention(given: Matrices, softmax_scale: float) -> Tensor:
    """Attention of matrices as one writes it in PyTorch, every step in their dtype; rows without keys are 0."""
    _, weights = plain_scores(given.q, given.k, given.hidden, softmax_scale)
    return weights @ given.v


class _Exact(NamedTuple):
    """For rows of a piece: out, A and B of the module, (matrices, rows, dv), and lse; float64."""

    out: Tensor
    absolute: Tensor
    spread: Tensor
    lse: Tensor


def _exact(given: Matrices, softmax_scale: float) -> _Exact:
    q, k, v = (x.to(torch.float64) for x in given[:3])
    p, lse = probabilities(q, k, given.hidden, softmax_scale)
    return _Exact(p @ v, p @ v.abs(), (p.square() @ v.square()).sqrt(), lse)


def _logit_error(q: Tensor, k: Tensor, softmax_scale: float) -> Tensor:
    """D: a bound for the error of float32 logits, by row, (batch, heads, seqlen_q)."""
    batch, seqlen_q, heads, d = q.shape
    if 0 in (q.numel(), k.numel()):
        return q.new_zeros((batch, heads, seqlen_q), dtype=torch.float64)
    precision = 2.0**-52 if q.dtype == torch.float64 else 2.0**-23
    length_q = torch.linalg.vector_norm(q, dim=3, dtype=torch.float64).transpose(1, 2).nan_to_num(0.0, 0.0)
    length_k = torch.linalg.vector_norm(k, dim=3, dtype=torch.float64).nan_to_num(0.0, 0.0).amax(dim=1)
    length_k = length_k.repeat_interleave(heads // k.shape[2], dim=1)
    bound: Tensor = length_q * length_k.unsqueeze(2) * ((d / 16 + 4) * precision * abs(softmax_scale))
    return bound
