"""Attention in e4m3: quantisation, the Hadamard transform in front of it, and attention of 16-bit tensors that does all of it.

    out = flash_hopper.flash_attn_fp8_func(q, k, v, causal=True)

Or by hand, as for keys that are kept in e4m3:

    q8, q_descale = flash_hopper.quantize_fp8(q, hadamard=True)
    k8, k_descale = flash_hopper.quantize_fp8(k, hadamard=True)
    v8, v_descale = flash_hopper.quantize_fp8(v, values=True)
    out = flash_hopper.flash_attn_func(q8, k8, v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)

Signatures and documentation, nothing computed; `launch/quantize.py` does that. Source: chapter 6 of the specification.
"""

from typing import Any

import torch
import torch.nn.functional as F

from flash_hopper.api import AttentionResult, MaxSeqlen, Window, flash_attn_func, flash_attn_varlen_func
from flash_hopper.launch import quantize as launch
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.dtypes import KERNEL_DTYPES
from flash_hopper.problem.errors import ArgumentError, DTypeError, UnsupportedError
from flash_hopper.problem.fp8 import Fp8Values
from flash_hopper.problem.quantize import HEAD_DIM_STEP

SMALLEST_HEAD_DIM = 64  # of the e4m3 kernels


def quantize_fp8(
    x: torch.Tensor,
    granularity: str = "block",
    *,
    cu_seqlens: torch.Tensor | None = None,
    seqused: torch.Tensor | None = None,
    qhead_per_kvhead: int = 1,
    hadamard: bool = False,
    signs: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    seqlen_offsets: torch.Tensor | int = 0,
    values: bool = False,
) -> tuple[Any, torch.Tensor]:
    """(codes, descale) with x = codes * descale up to rounding; the largest magnitude of a group becomes 448.

    x: (batch, seqlen, heads, head_dim), or (total, heads, head_dim) with cu_seqlens (batch + 1,) int32; bf16, fp16 or float32,
    head_dim a multiple of 16 from 16 to 256. seqused: (batch,) int32, rows of each sequence that count; those behind may hold
    anything and get codes 0. codes: float8_e4m3fn like x.

    granularity, and the shape of descale (float32): "tensor" (1,); "head" (batch, heads / qhead_per_kvhead), the scale of the
    qhead_per_kvhead query heads that share a key head; "block" (batch, heads, ceil(seqlen / 128)), a scale for each 128 rows of
    a head, or, with cu_seqlens, (heads, total // 128 + batch + 1), where sequence b has the columns from cu_seqlens[b] // 128 + b
    on. A group of zeros gets scale 1. Finite values give finite codes; NaN gives NaN and does not count for the scale.

    hadamard: transform each row as `hadamard_transform` does, with `signs`, (head_dim,) float32; by default those of
    `hadamard_signs(head_dim)`. If q and k are both transformed with the same signs, q k^T stays what it is. rotary_cos, rotary_sin:
    (positions, rotary_dim / 2), of the dtype of x or float32: rotary embedding before that, of neighbouring elements
    (rotary_interleaved) or of the two halves of the first rotary_dim elements; row i of a sequence is at position i +
    seqlen_offsets, an int or (batch,) int32.

    values: for v; codes are an `Fp8Values`, transposed as the kernel reads them: (batch, heads, head_dim, seqlen padded to 128).

    Raises ArgumentError, DTypeError, DeviceError or UnsupportedError (x requires grad). Source: sections 6.3 and 6.4 of the
    specification.
    """
    return launch.quantize(
        x, granularity, cu_seqlens, seqused, qhead_per_kvhead, hadamard, signs, rotary_cos, rotary_sin, rotary_interleaved,
        seqlen_offsets, values,
    )  # fmt: skip


def hadamard_transform(x: torch.Tensor, signs: torch.Tensor | None = None, scale: float | None = None) -> torch.Tensor:
    """x D H * scale along the last dimension, with D = diag(signs) and H[i][j] = (-1)^popcount(i & j).

    x: (.., head_dim), bf16, fp16 or float32, head_dim a multiple of 16 from 16 to 256. H is block-diagonal: n = the largest power
    of two that divides head_dim neighbours are transformed together (n = head_dim for 64, 128 and 256, 32 for 96). signs:
    (head_dim,) float32 of +1 and -1, see `hadamard_signs`; None for ones. scale: default n ** -0.5, which makes the transform
    orthogonal. Sums are float32.

    Returns a tensor like x, contiguous. Raises as `quantize_fp8`. Source: section 6.4 of the specification.
    """
    shape = describe("x", x).shape
    if len(shape) == 0:
        raise ArgumentError("x must have a last dimension, got a scalar")
    rows = x.reshape(1, -1, 1, shape[-1]) if 0 not in shape else x.new_empty((1, 0, 1, shape[-1]))
    return launch.transform(rows, signs, scale).view(shape)


