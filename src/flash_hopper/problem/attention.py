"""The canonical request: one checked, frozen description of an attention call.

`attention_problem` turns the arguments of a public function, described by `TensorSpec`s and `AttentionOptions`, into
an `AttentionProblem`, or raises before anything was allocated. It decides nothing about tiles, kernels or devices;
`plan` and `launch` do. Sizes follow FlashAttention: (batch, seqlen, heads, head_dim).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.tensor import TensorSpec

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 256, 8


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The keyword arguments of the public functions, as given. Defaults mean "not asked for"."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: Any = (None, None)
    attention_chunk: int = 0
    softcap: float = 0.0
    sinks: Any = None
    score_mod: Any = None
    mask_mod: Any = None
    aux_tensors: Any = None
    block_mask: Any = None
    q_descale: Any = None
    k_descale: Any = None
    v_descale: Any = None
    num_splits: int = 0
    pack_gqa: bool | None = None
    batch_invariant: bool = False
    deterministic: bool = False
    sm_margin: int = 0
    return_lse: bool = False


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One dense attention request in canonical form; every field was checked.

    `softmax_scale` multiplies q k^T; it is finite and may be zero or negative. `features` lists what the request needs
    beyond plain full attention with equal heads and head dims.
    """

    dtype: DType
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    causal: bool
    sm_margin: int
    features: frozenset[Feature]

    @property
    def qhead_per_kvhead(self) -> int:
        """Query heads that share one key head; 1 if there are no heads."""
        return self.heads // self.heads_k if self.heads_k else 1

    @property
    def has_no_output(self) -> bool:
        """True if out has no element, so that nothing is to be computed."""
        return 0 in (self.batch, self.seqlen_q, self.heads, self.head_dim_v)

    @property
    def has_no_keys(self) -> bool:
        """True if no row sees a key: out = 0 and lse = -inf everywhere."""
        return self.seqlen_k == 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward for the unmasked scores (bottom-right causal)."""
        if self.causal:
            # row i sees keys 0 .. i + seqlen_k - seqlen_q
            first = self.seqlen_k - self.seqlen_q + 1
            rows = self.seqlen_q + min(0, first - 1)  # rows that see any key
            scores = rows * (max(first, 1) + self.seqlen_k) // 2 if rows > 0 else 0
        else:
            scores = self.seqlen_q * self.seqlen_k
        return 2 * self.batch * self.heads * scores * (self.head_dim + self.head_dim_v)


def attention_problem(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    options: AttentionOptions,
    *,
    dtypes: Sequence[DType],
    out: TensorSpec | None = None,
) -> AttentionProblem:
    """Check a dense call and return its canonical form.

    q: (batch, seqlen_q, heads, head_dim); k: (batch, seqlen_k, heads_k, head_dim); v: (batch, seqlen_k, heads_k,
    head_dim_v); out, if given: (batch, seqlen_q, heads, head_dim_v). `dtypes` are the element types that the backend
    of this device computes. Raises ArgumentError, DTypeError or DeviceError, naming the argument.
    """
    tensors = [q, k, v] + ([out] if out is not None else [])
    _check_ranks(tensors)
    _check_devices(tensors)
    dtype = _common_dtype(tensors, dtypes)
    for t in tensors:
        _check_last_stride(t)
    batch, seqlen_q, heads, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    _check_shape(k, (batch, seqlen_k, heads_k, head_dim), "batch of q, seqlen and heads of v, head_dim of q")
    _check_shape(v, (batch, seqlen_k, heads_k, head_dim_v), "batch of q")
    if out is not None:
        _check_shape(out, (batch, seqlen_q, heads, head_dim_v), "batch, seqlen and heads of q, head_dim of v")
        _check_no_overlap(out)
    if heads % heads_k if heads_k else heads > 0:
        raise ArgumentError(
            f"k and v have {heads_k} heads and q has {heads}: the heads of q must be a multiple of those of k and v"
        )
    for name, size in (("q and k", head_dim), ("v", head_dim_v)):
        _check_head_dim(name, size)
    features = requested_features(options)
    if heads_k != heads:
        features.add(Feature.GQA)
    if head_dim_v != head_dim:
        features.add(Feature.HEAD_DIM_V)
    scale = _softmax_scale(options.softmax_scale, head_dim)
    if scale < 0:
        features.add(Feature.NEGATIVE_SCALE)
    if q.requires_grad or k.requires_grad or v.requires_grad:
        features.add(Feature.GRADIENT)
    return AttentionProblem(
        dtype, batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v, scale,
        bool(options.causal), options.sm_margin, frozenset(features),
    )  # fmt: skip


def requested_features(options: AttentionOptions) -> set[Feature]:
    """The features that keyword arguments ask for, after checking each argument's own range and type."""
    left, right = _window(options.window_size)
    _check_int("attention_chunk", options.attention_chunk, 0)
    _check_int("num_splits", options.num_splits, 0)
    _check_int("sm_margin", options.sm_margin, 0)
    for name in ("causal", "batch_invariant", "deterministic", "return_lse"):
        if not isinstance(getattr(options, name), bool):
            raise DTypeError(f"{name} must be a bool, got {type(getattr(options, name)).__name__}")
    if options.pack_gqa not in (None, True, False):
        raise DTypeError(f"pack_gqa must be None or a bool, got {options.pack_gqa!r}")
    if not _is_finite(options.softcap) or options.softcap < 0:
        raise ArgumentError(f"softcap must be a finite number >= 0 (0 turns it off), got {options.softcap!r}")
    asked = {
        Feature.CAUSAL: options.causal,
        Feature.LSE: options.return_lse,
        Feature.WINDOW: left is not None or right is not None,
        Feature.CHUNK: options.attention_chunk > 0,
        Feature.SOFTCAP: options.softcap > 0,
        Feature.SINKS: options.sinks is not None,
        Feature.SCORE_MOD: options.score_mod is not None,
        Feature.MASK_MOD: options.mask_mod is not None,
        Feature.AUX_TENSORS: options.aux_tensors is not None,
        Feature.BLOCK_MASK: options.block_mask is not None,
        Feature.DESCALE: any(d is not None for d in (options.q_descale, options.k_descale, options.v_descale)),
        Feature.SPLIT_KV: options.num_splits > 1,
        Feature.PACK_GQA: bool(options.pack_gqa),
        Feature.BATCH_INVARIANT: options.batch_invariant,
        Feature.DETERMINISTIC: options.deterministic,
        Feature.SM_MARGIN: options.sm_margin > 0,
    }
    return {feature for feature, wanted in asked.items() if wanted}


