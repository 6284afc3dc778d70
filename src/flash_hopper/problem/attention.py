"""The canonical request: one checked, frozen description of an attention call.

`attention_problem` and `varlen_problem` turn the arguments of a public function, described by `TensorSpec`s and
`AttentionOptions`, into an `AttentionProblem`, or raise before anything was allocated. They decide nothing about tiles,
kernels or devices; `plan` and `launch` do. Sizes follow FlashAttention: (batch, seqlen, heads, head_dim).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from flash_hopper.problem.checks import (
    check_devices,
    check_heads,
    check_last_stride,
    check_no_overlap,
    check_rank,
    check_shape,
    checked_int,
    common_dtype,
    is_finite,
)
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DTypeError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged, SideLengths, check_layout, checked_ragged
from flash_hopper.problem.tensor import TensorSpec

MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_STEP = 8, 256, 8
LONGEST = 2**31 - 1  # no sequence has more rows: offsets and lengths are int32


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
    fast_accum: bool = False
    return_lse: bool = False


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One attention request in canonical form; every field was checked.

    `softmax_scale` multiplies q k^T; it is finite and may be zero or negative. `mask` is what was asked, not simplified
    for the lengths. `features` lists what the request needs beyond plain full attention with equal heads and head dims.
    `ragged` is None for a dense batch. For a ragged one `batch` is the number of sequences, and `seqlen_q`, `seqlen_k`
    bound the length of each: the padded size, or all rows if packed.
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
    mask: Mask
    sm_margin: int
    features: frozenset[Feature]
    ragged: Ragged | None = None

    @property
    def causal(self) -> bool:
        """True if the mask is the causal one and nothing more."""
        return self.mask.kind == "causal"

    @property
    def qhead_per_kvhead(self) -> int:
        """Query heads that share one key head; 1 if there are no heads."""
        return self.heads // self.heads_k if self.heads_k else 1

    @property
    def rows_q(self) -> int:
        """Rows of out in all: batch * seqlen_q, or the total of a packed q, used or not."""
        return self.batch * self.seqlen_q if self.ragged is None else self.ragged.rows_q

    @property
    def rows_k(self) -> int:
        """Rows of k and v in all: batch * seqlen_k, or the total of packed ones, used or not."""
        return self.batch * self.seqlen_k if self.ragged is None else self.ragged.rows_k

    @property
    def has_no_output(self) -> bool:
        """True if out has no element, so that nothing is to be computed."""
        return 0 in (self.rows_q, self.heads, self.head_dim_v)

    @property
    def has_no_keys(self) -> bool:
        """True if surely no row sees a key: out = 0 and lse = -inf everywhere, and all gradients are 0."""
        return 0 in (self.batch, self.seqlen_k)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward for the visible scores of a dense batch."""
        assert self.ragged is None, "the lengths of a ragged batch are not known here; call flops_of(lengths)"
        return self.batch * self.flops_of([(self.seqlen_q, self.seqlen_k)])

    def flops_of(self, lengths: Iterable[tuple[int, int]]) -> int:
        """Those of sequences with these used lengths (queries, keys)."""
        scores = sum(self.mask.visible_scores(seqlen_q, seqlen_k) for seqlen_q, seqlen_k in lengths)
        return 2 * self.heads * scores * (self.head_dim + self.head_dim_v)


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
    tensors = _present(q, k, v, out)
    for t in tensors:
        check_rank(t, "(batch, seqlen, heads, head_dim)")
    check_devices(tensors)
    batch, seqlen_q = q.shape[:2]
    seqlen_k, heads_k, head_dim_v = v.shape[1:]
    dtype = _checked_elements(tensors, dtypes)
    check_shape(k, (batch, seqlen_k, heads_k, q.shape[3]), "batch of q, seqlen and heads of v, head_dim of q")
    check_shape(v, (batch, seqlen_k, heads_k, head_dim_v), "batch of q")
    return _problem(_present(q, v, out), options, dtype, (batch, seqlen_q, seqlen_k), None, _wants_gradient(q, k, v))


