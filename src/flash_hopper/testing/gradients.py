"""Are gradients right? The right ones in float64, and the allowance for every element of dq, dk and dv.

The right ones come from autograd through the formula (`pieces`, which tests hold to `reference.naive`). For an element of
dq in query row r (all in float64):

    |got - ref| <= max(F, min(2 E_r, 2 F)) + 1e-5 min(1, max_c |ref_rc|)

E_r is the largest error of plain PyTorch gradients (matmul, softmax and their autograd in the input dtype) in the row;
for dk and dv the rows are those of keys. F is what a right kernel may be wrong by, one that keeps float32 and rounds P,
dS, out and the gradients to the input dtype. F alone makes rows pass in which PyTorch is exactly right, and it bounds
what PyTorch's error can excuse where its rounded scores lead it astray. With S = scale q k^T, dP = dO v^T, D = rowsum(dO
o out) - dlse, dS = P o (dP - D) the gradients are dq = scale dS k, dk = scale dS^T q, dv = P^T dO. For a sum x = sum_j
w_j y_j, w being a row of dS (for dq, y = k) or a column of dS (dk, y = q) or of P (dv, y = dO):

    F = (1 + 4 u) (rho(x) + N + c sum_j |w_j| |y_j| + sum_j n_j |y_j| + 3/2 |sum_j t_j y_j|)
    N = min(sum_j rho(w_j) |y_j|, q |x| + 4 sqrt(sum_j rho(w_j)^2 y_j^2))

- rho(z) = max(u |z|, eta), for w_j at most |w_j|, is a rounding error: u is half an ulp of 1, eta half of the smallest
  number (it matters for float16). rho(x) is that of the result. The factor 1 + 4 u covers errors of errors.
- N is the rounding of P or dS. In the worst case all errors add up; independent ones give no more than 4 times the root
  of the sum of squares (an error is uniform within rho, so 4 are 7 standard deviations), and errors that are all alike,
  as for equal probabilities, give q |x|; q is the mean relative error, u unless numbers are subnormal.
- c = 2^-23 (n / 16 + 4) for n terms: truncated sums of a tensor core, 16 terms a step, and of a few added up in memory.
- n_j is the float32 error of w_j: relative error of P from its exponent and from lse, r = 2 L + 2^-22 |lse| + 2^-21 with
  L = (d / 16 + 4) 2^-23 |scale| |q_r| max |k| as for out; absolute error of dP and D, P 2^-23 ((dv / 16 + 8) |dO_r| max
  |v| + |dlse|); and min(P, 2^-126), times |dP - D| in dS: the exponential of the GPU gives 0 for a result below the
  smallest normal number. It shows where a whole key row is that small: keys that nobody but an outlier looks at.
- t_j is known exactly: the backward computes D from the out that the forward returned, whose error, itself within its
  own allowance, shifts a row of dS by P times the row sum of dO o (out - ref). The sum is signed, as rows shift either
  way; a half more, as what is shifted is rounded differently. N rounds |w_j| + |t_j|.

With scale = 0 and in rows that see no key nothing but 0 is right for dq. NaN and infinities must be where float64,
rounded to the dtype, has them. `testing.run` calls this; the comparison itself is `compare.compare`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.problem.mask import Mask
from flash_hopper.testing.compare import SMALLEST, Target
from flash_hopper.testing.pieces import FULL, Batch, Lengths, Piece, plain_scores, probabilities, stacked

_ABSOLUTE = 1e-5
# elements of a scores matrix held at once; a step holds about 15 such matrices in float64
_SCORES = {"cpu": 1 << 21, "cuda": 1 << 26}


@torch.no_grad()
def expect_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor | None,
    dlse: Tensor | None,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    lengths: Lengths | None = None,
) -> dict[str, Target]:
    """Right dq, dk, dv for q (batch, seqlen_q, heads, d), k and v, and the allowances that the module defines.

    out: what the forward returned, any dtype; dout: like out, dlse: (batch, heads, seqlen_q); None stands for zeros.
    `lengths` makes the entries of a padded batch shorter: gradients behind them are 0.
    """
    batch = Batch(q, k, v, softmax_scale, mask, lengths)
    dout = torch.zeros_like(out, dtype=q.dtype) if dout is None else dout
    dlse = dout.new_zeros(dout.shape[:3], dtype=torch.float64).transpose(1, 2) if dlse is None else dlse
    scale = abs(softmax_scale)
    sums = {"dq": _Sums(q, scale), "dk": _Sums(k, scale), "dv": _Sums(v, 1.0)}
    for piece in batch.pieces(_SCORES[q.device.type]):
        given = _cut(batch, piece, out, dout, dlse)
        right, plain, bounds = _right_gradients(given), _plain_gradients(given), _bounds(given)
        for name, total in sums.items():
            total.add(*piece.of(name), right[name], plain[name], bounds[name])
    return {name: total.target() for name, total in sums.items()}


class _Given(NamedTuple):
    """What belongs to a piece, in the dtypes given. The query heads of a key head are one matrix."""

    q: Tensor  # (matrices, heads * rows, d)
    k: Tensor
    v: Tensor
    out: Tensor  # (matrices, heads * rows, dv)
    dout: Tensor
    dlse: Tensor  # (matrices, heads * rows)
    hidden: Tensor | None  # (matrices or 1, heads * rows, keys)
    softmax_scale: float
    lengths: tuple[int, int]  # query rows of all heads of a key head, and keys: terms of the longest sums


def _cut(batch: Batch, piece: Piece, out: Tensor, dout: Tensor, dlse: Tensor) -> _Given:
    """The piece's part of everything."""
    q, k, v, hidden, shape = batch.cut(piece)
    out, dout = (stacked(x[piece.of("dq")], shape) for x in (out.detach(), dout))
    dlse = stacked(dlse.transpose(1, 2)[piece.of("dq")].unsqueeze(3), shape).squeeze(2)
    return _Given(q, k, v, out, dout, dlse, hidden, batch.softmax_scale, (batch.seqlen_q * batch.group, batch.seqlen_k))


