"""The CPU backend: the tile algorithm of the kernels, written in torch, with gradients.

For each block of query rows the key blocks that it sees are visited from the last to the first with an online softmax
in base 2:

    c = |softmax_scale| log2(e),  S = sign(softmax_scale) Q K^T
    m' = max(m, rowmax S),  P = 2^((S - m') c),  l = l 2^((m - m') c) + rowsum P,  O = O 2^((m - m') c) + P V
    out = O / l,  lse = (m c + log2 l) ln 2

Matrix products and softmax are float32 (float64 for float64 inputs); P is rounded to the input dtype in front of P V,
as the tensor cores need it. The query heads of a key head are rows of one tile, so K and V are never repeated, and all
(batch, key head) pairs go through a step together; the sequences of a ragged batch go one by one. `launch` calls it for
CPU tensors; dense calls run on any device. It is not tuned for speed.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_hopper.geometry.masks import Lengths
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.reference.spans import Sequence, sequences
from flash_hopper.reference.tiles import (
    Step,
    grouped,
    key_rows,
    query_rows,
    scores_of,
    steps,
    times,
    transposed_times,
)

DTYPES = (DType.BF16, DType.FP16, DType.FP32, DType.FP64)
"""Element types that this backend computes."""

SUPPORTED = frozenset(
    {
        Feature.CAUSAL,
        Feature.GQA,
        Feature.HEAD_DIM_V,
        Feature.NEGATIVE_SCALE,
        Feature.LSE,
        Feature.GRADIENT,
        Feature.WINDOW,
        Feature.CHUNK,
        Feature.VARLEN,
        Feature.SEQUSED,
        Feature.PACK_GQA,  # a tile always holds all query heads of its key head
        Feature.DETERMINISTIC,
        Feature.SM_MARGIN,  # no SM is used, so any number of them stays free
    }
)
"""What this backend can do. Batch invariance is missing: a BLAS may order its sums by the size of the whole batch."""

TILE_M, TILE_N = 128, 128


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    tile_m: int = TILE_M,
    tile_n: int = TILE_N,
) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads, d), k (batch, seqlen_k, heads_k, d), v (batch, seqlen_k, heads_k, dv).

    Returns out (batch, seqlen_q, heads, dv) in q's dtype, contiguous, and lse (batch, heads, seqlen_q), natural
    log, in float32 (float64 for float64 inputs). Both are differentiable, once. Masks are aligned bottom-right; a
    row that sees no key has out = 0, lse = -inf and zero gradients. Sizes may be 0; the scale may be negative or
    zero. The arguments have been checked by `problem.attention_problem`; tile sizes change the order of sums and
    nothing else.
    """
    settings = _Settings(softmax_scale, mask, tile_m, tile_n)
    out, lse = _TiledAttention.apply(q, k, v, settings)  # type: ignore[no-untyped-call]
    return out, lse


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    tile_m: int = TILE_M,
    tile_n: int = TILE_N,
) -> tuple[Tensor, Tensor]:
    """Attention of each sequence of a ragged batch, aligned by its own used lengths; see `problem/ragged.py` for these.

    q: (total_q, heads, d) with cu_seqlens_q (batch + 1,) int32, else (batch, seqlen_q, heads, d); k, v likewise;
    seqused_*: (batch,) int32. Returns out like q with dv behind and lse (heads, total_q) if q is packed, else (batch,
    heads, seqlen_q); the rest as for `attention`. Rows of no sequence are not read; they have out = 0, lse = -inf and
    zero gradients. Raises ArgumentError for lengths that cannot be.
    """
    layout = sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    settings = _Settings(softmax_scale, mask, tile_m, tile_n, layout)
    out, lse = _TiledAttention.apply(q, k, v, settings)  # type: ignore[no-untyped-call]
    return out, lse