def _check_ranks(tensors: Sequence[TensorSpec]) -> None:
    for t in tensors:
        if t.rank != 4:
            raise ArgumentError(
                f"{t.name} must be (batch, seqlen, heads, head_dim), got {t.rank} dimensions: {t.shape}"
            )


def _check_devices(tensors: Sequence[TensorSpec]) -> None:
    if len({t.device for t in tensors}) > 1:
        raise DeviceError(
            "all tensors must be on one device, got " + ", ".join(f"{t.name}: {t.device}" for t in tensors)
        )


def _common_dtype(tensors: Sequence[TensorSpec], allowed: Sequence[DType]) -> DType:
    names = ", ".join(f"{t.name}: {t.dtype_name}" for t in tensors)
    if len({t.dtype_name for t in tensors}) > 1:
        raise DTypeError(f"all tensors must have one dtype, got {names}")
    dtype = tensors[0].dtype
    if dtype is None or dtype not in allowed:
        raise DTypeError(f"dtype must be one of {', '.join(map(str, allowed))} on {tensors[0].device}, got {names}")
    return dtype


def _check_last_stride(t: TensorSpec) -> None:
    if t.shape[-1] > 1 and t.strides[-1] != 1:
        raise ArgumentError(
            f"{t.name} must have stride 1 in its last dimension, got strides {t.strides}; call {t.name}.contiguous()"
        )


def _check_shape(t: TensorSpec, want: tuple[int, ...], why: str) -> None:
    if t.shape != want:
        raise ArgumentError(f"{t.name} must have shape {want} ({why}), got {t.shape}")


def _check_no_overlap(t: TensorSpec) -> None:
    if 0 not in t.shape and any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.strides, strict=True)):
        raise ArgumentError(f"{t.name} must not be expanded (a stride of 0), got strides {t.strides} for {t.shape}")


def _check_head_dim(name: str, size: int) -> None:
    if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM or size % HEAD_DIM_STEP:
        raise ArgumentError(
            f"head_dim of {name} must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {size}"
        )


def _check_int(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise DTypeError(f"{name} must be an int, got {type(value).__name__}")
    if value < low:
        raise ArgumentError(f"{name} must be at least {low}, got {value}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _softmax_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if not _is_finite(scale):
        raise ArgumentError(f"softmax_scale must be None or a finite number, got {scale!r}")
    return float(scale)


def _window(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ArgumentError(f"window_size must be a pair (left, right), got {window!r}")
    ends: list[int | None] = []
    for side, size in zip(("left", "right"), window, strict=True):
        if size is None:
            ends.append(None)
            continue
        _check_int(f"window_size {side}", size, -1)
        ends.append(None if size == -1 else int(size))
    return ends[0], ends[1]
