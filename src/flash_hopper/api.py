"""The public functions: signatures and documentation, nothing computed.

Tensors are (batch, seqlen, heads, head_dim), or (total rows, heads, head_dim) for packed sequences, with stride 1 in the last
dimension, names as FlashAttention users know them. Arguments after `softmax_scale` are keyword-only. A function returns
`out`, or `(out, lse)` with `return_lse=True`; lse is float32, (batch, heads, seqlen_q) or (heads, total_q), natural logarithm.

What a release does not support yet is in the signatures all the same and refused by name (`UnsupportedError`), before
anything is allocated. CUDA tensors need a GPU of compute capability 9.0; CPU tensors use the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from flash_hopper.autograd import differentiable_attention
from flash_hopper.launch.explicit import explicit_gradients
from flash_hopper.launch.sequences import sequences_of
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.errors import ArgumentError, UnsupportedError
from flash_hopper.problem.features import Feature

AttentionResult = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Window = tuple[int | None, int | None]
MaxSeqlen = int | torch.Tensor | None
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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
    fast_accum: bool = False,
) -> AttentionResult:
    """softmax(softmax_scale * q k^T) v for every batch entry and head.

    q: (batch, seqlen_q, heads, head_dim), bf16 or fp16 (on the CPU also float32 and float64). k: (batch, seqlen_k,
    heads_k, head_dim); v: (batch, seqlen_k, heads_k, head_dim_v); heads is a multiple of heads_k (grouped queries). Head
    dims are multiples of 8 from 8 to 256. Any strides with last stride 1; a tensor whose address or strides are not
    multiples of 16 bytes is copied once.

    softmax_scale: finite, may be zero or negative; default head_dim ** -0.5. With p = i + seqlen_k - seqlen_q (aligned
    bottom-right) query i sees keys p - left .. p + right, where window_size is (left, right), None and -1 are unbounded, and
    causal sets right to 0; with attention_chunk > 0 only those keys that lie in the chunk of so many keys that holds p. A
    query that sees no key gives out = 0 and lse = -inf. sm_margin: leave that many SMs to other work. out: where to write,
    (batch, seqlen_q, heads, head_dim_v); not with inputs that require grad. deterministic: gradients too are the same bits
    every time, as out and lse always are.

    q, k and v may be jagged tensors (torch.nested, layout torch.jagged) of shape (batch, j, heads, head_dim), q and k with
    different offsets; out is then jagged like q and lse is (heads, total_q).

    e4m3: with q, k and v in float8_e4m3fn the call is attention of codes times descales. v is given like k, or as `Fp8Values`,
    which `quantize_fp8(v, values=True)` makes: the form that is multiplied, in which a v in rows is first brought, by another
    launch, into memory of the call. Both give the same bits; `Fp8Values` save the transposition, of a v that is used again
    each time. q_descale, k_descale, v_descale: float32 on q's device, finite and above 0: None (1), one element
    (shape () or (1,)), (batch, heads_k) for each batch entry and key head, of q too, or a factor for each 128 rows, (batch, heads of
    the tensor, ceil(seqlen / 128)). Values are not read back, and not checked. Head dims are multiples of 16; out is
    bfloat16, or float16 if the given one is. Such a call has no gradient and is no operator. fast_accum allows the tensor core to
    sum up all of P v, with 14 bits: faster at head dim 256, and out is too small by up to 1.6 % for 1k keys with values of one sign, 25 %
    for 16k; not with descales of 128 rows. Descales, and fast_accum, of tensors that are not e4m3 are refused. Source: chapter 6 of the specification.

    Differentiable once, through out and lse, in those of q, k and v that require grad. Under torch.autocast float32
    tensors are cast to its dtype. torch.compile, torch.export and dispatch modes meet the call as the operator
    `flash_hopper::forward`, whose gradient is `flash_hopper::backward`.

    Returns out, or (out, lse) with return_lse. Raises DTypeError, ArgumentError, DeviceError, UnsupportedError or
    MissingDependencyError before anything is allocated. Source: FlashAttention-3, sections 3 and 4 of the specification.
    """
    options = (
        softmax_scale, causal, window_size, attention_chunk, softcap, sinks, score_mod, mask_mod, aux_tensors,
        block_mask, q_descale, k_descale, v_descale, num_splits, pack_gqa, batch_invariant, deterministic, sm_margin,
        fast_accum, return_lse,
    )  # fmt: skip
    result, lse = differentiable_attention(q, k, v, out, options)
    return (result, lse) if lse is not None else result


def flash_attn_qkvpacked_func(qkv: torch.Tensor, softmax_scale: float | None = None, **options: Any) -> AttentionResult:
    """`flash_attn_func` for qkv: (batch, seqlen, 3, heads, head_dim). No copy is made. Options as there."""
    _check_packed("qkv", qkv, 3, "batch, seqlen")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, softmax_scale, **options)


def flash_attn_kvpacked_func(
    q: torch.Tensor, kv: torch.Tensor, softmax_scale: float | None = None, **options: Any
) -> AttentionResult:
    """`flash_attn_func` for kv: (batch, seqlen_k, 2, heads_k, head_dim). No copy is made. Options as there."""
    _check_packed("kv", kv, 2, "batch, seqlen")
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, softmax_scale, **options)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: MaxSeqlen,
    max_seqlen_k: MaxSeqlen,
    *,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
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
    fast_accum: bool = False,
) -> AttentionResult:
    """`flash_attn_func` for every sequence of a ragged batch.

    q: (total_q, heads, head_dim), sequence b from row cu_seqlens_q[b] on; without cu_seqlens_q a padded batch (batch,
    seqlen_q, heads, head_dim). k and v likewise, by cu_seqlens_k. cu_seqlens_*: (batch + 1,) int32 from 0 upwards, not
    decreasing, within the rows. seqused_*: (batch,) int32, how many rows of each sequence count, at most those it has;
    default all of them. At least one of the four is given; they are contiguous, on q's device, and a GPU's are never read
    by the host. Empty sequences may be anywhere.

    Each sequence is aligned by its own used lengths. Rows that belong to none (behind seqused, behind the last sequence) may
    hold anything: they are not read, and have out = 0, lse = -inf and zero gradients.

    max_seqlen_*: an int, a numpy integer, a tensor of one integer, or None; a hint for the choice of tiles, which
    need not be right. A tensor on a GPU is not read. page_table: not supported yet. Other options as in
    `flash_attn_func`; out like q with head_dim_v.

    e4m3 as in `flash_attn_func`, v in rows or as `Fp8Values`, batch standing for sequences. Descales of 128 rows of packed tensors: (heads of the tensor, total // 128 +
    sequences + 1), block j of sequence b in column cu_seqlens[b] // 128 + b + j; other columns are not read.

    Returns out like q with head_dim_v, or (out, lse) with lse (heads, total_q), or (batch, heads, seqlen_q) for padded q;
    differentiable in q, k and v. Raises as `flash_attn_func`, and on the CPU ArgumentError for lengths that do not fit.
    Source: section 9.3 of the specification.
    """
    if page_table is not None:
        raise _unsupported("flash_attn_varlen_func", Feature.PAGED_KV)
    options = (
        softmax_scale, causal, window_size, attention_chunk, softcap, sinks, score_mod, mask_mod, aux_tensors,
        block_mask, q_descale, k_descale, v_descale, num_splits, pack_gqa, batch_invariant, deterministic, sm_margin,
        fast_accum, return_lse,
    )  # fmt: skip
    sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    result, lse = differentiable_attention(q, k, v, out, options, sequences)
    return (result, lse) if lse is not None else result


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: MaxSeqlen, **options: Any
) -> AttentionResult:
    """`flash_attn_varlen_func` for qkv: (total, 3, heads, head_dim), cu_seqlens: (batch + 1,) int32.

    No copy is made. Options as there, softmax_scale among them.
    """
    _check_packed("qkv", qkv, 3, "total")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: MaxSeqlen,
    max_seqlen_k: MaxSeqlen,
    **options: Any,
) -> AttentionResult:
    """`flash_attn_varlen_func` for q: (total_q, heads, head_dim), kv: (total_k, 2, heads_k, head_dim).

    No copy is made. Options as there, softmax_scale among them.
    """
    _check_packed("kv", kv, 2, "total")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def flash_attn_backward_func(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    attention_chunk: int = 0,
    deterministic: bool = False,
    sm_margin: int = 0,
    dlse: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    max_seqlen_q: MaxSeqlen = None,
    max_seqlen_k: MaxSeqlen = None,
    grad_out: Gradients | None = None,
) -> Gradients:
    """Gradients of attention from what the forward took and returned: with P = exp(softmax_scale q k^T - lse),

        dv = P^T dout,  dS = P o (dout v^T - rowsum(dout o out) + dlse),  dq = softmax_scale dS k,  dk = softmax_scale dS^T q

    q, k, v and options as in `flash_attn_func`, or in `flash_attn_varlen_func` if one of the length tensors is given. out,
    lse: as the forward returned them; dout like out and dlse like lse, any strides. If k and v are a part of the keys that
    out and lse are about, as in ring attention, the results are this part's contributions: dk and dv of the part, and a
    summand of dq.

    grad_out: (dq, dk, dv), float32 tensors in the shapes of q, k and v with last stride 1 that share no memory, to which the
    gradients are added in float32, and which are returned; None in place of one: it is not returned. Only one call at a time
    may add to a tensor. Without grad_out fresh tensors in the dtype of q.

    Returns (dq, dk, dv), no part of a graph whatever requires grad. Raises as the forward; ArgumentError, DTypeError or
    DeviceError for tensors that do not fit; UnsupportedError with grad_out where torch must see an operator
    (torch.compile, dispatch modes). Source: chapter 7 of the specification.
    """
    options = (
        softmax_scale, causal, window_size, attention_chunk, 0.0, None, None, None, None, None, None, None, None, 0, None,
        False, deterministic, sm_margin, False, False,
    )  # fmt: skip
    sequences = None
    if not (cu_seqlens_q is cu_seqlens_k is seqused_q is seqused_k is None):
        sequences = sequences_of(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k)
    return explicit_gradients(q, k, v, out, lse, dout, dlse, options, sequences, grad_out)


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


def _check_packed(name: str, tensor: torch.Tensor, parts: int, rows: str) -> None:
    spec = describe(name, tensor)
    layout = f"({rows}, {parts}, heads, head_dim)"
    if tensor.is_nested:
        raise ArgumentError(f"{name} must be {layout} and not nested: flash_attn_func takes jagged q, k and v")
    if spec.rank != layout.count(",") + 1 or spec.shape[-3] != parts:
        raise ArgumentError(f"{name} must be {layout}, got {spec.shape}")


def _unsupported(function: str, feature: Feature) -> UnsupportedError:
    return UnsupportedError(f"{function}: this release does not support {feature}")
