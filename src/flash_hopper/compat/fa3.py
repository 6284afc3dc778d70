"""The dense function with FlashAttention-3's positional signature, for programs written for it.

Arguments mean what `flash_hopper.flash_attn_func` says; those that only FlashAttention-3 has:

qv: None only, anything else raises UnsupportedError.
return_attn_probs: return (out, softmax_lse) in place of out, as FlashAttention-3 does. softmax_lse: (batch, heads,
seqlen_q) float32, natural logarithm.
"""

import torch

from flash_hopper import api
from flash_hopper.api import AttentionResult, Window
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
    if qv is not None:
        raise UnsupportedError("this release does not support qv: pass None")
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