class _Settings(NamedTuple):
    """What is no tensor; `layout` is None for a dense batch.

    `sign` and `scale_log2` fold the softmax scale as the module says.
    """

    softmax_scale: float
    mask: Mask
    tile_m: int = TILE_M
    tile_n: int = TILE_N
    layout: tuple[Sequence, ...] | None = None

    @property
    def sign(self) -> float:
        return math.copysign(1.0, self.softmax_scale) if self.softmax_scale else 0.0

    @property
    def scale_log2(self) -> float:
        # with a zero scale the scores are zero already, and any positive factor keeps -inf * c defined
        return abs(self.softmax_scale) * math.log2(math.e) or 1.0

    def steps(self, lengths: Lengths, device: torch.device) -> Iterator[tuple[slice, Iterator[Step]]]:
        """Blocks of rows, with those of the keys that they see."""
        return steps(lengths, self.mask, self.tile_m, self.tile_n, device)


class _TiledAttention(torch.autograd.Function):
    """Ties the two passes to autograd; lse is an output with a gradient like out."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
        with torch.autocast(q.device.type, enabled=False):
            out, lse = _any_forward(q, k, v, settings)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        if d_out is None and d_lse is None:
            return None, None, None, None
        with torch.autocast(q.device.type, enabled=False):
            return *_any_backward(q, k, v, out, lse, d_out, d_lse, ctx.settings), None


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the inputs' dtype, given what `attention` took and returned and the gradients of out and lse.

    d_out and d_lse may have any strides; None stands for zeros. What autograd calls for `attention`, on its own.
    """
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _any_backward(q, k, v, out, lse, d_out, d_lse, _Settings(softmax_scale, mask))


