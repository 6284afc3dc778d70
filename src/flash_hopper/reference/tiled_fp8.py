"""The CPU backend for e4m3 tensors: the tile algorithm of the e4m3 kernels in torch (specification 6.3, 6.4).

As `tiled`, with c = |softmax_scale| log2(e) and the factors of rows i and keys j:

    S_ij = sign(softmax_scale) q_i k_j  (codes),   y_ij = S_ij c f_i f_j
    m' = m if rowmax y <= m, else rowmax y + 2.75,   P = e4m3(2^(y - m' + 8.75))
    l = l 2^(m - m') + rowsum P,   O = O 2^(m - m') + P (f_j V_j),   out = O / l,   lse = (m + log2 l - 8.75) ln 2

So weights are at most 2^8.75, near the largest number of e4m3 (`geometry/fp8.py`). Sums are float32, row sums those of rounded weights.
There are no gradients. `launch` calls it for CPU tensors; dense calls run on any device.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.geometry.fp8 import LAG_LOG2, REFERENCE_LOG2
from flash_hopper.geometry.masks import Lengths
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.reference.fp8 import Decoded
from flash_hopper.reference.spans import sequences
from flash_hopper.reference.tiles import grouped, key_rows, query_rows, scores_of, steps, times

CODES = torch.float8_e4m3fn
SUPPORTED = frozenset({
    Feature.CAUSAL, Feature.GQA, Feature.HEAD_DIM_V, Feature.NEGATIVE_SCALE, Feature.LSE, Feature.DETERMINISTIC,
    Feature.SM_MARGIN, Feature.WINDOW, Feature.CHUNK, Feature.VARLEN, Feature.SEQUSED, Feature.FP8, Feature.DESCALE,
    Feature.FAST_ACCUM,
})  # fmt: skip
"""What this backend can do."""

TILE_M, TILE_N = 128, 128
NO_KEYS = -(2.0**100)  # the reference of a row that has seen no key
SMALLEST_FACTOR, LARGEST_FACTOR = (
    2.0**-100,
    2.0**70,
)  # outside of these scores are all equal, or the largest alone counts
SMALLEST_VALUE, LARGEST_VALUE = 2.0**-120, 2.0**120


def attention(
    q: Decoded,
    k: Decoded,
    v: Decoded,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    out_dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """out (batch, seqlen_q, heads, dv) and lse (batch, heads, seqlen_q) of a dense batch; shapes as in `tiled.attention`."""
    batch, seqlen_q, heads, _ = q.codes.shape
    out = q.codes.new_zeros((batch, seqlen_q, heads, v.codes.shape[-1]), dtype=out_dtype)
    lse = q.codes.new_full((batch, heads, seqlen_q), -torch.inf)
    _forward(q, k, v, out, lse, softmax_scale, mask)
    return out, lse


def varlen_attention(
    q: Decoded,
    k: Decoded,
    v: Decoded,
    *,
    softmax_scale: float,
    mask: Mask = FULL,
    out_dtype: torch.dtype = torch.bfloat16,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence of a ragged batch; lengths and results as in `tiled.varlen_attention`."""
    *rows, heads, _ = q.codes.shape
    out = q.codes.new_zeros((*rows, heads, v.codes.shape[-1]), dtype=out_dtype)
    lse = q.codes.new_full((*rows[:-1], heads, rows[-1]), -torch.inf)
    for span_q, span_k in sequences(q.codes, k.codes, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k):
        of_q = Decoded(*map(span_q.rows, q))
        of_k, of_v = (Decoded(*map(span_k.rows, x)) for x in (k, v))
        _forward(of_q, of_k, of_v, span_q.rows(out), span_q.columns(lse), softmax_scale, mask)
    return out, lse


class _State(NamedTuple):
    """Online softmax of a tile: reference (m) and total (l) of shape (b, hk, group, rows), acc (O) with dv behind."""

    reference: Tensor
    total: Tensor
    acc: Tensor


def _forward(q: Decoded, k: Decoded, v: Decoded, out: Tensor, lse: Tensor, softmax_scale: float, mask: Mask) -> None:
    """Fill out and lse, which hold zeros and -inf, of a dense batch or of one sequence."""
    seqlen_q, seqlen_k, heads_k = q.codes.shape[1], k.codes.shape[1], k.codes.shape[2]
    if 0 in (out.numel(), seqlen_k):
        return
    sign = math.copysign(1.0, softmax_scale) if softmax_scale else 0.0
    scale_log2 = abs(softmax_scale) * math.log2(math.e) or 1.0
    f32 = torch.float32
    rows_q, of_rows = query_rows(q.codes, heads_k, f32), query_rows(q.factors, heads_k, f32)
    keys, of_keys = key_rows(k.codes, f32), key_rows(k.factors, f32)
    values = key_rows(v.codes, f32) * key_rows(v.factors, f32).clamp(SMALLEST_VALUE, LARGEST_VALUE)
    out_rows, lse_rows = grouped(out, heads_k), torch.unflatten(lse, 1, (heads_k, -1))
    for rows, key_steps in steps(Lengths(seqlen_q, seqlen_k), mask, TILE_M, TILE_N, q.codes.device):
        tile, state = rows_q[:, :, :, rows], None
        for cols, hidden in key_steps:
            factors = scale_log2 * of_rows[:, :, :, rows] * of_keys[:, :, None, cols].transpose(-1, -2)
            scores = scores_of(tile, keys[:, :, cols], sign) * factors.clamp(SMALLEST_FACTOR, LARGEST_FACTOR)
            state = _step(state, scores, hidden, values[:, :, cols])
        assert state is not None, f"no key block for rows {rows}"
        blind = state.total == 0
        total = state.total.masked_fill(blind, 1.0)
        out_rows[:, :, :, rows] = (state.acc / total.unsqueeze(-1)).to(out.dtype)
        log_sum = (state.reference + total.log2() - REFERENCE_LOG2) * math.log(2)
        lse_rows[:, :, :, rows] = log_sum.masked_fill(blind, -torch.inf)


def _step(state: _State | None, scores: Tensor, hidden: Tensor | None, values: Tensor) -> _State:
    """Take in one key block: scores (b, hk, group, rows, keys) as logarithms to base 2, values (b, hk, keys, dv)."""
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(dim=-1)
    reference = (top + LAG_LOG2).clamp_min(NO_KEYS)
    if state is not None:
        reference = torch.where(top > state.reference, reference, state.reference)
    weights = torch.exp2(scores + (REFERENCE_LOG2 - reference).unsqueeze(-1)).to(CODES).to(torch.float32)
    total, acc = weights.sum(dim=-1), times(weights, values)
    if state is not None:
        rescale = torch.exp2(state.reference - reference)
        total, acc = total + state.total * rescale, acc + state.acc * rescale.unsqueeze(-1)
    return _State(reference, total, acc)