def _right_gradients(given: _Given) -> dict[str, Tensor]:
    """float64 gradients of a piece by autograd through the formula."""
    with torch.enable_grad():
        q, k, v = leaves = [x.to(torch.float64, copy=True).requires_grad_() for x in given[:3]]
        p, lse = probabilities(q, k, given.hidden, given.softmax_scale)
        passed = given.dout.to(torch.float64), given.dlse.to(torch.float64)
        found = torch.autograd.grad((p @ v, lse), leaves, passed)
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


def _plain_gradients(given: _Given) -> dict[str, Tensor]:
    """Gradients of a piece as PyTorch gives them for attention written in the input dtype; lse is float32, as ours is.

    Rows without keys get gradients of 0.
    """
    with torch.enable_grad():
        q, k, v = leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
        scores, weights = plain_scores(q, k, given.hidden, given.softmax_scale)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        lse = scores.to(wide).logsumexp(dim=-1)
        dlse = given.dlse if given.hidden is None else given.dlse.masked_fill(given.hidden.all(dim=-1), 0.0)
        found = torch.autograd.grad((weights @ v, lse), leaves, (given.dout, dlse.to(wide)))
    return dict(zip(("dq", "dk", "dv"), found, strict=True))


class _Bound(NamedTuple):
    """Sums over j that make up F, for all rows and columns of a gradient, without the scale."""

    near: Tensor  # sum rho(w_j) |y_j|
    squares: Tensor  # sum rho(w_j)^2 y_j^2
    size: Tensor  # sum |w_j| |y_j|
    other: Tensor  # c sum |w_j| |y_j| + sum n_j |y_j|
    shift: Tensor  # sum t_j y_j