def varlen_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gradients` for what `varlen_attention` took and returned; rows of no sequence are read in none of them."""
    layout = sequences(q, k, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    settings = _Settings(softmax_scale, mask, layout=layout)
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return _any_backward(q, k, v, out, lse, d_out, d_lse, settings)


def _any_forward(q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    """A dense batch at once, or the sequences of a ragged one by one."""
    if settings.layout is None:
        return _forward(q, k, v, settings)
    *rows, heads, _ = q.shape
    out = q.new_zeros((*rows, heads, v.shape[-1]))
    lse = q.new_full((*rows[:-1], heads, rows[-1]), -torch.inf, dtype=_accumulator_dtype(q.dtype))
    for span_q, span_k in settings.layout:
        some_out, some_lse = _forward(span_q.rows(q), span_k.rows(k), span_k.rows(v), settings)
        span_q.rows(out).copy_(some_out)
        span_q.columns(lse).copy_(some_lse)
    return out, lse


def _any_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    settings: _Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of a dense batch at once, or of the sequences of a ragged one by one."""
    if settings.layout is None:
        return _backward(q, k, v, out, lse, d_out, d_lse, settings)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for span_q, span_k in settings.layout:
        some_dq, some_dk, some_dv = _backward(
            span_q.rows(q),
            span_k.rows(k),
            span_k.rows(v),
            span_q.rows(out),
            span_q.columns(lse),
            None if d_out is None else span_q.rows(d_out),
            None if d_lse is None else span_q.columns(d_lse),
            settings,
        )
        span_q.rows(dq).copy_(some_dq)
        span_k.rows(dk).copy_(some_dk)
        span_k.rows(dv).copy_(some_dv)
    return dq, dk, dv


def _forward(q: Tensor, k: Tensor, v: Tensor, settings: _Settings) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    wide = _accumulator_dtype(q.dtype)
    out = q.new_zeros((batch, seqlen_q, heads, head_dim_v))
    lse = q.new_full((batch, heads, seqlen_q), -torch.inf, dtype=wide)
    if seqlen_k == 0 or batch * heads == 0:
        return out, lse
    rows_q, keys, values = query_rows(q, heads_k, wide), key_rows(k, wide), key_rows(v, wide)
    out_rows, lse_rows = grouped(out, heads_k), torch.unflatten(lse, 1, (heads_k, -1))
    for rows, key_steps in settings.steps(Lengths(seqlen_q, seqlen_k), q.device):
        tile, state = rows_q[:, :, :, rows], None
        for cols, hidden in key_steps:
            scores = scores_of(tile, keys[:, :, cols], settings.sign)
            state = _online_softmax_step(state, scores, hidden, values[:, :, cols], settings.scale_log2, q.dtype)
        assert state is not None, f"no key block for rows {rows}"
        blind = state.total == 0
        total = state.total.masked_fill(blind, 1.0)
        out_rows[:, :, :, rows] = (state.acc / total.unsqueeze(-1)).to(q.dtype)
        log_total = state.top * settings.scale_log2 + total.log2()
        lse_rows[:, :, :, rows] = (log_total * math.log(2)).masked_fill(blind, -torch.inf)
    return out, lse


class _SoftmaxState(NamedTuple):
    """Online softmax of a tile: `top` (m) and `total` (l) of shape (b, hk, group, rows), `acc` (O) with dv behind."""

    top: Tensor
    total: Tensor
    acc: Tensor


def _online_softmax_step(
    state: _SoftmaxState | None,
    scores: Tensor,
    hidden: Tensor | None,
    values: Tensor,
    scale_log2: float,
    dtype: torch.dtype,
) -> _SoftmaxState:
    """Take in one key block: scores (b, hk, group, rows, keys), values (b, hk, keys, dv), P rounded to `dtype`.

    `top` starts at the lowest finite number, so that a block in which a row sees no key leaves no NaN behind.
    """
    seen = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
    top = seen.amax(dim=-1).clamp_min(torch.finfo(scores.dtype).min)
    if state is not None:
        top = torch.maximum(top, state.top)
    weights = torch.exp2((scores - top.unsqueeze(-1)) * scale_log2)
    if hidden is not None:
        weights = weights.masked_fill(hidden, 0.0)
    total, acc = weights.sum(dim=-1), times(_rounded(weights, dtype), values)
    if state is not None:
        rescale = torch.exp2((state.top - top) * scale_log2)
        total, acc = total + state.total * rescale, acc + state.acc * rescale.unsqueeze(-1)
    return _SoftmaxState(top, total, acc)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    settings: _Settings,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv by recomputing P = 2^(S c - lse log2 e), with D = rowsum(dO O) - dLSE and dS = P (dP - D)."""
    seqlen_q, seqlen_k, heads_k = q.shape[1], k.shape[1], k.shape[2]
    wide = _accumulator_dtype(q.dtype)
    if q.numel() == 0 or k.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    rows_q, keys, values = query_rows(q, heads_k, wide), key_rows(k, wide), key_rows(v, wide)
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_rows = query_rows(d_out, heads_k, wide)
    dots = (d_rows * query_rows(out, heads_k, wide)).sum(dim=-1)
    lse_rows = torch.unflatten(lse, 1, (heads_k, -1))
    if d_lse is not None:
        dots = dots - torch.unflatten(d_lse.to(wide), 1, (heads_k, -1))
    blind = lse_rows == -torch.inf
    # a row without keys gets P = 0 and no gradient, whatever comes back through its lse
    dots, lse_log2 = dots.masked_fill(blind, 0.0), lse_rows.masked_fill(blind, torch.inf) * math.log2(math.e)
    dq, dk, dv = torch.zeros_like(rows_q), torch.zeros_like(keys), torch.zeros_like(values)
    for rows, key_steps in settings.steps(Lengths(seqlen_q, seqlen_k), q.device):
        tile, d_tile = rows_q[:, :, :, rows], d_rows[:, :, :, rows]
        for cols, hidden in key_steps:
            scores = scores_of(tile, keys[:, :, cols], settings.sign)
            weights = torch.exp2(scores * settings.scale_log2 - lse_log2[:, :, :, rows].unsqueeze(-1))
            if hidden is not None:
                weights = weights.masked_fill(hidden, 0.0)
            d_weights = scores_of(d_tile, values[:, :, cols], 1.0)
            d_scores = _rounded(weights * (d_weights - dots[:, :, :, rows].unsqueeze(-1)), q.dtype)
            dv[:, :, cols] += transposed_times(_rounded(weights, q.dtype), d_tile)
            dq[:, :, :, rows] += times(d_scores, keys[:, :, cols])
            dk[:, :, cols] += transposed_times(d_scores, tile)
    scale = settings.softmax_scale
    d_query = (dq * scale).flatten(1, 2).transpose(1, 2)
    return d_query.to(q.dtype), (dk * scale).transpose(1, 2).to(k.dtype), dv.transpose(1, 2).to(v.dtype)


def _accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x with the precision of `dtype`, kept in its own."""
    return x.to(dtype).to(x.dtype)
