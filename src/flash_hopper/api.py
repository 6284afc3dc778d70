"""The public functions: signatures and documentation, nothing computed.

Tensors are (batch, seqlen, heads, head_dim) with stride 1 in the last dimension, names as FlashAttention users know them.
Arguments after `softmax_scale` are keyword-only. A function returns `out`, or `(out, lse)` with `return_lse=True`; lse is
float32, (batch, heads, seqlen_q), natural logarithm.

What a release does not support yet is in the signatures all the same and refused by name (`UnsupportedError`), before
anything is allocated. CUDA tensors need a GPU of compute capability 9.0; CPU tensors use the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_hopper.autograd import differentiable_attention
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.errors import ArgumentError, UnsupportedError
from flash_hopper.problem.features import Feature

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = tuple[int | None, int | None]


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    aux_tensors: Sequence[torch.Tensor] | None = None,
    block_mask: Any = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    batch_invariant: bool = False,
    deterministic: bool = False,
    sm_margin: int = 0,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> AttentionResult:
    """softmax(softmax_scale * q k^T) v for every batch entry and head.

    q: (batch, seqlen_q, heads, head_dim), bf16 or fp16 (on the CPU also float32 and float64). k: (batch, seqlen_k,
    heads_k, head_dim); v: (batch, seqlen_k, heads_k, head_dim_v); heads is a multiple of heads_k (grouped queries). Head
    dims are multiples of 8 from 8 to 256. Any strides with last stride 1; a tensor whose address or strides are not
    multiples of 16 bytes is copied once.

    softmax_scale: finite, may be zero or negative; default head_dim ** -0.5. causal: query i sees keys 0 .. i +
    seqlen_k - seqlen_q (aligned bottom-right). A query that sees no key gives out = 0 and lse = -inf. sm_margin: leave
    that many SMs to other work. out: where to write, (batch, seqlen_q, heads, head_dim_v); not with inputs that require
    grad. deterministic: gradients too are the same bits every time, as out and lse always are.

    Differentiable once, through out and lse, in those of q, k and v that require grad. Under torch.autocast float32
    tensors are cast to its dtype. torch.compile, torch.export and dispatch modes meet the call as the operator
    `flash_hopper::forward`, whose gradient is `flash_hopper::backward`.

    Returns out, or (out, lse) with return_lse. Raises DTypeError, ArgumentError, DeviceError, UnsupportedError or
    MissingDependencyError before anything is allocated. Source: FlashAttention-3, sections 3 and 4 of the specification.
    """
    options = (
        softmax_scale, causal, window_size, attention_chunk, softcap, sinks, score_mod, mask_mod, aux_tensors,
        block_mask, q_descale, k_descale, v_descale, num_splits, pack_gqa, batch_invariant, deterministic, sm_margin,
        return_lse,
    )  # fmt: skip
    result, lse = differentiable_attention(q, k, v, out, options)
    return (result, lse) if lse is not None else result


def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, **options: Any) -> AttentionResult:
    """`flash_attn_func` for qkv: (batch, seqlen, 3, heads, head_dim). No copy is made. Options as there."""
    _check_packed("qkv", qkv, 3)
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, softmax_scale, **options)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, softmax_scale: float | None = None, **options: Any
) -> AttentionResult:
    """`flash_attn_func` for kv: (batch, seqlen_k, 2, heads_k, head_dim). No copy is made. Options as there."""
    _check_packed("kv", kv, 2)
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, softmax_scale, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    **options: Any,
) -> AttentionResult:
    """Attention over ragged batches, q: (total_q, heads, head_dim). Not supported yet: raises UnsupportedError."""
    raise _unsupported("flash_attn_varlen_func", Feature.VARLEN)


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    rotary_seqlens: torch.Tensor | None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    **options: Any,
) -> AttentionResult:
    """Decoding over a key-value cache. Not supported yet: raises UnsupportedError."""
    raise _unsupported("flash_attn_with_kvcache", Feature.KV_CACHE)


def get_scheduler_metadata(*args: Any, **options: Any) -> torch.Tensor:
    """Work division of a cache call, made once for many layers. Not supported yet: raises UnsupportedError."""
    raise _unsupported("get_scheduler_metadata", Feature.KV_CACHE)


def flash_attn_combine(out_partial: torch.Tensor, lse_partial: torch.Tensor, **options: Any) -> AttentionResult:
    """Merge partial results over splits of the keys. Not supported yet: raises UnsupportedError."""
    raise _unsupported("flash_attn_combine", Feature.COMBINE)


def quantize_fp8(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """x in e4m3 with block scales. Not supported yet: raises UnsupportedError."""
    raise _unsupported("quantize_fp8", Feature.FP8)


def hadamard_transform(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """The randomised Hadamard transform of the last dimension. Not supported yet: raises UnsupportedError."""
    raise _unsupported("hadamard_transform", Feature.HADAMARD)


def _check_packed(name: str, tensor: torch.Tensor, parts: int) -> None:
    spec = describe(name, tensor)
    if spec.rank != 5 or spec.shape[2] != parts:
        raise ArgumentError(f"{name} must be (batch, seqlen, {parts}, heads, head_dim), got {spec.shape}")


def _unsupported(function: str, feature: Feature) -> UnsupportedError:
    return UnsupportedError(f"{function}: this release does not support {feature}")
