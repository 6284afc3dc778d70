"""The right answer: attention in float64, written as the formula reads.

    S = softmax_scale * Q K^T,   P = softmax(S over the keys that a row sees),   out = P V,   lse = log sum exp S

It materialises the scores, a group of (batch, head) pairs and rows at a time, and knows nothing of tiles; a ragged
batch is cut into its sequences. Everything else in the project is compared with it, so it shares no index code with
`geometry` or the kernels, and a `Mask` is to it three numbers. `testing` calls it, on CPU or CUDA tensors; nobody
computes with it in earnest.
"""

from itertools import pairwise

import torch
from torch import Tensor

from flash_hopper.problem.mask import FULL, Mask

# float64 elements of scores held at once: 128 MB on the host, 1 GB on a GPU
CPU_SCORES = 1 << 24
CUDA_SCORES = 1 << 27
MAX_PAIRS = 32_768  # matrices in a batched product; cuBLAS has refused more than 65535


def attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: Mask = FULL) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads, d), k (batch, seqlen_k, heads_k, d), v (batch, seqlen_k, heads_k, dv).

    Query head h reads key head h // (heads / heads_k). Row i has the diagonal p = i + seqlen_k - seqlen_q and sees the
    keys p - mask.left .. p + mask.right (None: no bound) that are in the same chunk of mask.chunk keys as p (0: no
    chunks). Returns out (batch, seqlen_q, heads, dv) and lse (batch, heads, seqlen_q), natural log, both float64 on the
    device of q. A row that sees no key has out = 0, lse = -inf and zero gradients. Differentiable by autograd, to any
    order. Any dtype and strides; sizes may be 0.
    """
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    if batch * heads * seqlen_q == 0:
        return (
            q.new_zeros((batch, seqlen_q, heads, head_dim_v), dtype=torch.float64),
            q.new_zeros((batch, heads, seqlen_q), dtype=torch.float64),
        )
    key_head = torch.arange(heads_k, device=q.device).repeat_interleave(heads // heads_k)
    budget = CUDA_SCORES if q.is_cuda else CPU_SCORES
    pairs, rows = _group(budget, seqlen_q, seqlen_k + q.shape[3] + head_dim_v)
    batch_step, head_step = max(1, pairs // heads), min(pairs, heads)
    outs, lses = [], []
    for qb, kb, vb in zip(*(torch.split(x, batch_step) for x in (q, k, v)), strict=True):
        parts = [
            _few_heads(qb[:, :, h : h + head_step], kb, vb, key_head[h : h + head_step], rows, softmax_scale, mask)
            for h in range(0, heads, head_step)
        ]
        outs.append(torch.cat([out for out, _ in parts], dim=1))
        lses.append(torch.cat([lse for _, lse in parts], dim=1))
    return torch.cat(outs).transpose(1, 2), torch.cat(lses)


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
) -> tuple[Tensor, Tensor]:
    """`attention` of each sequence of a ragged batch by itself, aligned by its own used lengths.

    q: (total_q, heads, d) with cu_seqlens_q (batch + 1,), else (batch, seqlen_q, heads, d); k, v likewise. Sequence b
    of a packed tensor starts at row cu_seqlens[b]; its length is seqused[b] if given, else cu_seqlens[b + 1] -
    cu_seqlens[b] or the padded size. Returns out like q with dv behind and lse (heads, total_q) if q is packed, else
    (batch, heads, seqlen_q), float64. Rows of no sequence have out = 0 and lse = -inf; they and rows of k and v of no
    sequence are not read, and their gradients are 0. The values of the lengths are trusted.
    """
    queries, gaps = _sequences(q, cu_seqlens_q, seqused_q)
    keys, _ = _sequences(k, cu_seqlens_k, seqused_k)
    values, _ = _sequences(v, cu_seqlens_k, seqused_k)
    heads, head_dim_v = q.shape[-2], v.shape[-1]
    outs, lses = [], []
    for query, key, value, gap in zip(queries, keys, values, gaps[1:], strict=True):
        out, lse = attention(query[None], key[None], value[None], softmax_scale=softmax_scale, mask=mask)
        outs += [out[0], out.new_zeros(gap, heads, head_dim_v)]
        lses += [lse[0], lse.new_full((heads, gap), -torch.inf)]
    wide = q.new_zeros(0, dtype=torch.float64)
    out = torch.cat([wide.new_zeros(gaps[0], heads, head_dim_v), *outs])
    lse = torch.cat([wide.new_full((heads, gaps[0]), -torch.inf), *lses], dim=1)
    if cu_seqlens_q is not None:
        return out, lse
    batch, seqlen_q = q.shape[:2]
    return out.reshape(batch, seqlen_q, heads, head_dim_v), lse.reshape(heads, batch, seqlen_q).transpose(0, 1)


def _sequences(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None) -> tuple[list[Tensor], list[int]]:
    """The used rows of each sequence, (length, heads, d), and the unused rows before, between and after them."""
    if cu_seqlens is None:
        starts = [b * x.shape[1] for b in range(x.shape[0] + 1)]
        x = x.flatten(0, 1)
    else:
        starts = cu_seqlens.tolist()
    spaces = [end - start for start, end in pairwise(starts)]
    lengths = spaces if seqused is None else seqused.tolist()
    gaps = [starts[0], *(space - length for space, length in zip(spaces, lengths, strict=True))]
    gaps[-1] += len(x) - starts[-1]
    pieces = [gaps[0], *(size for pair in zip(lengths, gaps[1:], strict=True) for size in pair)]
    return list(torch.split(x, pieces)[1::2]), gaps


def _group(budget: int, seqlen_q: int, row_size: int) -> tuple[int, int]:
    """How many (batch, head) pairs and how many rows to do at once."""
    row_size = max(row_size, 1)
    return max(1, min(MAX_PAIRS, budget // (seqlen_q * row_size))), max(1, min(seqlen_q, budget // row_size))


def _few_heads(
    q: Tensor, k: Tensor, v: Tensor, key_head: Tensor, rows: int, softmax_scale: float, mask: Mask
) -> tuple[Tensor, Tensor]:
    """q (b, seqlen_q, h, d) and the key head of each head -> out (b, h, seqlen_q, dv), lse (b, h, seqlen_q)."""
    query = q.to(torch.float64).transpose(1, 2)
    key = k[:, :, key_head].to(torch.float64).transpose(1, 2)
    value = v[:, :, key_head].to(torch.float64).transpose(1, 2)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    outs, lses = [], []
    for first in range(0, seqlen_q, rows):
        block = query[:, :, first : first + rows]
        diagonals = torch.arange(first, first + block.shape[2], device=q.device) + (seqlen_k - seqlen_q)
        out, lse = _rows(block, key, value, _hidden(diagonals, seqlen_k, mask), softmax_scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _hidden(diagonals: Tensor, seqlen_k: int, mask: Mask) -> Tensor | None:
    """(rows, seqlen_k) booleans: True where the row of a diagonal does not see a key; None if every row sees all."""
    if mask.left is None and mask.right is None and not mask.chunk:
        return None
    keys, p = torch.arange(seqlen_k, device=diagonals.device), diagonals[:, None]
    hidden = torch.zeros(len(diagonals), seqlen_k, dtype=torch.bool, device=diagonals.device)
    if mask.left is not None:
        hidden |= keys < p - mask.left
    if mask.right is not None:
        hidden |= keys > p + mask.right
    if mask.chunk:
        hidden |= keys // mask.chunk != torch.div(p, mask.chunk, rounding_mode="floor")
    return hidden


def _rows(
    query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """The formula for some rows; `hidden` (rows, seqlen_k) marks the keys that a row does not see."""
    if key.shape[2] == 0:
        nothing = query.new_full(query.shape[:3], -torch.inf)
        return query @ key.transpose(2, 3) @ value, nothing
    scores = (query * softmax_scale) @ key.transpose(2, 3)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    lse = (total.log() + top).masked_fill(blind, -torch.inf)
    return (weights / total) @ value, lse.squeeze(-1)
