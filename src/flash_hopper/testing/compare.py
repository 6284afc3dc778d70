"""Is a result right? The allowance for every element of out and lse, and the comparison itself.

For an element (row r, column c) of out, with everything in float64 from `reference.naive`:

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

from flash_hopper.reference import naive

_LSE_RELATIVE = 2.0**-21
_ABSOLUTE = 1e-5
# scores of plain PyTorch attention held at once, in elements
_PLAIN_SCORES = {"cpu": 1 << 24, "cuda": 1 << 28}


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


def expect(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Expected:
    """The right result for q (batch, seqlen_q, heads, d), k and v, and the allowances that the module defines."""
    dtype, columns = q.dtype, v.shape[3]
    both, lse = naive.attention(q, k, torch.cat([v, v.abs()], dim=3), softmax_scale=softmax_scale, causal=causal)
    ref, absolute = both[..., :columns], both[..., columns:]
    plain = plain_attention(q, k, v, softmax_scale=softmax_scale, causal=causal)
    plain_error = (plain.to(torch.float64) - ref).abs().nan_to_num(0.0, 0.0, 0.0).amax(dim=3, keepdim=True)
    info = torch.finfo(dtype)
    half_ulp = info.eps / 2
    spread = _spread(q, k, v, lse, softmax_scale, causal)
    rounding = half_ulp * (2 * ref.abs().clamp_min(info.smallest_normal) + torch.minimum(absolute, 4 * spread))
    logit_error = _logit_error(q, k, softmax_scale)
    of_logits = 2 * logit_error.transpose(1, 2).unsqueeze(3) * absolute
    size = float(v.abs().nan_to_num(0.0, 1.0).amax().clamp_max(1.0)) if v.numel() else 1.0
    return Expected(
        out=ref,
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


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> Tensor:
    """Attention as one writes it in PyTorch, every step in the input dtype: out (batch, seqlen_q, heads, dv).

    The scale goes into q first, so that float16 scores overflow late. Rows without keys are 0.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k, columns = v.shape[1:]
    out = q.new_zeros((batch * heads, seqlen_q, columns))
    if 0 in (out.numel(), seqlen_k):
        return out.view(batch, seqlen_q, heads, columns)
    query = (q * softmax_scale).transpose(1, 2).flatten(0, 1)
    key, value = (x.repeat_interleave(heads // heads_k, dim=2).transpose(1, 2).flatten(0, 1) for x in (k, v))
    budget = _PLAIN_SCORES[q.device.type]
    rows = max(1, min(seqlen_q, budget // seqlen_k))
    pairs = max(1, min(naive.MAX_PAIRS, budget // (rows * seqlen_k)))
    for p in range(0, batch * heads, pairs):
        for r in range(0, seqlen_q, rows):
            scores = query[p : p + pairs, r : r + rows] @ key[p : p + pairs].transpose(1, 2)
            if causal:
                below = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril(r + seqlen_k - seqlen_q)
                scores = scores.masked_fill(~below, -torch.inf)
                weights = scores.softmax(dim=-1).masked_fill(~below.any(dim=1, keepdim=True), 0.0)
            else:
                weights = scores.softmax(dim=-1)
            out[p : p + pairs, r : r + rows] = weights @ value[p : p + pairs]
    return out.view(batch, heads, seqlen_q, columns).transpose(1, 2)


def _spread(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """B, the root of sum_j p_j^2 v_j^2: p^2 is a softmax of doubled scores, up to a factor a row."""
    squares = v.to(torch.float64).square()
    doubled, doubled_lse = naive.attention(q, k, squares, softmax_scale=2 * softmax_scale, causal=causal)
    weight = torch.exp(doubled_lse - 2 * lse).nan_to_num(0.0)
    return (doubled * weight.transpose(1, 2).unsqueeze(3)).sqrt()


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