def hadamard_signs(head_dim: int, seed: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """(head_dim,) float32 of +1 and -1 for `hadamard_transform` and `quantize_fp8`, the same for a seed on every device."""
    return launch.hadamard_signs(head_dim, seed, torch.device(device))


def flash_attn_fp8_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    *,
    causal: bool = False,
    window_size: Window = (None, None),
    attention_chunk: int = 0,
    hadamard: bool = True,
    signs: torch.Tensor | None = None,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> AttentionResult:
    """`flash_attn_func` of 16-bit q, k and v, computed in e4m3: a scale for each 128 rows of a head, and, with `hadamard`, q and k
    transformed so that outliers are spread over a row.

    q: (batch, seqlen_q, heads, head_dim), bf16 or fp16; k, v likewise with seqlen_k and heads_k. Options as in
    `flash_attn_func`; signs as in `quantize_fp8`. Head dims that are no multiple of 16, or below 64, are padded with zeros,
    which copies q, k and v.

    Returns out in the dtype of q, or (out, lse) with return_lse. Not differentiable: UnsupportedError for inputs that require
    grad. Raises as `flash_attn_func` and `quantize_fp8`. Source: chapter 6 of the specification.
    """
    _check_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q8, q_descale = quantize_fp8(_padded(q), hadamard=hadamard, signs=signs)
    k8, k_descale = quantize_fp8(_padded(k), hadamard=hadamard, signs=signs)
    v8, v_descale = quantize_fp8(_padded(v), values=True)
    result = flash_attn_func(
        q8, k8, v8, scale, causal=causal, window_size=window_size, attention_chunk=attention_chunk, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, sm_margin=sm_margin, out=_output(q, v, v8), return_lse=return_lse,
    )  # fmt: skip
    return _without_padding(result, v.shape[-1])


def flash_attn_varlen_fp8_func(
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
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (None, None),
    attention_chunk: int = 0,
    hadamard: bool = True,
    signs: torch.Tensor | None = None,
    sm_margin: int = 0,
    return_lse: bool = False,
) -> AttentionResult:
    """`flash_attn_fp8_func` for a ragged batch: q, k, v, lengths and hints as in `flash_attn_varlen_func`, the rest as there.

    Each sequence has its own scales. Returns and raises as `flash_attn_varlen_func` and `flash_attn_fp8_func`.
    """
    _check_inputs(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    of_q: dict[str, Any] = {"cu_seqlens": cu_seqlens_q, "seqused": seqused_q}
    of_k: dict[str, Any] = {"cu_seqlens": cu_seqlens_k, "seqused": seqused_k}
    q8, q_descale = quantize_fp8(_padded(q), hadamard=hadamard, signs=signs, **of_q)
    k8, k_descale = quantize_fp8(_padded(k), hadamard=hadamard, signs=signs, **of_k)
    v8, v_descale = quantize_fp8(_padded(v), values=True, **of_k)
    result = flash_attn_varlen_func(
        q8, k8, v8, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
        softmax_scale=scale, causal=causal, window_size=window_size, attention_chunk=attention_chunk, q_descale=q_descale,
        k_descale=k_descale, v_descale=v_descale, sm_margin=sm_margin, out=_output(q, v, v8), return_lse=return_lse,
    )  # fmt: skip
    return _without_padding(result, v.shape[-1])


def _check_inputs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """16-bit tensors of one dtype that need no gradients."""
    given = [describe(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v))]
    names = ", ".join(f"{t.name}: {t.dtype_name}" for t in given)
    if given[0].dtype not in KERNEL_DTYPES or any(t.dtype is not given[0].dtype for t in given):
        raise DTypeError(f"q, k and v must all be bf16 or all fp16, got {names}")
    if wanting := [t.name for t in given if t.requires_grad]:
        raise UnsupportedError(
            f"{' and '.join(wanting)} require grad: attention in e4m3 has no backward; call under torch.no_grad(), or use "
            "flash_attn_func"
        )


def _padded(x: torch.Tensor) -> torch.Tensor:
    """x with a head dim that the e4m3 kernels take: itself, or a copy with zeros behind."""
    head_dim = x.shape[-1]
    wanted = max(-(-head_dim // HEAD_DIM_STEP) * HEAD_DIM_STEP, SMALLEST_HEAD_DIM)
    return x if wanted == head_dim else F.pad(x, (0, wanted - head_dim))


def _output(q: torch.Tensor, v: torch.Tensor, v8: Fp8Values) -> torch.Tensor | None:
    """Where to write what is not bf16."""
    if q.dtype == torch.bfloat16:
        return None
    return q.new_empty((*q.shape[:-1], v8.codes.shape[-2]))


def _without_padding(result: AttentionResult, head_dim_v: int) -> AttentionResult:
    """The result with the columns that v had; a copy where some are left out."""

    def cut(out: torch.Tensor) -> torch.Tensor:
        return out if out.shape[-1] == head_dim_v else out[..., :head_dim_v].contiguous()

    return (cut(result[0]), result[1]) if isinstance(result, tuple) else cut(result)