def varlen_problem(
    q: TensorSpec,
    k: TensorSpec,
    v: TensorSpec,
    options: AttentionOptions,
    *,
    cu_seqlens_q: TensorSpec | None,
    cu_seqlens_k: TensorSpec | None,
    seqused_q: TensorSpec | None,
    seqused_k: TensorSpec | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    dtypes: Sequence[DType],
    out: TensorSpec | None = None,
) -> AttentionProblem:
    """Check a ragged call and return its canonical form; at least one of the four length tensors is given.

    q: (total_q, heads, head_dim) with cu_seqlens_q, else (batch, seqlen_q, heads, head_dim); k, v likewise with
    cu_seqlens_k; out, if given, like q with head_dim_v. cu_seqlens_*: (batch + 1,) int32; seqused_*: (batch,) int32;
    all on the device of q and contiguous. max_seqlen_*: None or an int >= 0, no tensor on a GPU. The values in tensors
    are not looked at: cu_seqlens must start at 0, not decrease and end within the rows, and seqused must fit the space
    of its sequence. Raises ArgumentError, DTypeError or DeviceError, naming the argument.
    """
    lengths_q = SideLengths("q", cu_seqlens_q, seqused_q, max_seqlen_q)
    lengths_k = SideLengths("k", cu_seqlens_k, seqused_k, max_seqlen_k)
    tensors = _present(q, k, v, out)
    for t in tensors:
        check_layout(t, lengths_k if t is k or t is v else lengths_q)
    check_devices(tensors + lengths_q.tensors + lengths_k.tensors)
    dtype = _checked_elements(tensors, dtypes)
    ragged, batch = checked_ragged(q, k, lengths_q, lengths_k)
    check_shape(k, (*v.shape[:-1], q.shape[-1]), "rows and heads of v, head_dim of q")
    seqlen_q, seqlen_k = (t.shape[-3] for t in (q, k))
    features = {Feature.VARLEN} if ragged.is_packed else set()
    if ragged.has_seqused:
        features.add(Feature.SEQUSED)
    features |= _wants_gradient(q, k, v)
    return _problem(_present(q, v, out), options, dtype, (batch, seqlen_q, seqlen_k), ragged, features)


def requested_mask(options: AttentionOptions) -> Mask:
    """The mask that `causal`, `window_size` and `attention_chunk` ask for together; causal sets the right end to 0.

    Sizes that reach past any sequence are cut to `LONGEST`. Raises ArgumentError or DTypeError for a window or chunk
    that is none.
    """
    left, right = _window(options.window_size)
    chunk = checked_int("attention_chunk", options.attention_chunk, 0)
    return Mask(left, 0 if options.causal else right, min(chunk, LONGEST))


def requested_features(options: AttentionOptions) -> set[Feature]:
    """The features that keyword arguments ask for, after checking each argument's own range and type."""
    for name in ("causal", "batch_invariant", "deterministic", "return_lse", "fast_accum"):
        if not isinstance(getattr(options, name), bool):
            raise DTypeError(f"{name} must be a bool, got {type(getattr(options, name)).__name__}")
    mask = requested_mask(options)
    if options.pack_gqa not in (None, True, False):
        raise DTypeError(f"pack_gqa must be None or a bool, got {options.pack_gqa!r}")
    if not is_finite(options.softcap) or options.softcap < 0:
        raise ArgumentError(f"softcap must be a finite number >= 0 (0 turns it off), got {options.softcap!r}")
    asked = {
        Feature.CAUSAL: mask.right == 0,
        Feature.LSE: options.return_lse,
        Feature.WINDOW: mask.left is not None or mask.right not in (None, 0),
        Feature.CHUNK: mask.chunk > 0,
        Feature.SOFTCAP: options.softcap > 0,
        Feature.SINKS: options.sinks is not None,
        Feature.SCORE_MOD: options.score_mod is not None,
        Feature.MASK_MOD: options.mask_mod is not None,
        Feature.AUX_TENSORS: options.aux_tensors is not None,
        Feature.BLOCK_MASK: options.block_mask is not None,
        Feature.DESCALE: any(d is not None for d in (options.q_descale, options.k_descale, options.v_descale)),
        Feature.SPLIT_KV: checked_int("num_splits", options.num_splits, 0) > 1,
        Feature.PACK_GQA: bool(options.pack_gqa),
        Feature.BATCH_INVARIANT: options.batch_invariant,
        Feature.DETERMINISTIC: options.deterministic,
        Feature.SM_MARGIN: checked_int("sm_margin", options.sm_margin, 0) > 0,
        Feature.FAST_ACCUM: options.fast_accum,
    }
    return {feature for feature, wanted in asked.items() if wanted}