def _bounds(given: _Given) -> dict[str, _Bound]:
    """The sums of a piece for each gradient, from P and dS in float64."""
    q, k, v, out, dout, dlse = (x.to(torch.float64).nan_to_num(0.0, 0.0, 0.0) for x in given[:6])
    scale, dtype = given.softmax_scale, given.q.dtype
    p, lse = probabilities(q, k, given.hidden, scale)
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    dp = dout @ v.transpose(1, 2)
    dots = (p * dp).sum(dim=-1)
    slope = dp - (dots - dlse).unsqueeze(-1)
    ds = p * slope

    lost = p.clamp_max(torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).tiny)
    step = 2.0**-52 if dtype == torch.float64 else 2.0**-23
    longest_k, longest_v = (torch.linalg.vector_norm(x, dim=2).amax(dim=1, keepdim=True) for x in (k, v))
    length_q, length_dout = (torch.linalg.vector_norm(x, dim=2) for x in (q, dout))
    logit = step * (q.shape[2] / 16 + 4) * abs(scale) * length_q * longest_k
    of_p = 2 * logit + step * (2 * lse.abs() + 4)
    of_dp = step * ((v.shape[2] / 16 + 8) * length_dout * longest_v + dlse.abs())
    queries, keys = (step * (n / 16 + 4) for n in given.lengths)
    shift = p * ((dout * out).sum(dim=-1) - dots).unsqueeze(-1)

    size = ds.abs()
    rounding = _rounding(size + shift.abs(), dtype)
    error = size * of_p.unsqueeze(-1) + p * of_dp.unsqueeze(-1) + lost * slope.abs()
    of_dq, of_dk, of_dv = error + keys * size, error + queries * size, p * (of_p.unsqueeze(-1) + queries) + lost
    return {
        "dq": _bound(rounding, size, of_dq, shift, k),
        "dk": _bound(rounding.mT, size.mT, of_dk.mT, shift.mT, q),
        "dv": _bound(_rounding(p, dtype).mT, p.mT, of_dv.mT, None, dout),
    }


def _bound(rounding: Tensor, size: Tensor, error: Tensor, shift: Tensor | None, y: Tensor) -> _Bound:
    """Sums over the last dimension of the weights and the first of the matrices y."""
    absolute = y.abs()
    near, of_size, other = rounding @ absolute, size @ absolute, error @ absolute
    shifted = torch.zeros_like(near) if shift is None else shift @ y
    return _Bound(near, rounding.square() @ y.square(), of_size, other, shifted)


def _rounding(x: Tensor, dtype: torch.dtype) -> Tensor:
    """rho of a weight: the most that rounding to `dtype` moves it."""
    info = torch.finfo(dtype)
    return torch.minimum(x.abs(), x.abs().clamp_min(info.smallest_normal) * (info.eps / 2))


class _Sums:
    """One gradient, added up over pieces: right, plain, and its bound; all (batch, rows or keys, heads, dim).

    `scale`: |softmax_scale|, which multiplies the sums of the bound; 1 for dv.
    """

    def __init__(self, like: Tensor, scale: float) -> None:
        self.dtype, self.scale = like.dtype, scale
        self.right, *bound = (like.new_zeros(like.shape, dtype=torch.float64) for _ in range(6))
        self.bound = _Bound(*bound)
        # several pieces that reach the same keys are added up in float32, as one matrix product would
        self.plain = like.new_zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))

    def add(self, batch: slice, positions: slice, heads: slice, right: Tensor, plain: Tensor, bound: _Bound) -> None:
        """Take in a piece, whose tensors are (matrices, rows of all heads of a matrix, dim)."""
        for total, part in ((self.right, right), (self.plain, plain), *zip(self.bound, bound, strict=True)):
            place = total[batch, positions, heads].transpose(1, 2)
            place += part.view(place.shape)

    def target(self) -> Target:
        """The right gradient with its allowance."""
        right, info = self.right, torch.finfo(self.dtype)
        near, squares, size, other, shift = self.bound
        other = self.scale * (other + 1.5 * shift.abs())
        # where nothing is added up, as in rows without keys, or everything is multiplied by 0
        is_exact = (size == 0) & (other == 0) if self.scale else torch.ones_like(size, dtype=torch.bool)
        of_result = right.abs().clamp_min(info.smallest_normal) * (info.eps / 2)
        alike = (near / size).nan_to_num(0.0, 0.0) * right.abs()
        of_weights = torch.minimum(self.scale * near, alike + 4 * self.scale * squares.sqrt())
        floor = (1 + 2 * info.eps) * (of_result.masked_fill(is_exact, 0.0) + of_weights + other)
        plain_error = (self.plain.to(self.dtype).to(torch.float64) - right).abs().nan_to_num(0.0, 0.0, 0.0)
        yardstick = 2 * plain_error.amax(dim=3, keepdim=True)
        contract = _ABSOLUTE * right.abs().amax(dim=3, keepdim=True).clamp_max(1.0)
        allowed = torch.maximum(floor, torch.minimum(yardstick, 2 * floor)) + contract
        return Target(right, allowed.clamp_min(SMALLEST))
