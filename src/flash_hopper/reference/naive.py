"""The right answer: attention in float64, written as the formula reads.

    S = softmax_scale * Q K^T,   P = softmax(S over the keys that a row sees),   out = P V,   lse = log sum exp S

It materialises the scores, a group of (batch, head) pairs and rows at a time, and knows nothing of tiles.
Everything else in the project is compared with it, so it shares no index code with `geometry` or the kernels.
`testing` calls it, on CPU or CUDA tensors; nobody computes with it in earnest.
"""

import torch
from torch import Tensor

# float64 elements of scores held at once: 128 MB on the host, 1 GB on a GPU
CPU_SCORES = 1 << 24
CUDA_SCORES = 1 << 27
MAX_PAIRS = 32_768  # matrices in a batched product; cuBLAS has refused more than 65535


def attention(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, heads, d), k (batch, seqlen_k, heads_k, d), v (batch, seqlen_k, heads_k, dv).

    Query head h reads key head h // (heads / heads_k). Causal is aligned bottom-right: row i sees the keys 0 .. i +
    seqlen_k - seqlen_q. Returns out (batch, seqlen_q, heads, dv) and lse (batch, heads, seqlen_q), natural log,
    both float64 on the device of q. A row that sees no key has out = 0, lse = -inf and zero gradients.
    Differentiable by autograd, to any order. Any dtype and strides; sizes may be 0.
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
            _few_heads(qb[:, :, h : h + head_step], kb, vb, key_head[h : h + head_step], rows, softmax_scale, causal)
            for h in range(0, heads, head_step)
        ]
        outs.append(torch.cat([out for out, _ in parts], dim=1))
        lses.append(torch.cat([lse for _, lse in parts], dim=1))
    return torch.cat(outs).transpose(1, 2), torch.cat(lses)


def _group(budget: int, seqlen_q: int, row_size: int) -> tuple[int, int]:
    """How many (batch, head) pairs and how many rows to do at once."""
    row_size = max(row_size, 1)
    return max(1, min(MAX_PAIRS, budget // (seqlen_q * row_size))), max(1, min(seqlen_q, budget // row_size))


def _few_heads(
    q: Tensor, k: Tensor, v: Tensor, key_head: Tensor, rows: int, softmax_scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """q (b, seqlen_q, h, d) and the key head of each head -> out (b, h, seqlen_q, dv), lse (b, h, seqlen_q)."""
    query = q.to(torch.float64).transpose(1, 2)
    key = k[:, :, key_head].to(torch.float64).transpose(1, 2)
    value = v[:, :, key_head].to(torch.float64).transpose(1, 2)
    seqlen_q, seqlen_k = query.shape[2], key.shape[2]
    outs, lses = [], []
    for first in range(0, seqlen_q, rows):
        block = query[:, :, first : first + rows]
        hidden = None
        if causal:
            last_seen = torch.arange(first, first + block.shape[2], device=q.device) + (seqlen_k - seqlen_q)
            hidden = torch.arange(seqlen_k, device=q.device) > last_seen[:, None]
        out, lse = _rows(block, key, value, hidden, softmax_scale)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


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