def _present(*tensors: TensorSpec | None) -> list[TensorSpec]:
    return [t for t in tensors if t is not None]


def _checked_elements(tensors: Sequence[TensorSpec], dtypes: Sequence[DType]) -> DType:
    dtype = common_dtype(tensors, dtypes)
    for t in tensors:
        check_last_stride(t)
    return dtype


def _wants_gradient(*tensors: TensorSpec) -> set[Feature]:
    return {Feature.GRADIENT} if any(t.requires_grad for t in tensors) else set()


def _problem(
    tensors: Sequence[TensorSpec],
    options: AttentionOptions,
    dtype: DType,
    sizes: tuple[int, int, int],
    ragged: Ragged | None,
    features: set[Feature],
) -> AttentionProblem:
    """The problem of q, v and perhaps out, whose rows and dtype were checked; sizes: batch, seqlen_q, seqlen_k."""
    q, v, *outs = tensors
    *rows_q, heads, head_dim = q.shape
    heads_k, head_dim_v = v.shape[-2:]
    for out in outs:
        check_shape(out, (*rows_q, heads, head_dim_v), "batch, seqlen and heads of q, head_dim of v")
        check_no_overlap(out)
    check_heads(heads, heads_k)
    _check_head_dim("q and k", head_dim)
    _check_head_dim("v", head_dim_v)
    features = features | requested_features(options)
    scale = _softmax_scale(options.softmax_scale, head_dim)
    extra = {
        Feature.GQA: heads_k != heads,
        Feature.HEAD_DIM_V: head_dim_v != head_dim,
        Feature.NEGATIVE_SCALE: scale < 0,
    }
    features |= {feature for feature, wanted in extra.items() if wanted}
    return AttentionProblem(
        dtype, *sizes, heads, heads_k, head_dim, head_dim_v, scale,
        requested_mask(options), int(options.sm_margin), frozenset(features), ragged,
    )  # fmt: skip


def _check_head_dim(name: str, size: int) -> None:
    if not MIN_HEAD_DIM <= size <= MAX_HEAD_DIM or size % HEAD_DIM_STEP:
        raise ArgumentError(
            f"head_dim of {name} must be a multiple of {HEAD_DIM_STEP} from {MIN_HEAD_DIM} to {MAX_HEAD_DIM}, got {size}"
        )


def _softmax_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim**-0.5)
    if not is_finite(scale):
        raise ArgumentError(f"softmax_scale must be None or a finite number, got {scale!r}")
    return float(scale)


def _window(window: Any) -> tuple[int | None, int | None]:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ArgumentError(f"window_size must be a pair (left, right), got {window!r}")
    left, right = (
        None if size is None else checked_int(f"window_size {side}", size, -1)
        for side, size in zip(("left", "right"), window, strict=True)
    )
    return _bounded(left), _bounded(right)


def _bounded(size: int | None) -> int | None:
    return None if size is None or size == -1 or size >= LONGEST else size
