"""The dense and the ragged functions with FlashAttention-2's positional signatures, for programs written for it.

Arguments mean what `flash_hopper.flash_attn_func` and `flash_attn_varlen_func` say; those that only FlashAttention-2 has:

dropout_p: 0.0 only. alibi_slopes, block_table: None only. Anything else raises UnsupportedError.
return_attn_probs: return (out, softmax_lse, S_dmask) in place of out. softmax_lse: (batch, heads, seqlen_q) or (heads,
total_q) float32, natural logarithm; for a query that sees no key it is -inf, where FlashAttention-2 gives +inf. S_dmask: an
empty tensor of shape (0,), as FlashAttention-2 returns without dropout.
"""

from typing import Any

import torch

from flash_hopper import api
from flash_hopper.api import AttentionResult, MaxSeqlen, Window
from flash_hopper.problem.errors import UnsupportedError

Fa2Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Fa2Result:
    """Attention of q: (batch, seqlen_q, heads, head_dim), k: (batch, seqlen_k, heads_k, head_dim), v: (batch, seqlen_k,
    heads_k, head_dim_v). Returns and raises as the module says."""
    _refuse(dropout_p, alibi_slopes)
    options = _options(causal, window_size, softcap, deterministic, return_attn_probs)
    return _result(api.flash_attn_func(q, k, v, softmax_scale, **options))


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Fa2Result:
    """`flash_attn_func` for qkv: (batch, seqlen, 3, heads, head_dim)."""
    _refuse(dropout_p, alibi_slopes)
    options = _options(causal, window_size, softcap, deterministic, return_attn_probs)
    return _result(api.flash_attn_qkvpacked_func(qkv, softmax_scale, **options))


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Fa2Result:
    """`flash_attn_func` for q: (batch, seqlen_q, heads, head_dim), kv: (batch, seqlen_k, 2, heads_k, head_dim)."""
    _refuse(dropout_p, alibi_slopes)
    options = _options(causal, window_size, softcap, deterministic, return_attn_probs)
    return _result(api.flash_attn_kvpacked_func(q, kv, softmax_scale, **options))


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: MaxSeqlen,
    max_seqlen_k: MaxSeqlen,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Fa2Result:
    """Attention of packed sequences, q: (total_q, heads, head_dim), k: (total_k, heads_k, head_dim), v: (total_k, heads_k,
    head_dim_v), cu_seqlens_*: (batch + 1,) int32. Returns and raises as the module says."""
    _refuse(dropout_p, alibi_slopes)
    if block_table is not None:
        raise UnsupportedError("this release does not support block_table: pass None")
    options = _options(causal, window_size, softcap, deterministic, return_attn_probs)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _result(api.flash_attn_varlen_func(q, k, v, *lengths, softmax_scale=softmax_scale, **options))


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: MaxSeqlen,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Fa2Result:
    """`flash_attn_varlen_func` for qkv: (total, 3, heads, head_dim)."""
    _refuse(dropout_p, alibi_slopes)
    options = _options(causal, window_size, softcap, deterministic, return_attn_probs)
    return _result(
        api.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, softmax_scale=softmax_scale, **options)
    )


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: MaxSeqlen,
    max_seqlen_k: MaxSeqlen,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Fa2Result:
    """`flash_attn_varlen_func` for q: (total_q, heads, head_dim), kv: (total_k, 2, heads_k, head_dim)."""
    _refuse(dropout_p, alibi_slopes)
    options = _options(causal, window_size, softcap, deterministic, return_attn_probs)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return _result(api.flash_attn_varlen_kvpacked_func(q, kv, *lengths, softmax_scale=softmax_scale, **options))


def _refuse(dropout_p: float, alibi_slopes: torch.Tensor | None) -> None:
    if dropout_p != 0:
        raise UnsupportedError(f"this release does not support dropout_p other than 0, got {dropout_p!r}")
    if alibi_slopes is not None:
        raise UnsupportedError("this release does not support alibi_slopes: pass None")


def _options(
    causal: bool, window_size: Window, softcap: float, deterministic: bool, return_attn_probs: bool
) -> dict[str, Any]:
    return {
        "causal": causal,
        "window_size": window_size,
        "softcap": softcap,
        "deterministic": deterministic,
        "return_lse": return_attn_probs,
    }


def _result(result: AttentionResult) -> Fa2Result:
    if isinstance(result, torch.Tensor):
        return result
    out, lse = result
    return out, lse, out.new_empty(0)
