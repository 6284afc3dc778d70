"""The dense and the ragged function with FlashAttention-3's positional signatures, for programs written for it.

Arguments mean what `flash_hopper.flash_attn_func` and `flash_attn_varlen_func` say; those that only FlashAttention-3 has:

qv: None only, anything else raises UnsupportedError.
return_attn_probs: return (out, softmax_lse) in place of out, as FlashAttention-3 does. softmax_lse: (batch, heads,
seqlen_q) or (heads, total_q) float32, natural logarithm.
"""

import torch

from flash_hopper import api
from flash_hopper.api import AttentionResult, MaxSeqlen, Window
from flash_hopper.problem.errors import UnsupportedError


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> AttentionResult:
    """Attention of q: (batch, seqlen_q, heads, head_dim), k: (batch, seqlen_k, heads_k, head_dim), v: (batch, seqlen_k,
    heads_k, head_dim_v). Returns and raises as the module says."""
    _refuse(qv)
    return api.flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: MaxSeqlen,
    max_seqlen_k: MaxSeqlen,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> AttentionResult:
    """Attention of packed sequences, q: (total_q, heads, head_dim), k: (total_k, heads_k, head_dim), v: (total_k, heads_k,
    head_dim_v), cu_seqlens_*: (batch + 1,) int32, seqused_*: (batch,) int32. Returns and raises as the module says."""
    _refuse(qv)
    return api.flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        num_splits=num_splits,
        pack_gqa=pack_gqa,
        deterministic=deterministic,
        sm_margin=sm_margin,
        return_lse=return_attn_probs,
    )


def _refuse(qv: torch.Tensor | None) -> None:
    if qv is not None:
        raise UnsupportedError("this release does not support qv: pass None")
