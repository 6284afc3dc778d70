"""The checked request of a quantisation or a Hadamard transform.

`quantize_problem` and `transform_problem` turn the arguments of `quantize_fp8` and `hadamard_transform`, described by `TensorSpec`s,
into a `QuantizeProblem`, or raise before anything was allocated. Codes are e4m3; real values are codes * descale
(specification 6.3). Which element of a descale belongs to which rows is said in `problem/fp8.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flash_hopper.problem.checks import (
    check_devices,
    check_last_stride,
    check_rank,
    check_shape,
    checked_int,
    common_dtype,
)
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DTypeError, UnsupportedError
from flash_hopper.problem.fp8 import block_count, packed_block_count, packed_rows, padded_rows
from flash_hopper.problem.tensor import TensorSpec

Granularity = Literal["tensor", "head", "block"]
RotaryKind = Literal["none", "interleaved", "halves"]
GRANULARITIES = ("tensor", "head", "block")
QUANTIZED_DTYPES = (DType.BF16, DType.FP16, DType.FP32)
HEAD_DIM_STEP, MAX_HEAD_DIM = 16, 256
ROTARY_STEP = 16


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of the first `dim` elements of a row, with tables of so many positions."""

    kind: RotaryKind = "none"
    dim: int = 0
    positions: int = 0
    table_dtype: DType | None = None
    has_offsets: bool = False  # a tensor of them


NO_ROTARY = Rotary()


@dataclass(frozen=True, slots=True)
class QuantizeProblem:
    """One request in canonical form; every field was checked.

    `batch`: entries of a dense x, or sequences of a ragged one; `rows`: of an entry, or in all; `group`: heads that share a scale
    of `granularity` "head"; `granularity` is None for a Hadamard transform alone, whose result has the dtype of x. `values`: codes
    are transposed, as `problem.fp8.Fp8Values` says.
    """

    dtype: DType
    batch: int
    rows: int
    heads: int
    head_dim: int
    granularity: Granularity | None
    group: int
    hadamard: bool
    has_signs: bool
    rotary: Rotary
    is_ragged: bool
    has_seqused: bool
    values: bool

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to compute."""
        return 0 in (self.batch, self.rows, self.heads)

    @property
    def columns(self) -> int:
        """Blocks of one head: of an entry, or, of a ragged x, of all sequences, some of them unused."""
        return packed_block_count(self.rows, self.batch) if self.is_ragged else block_count(self.rows)

    @property
    def blocks(self) -> int:
        """Blocks of all heads and entries."""
        return self.columns * self.heads * (1 if self.is_ragged else self.batch)

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Of the codes: like x, or those of `Fp8Values`."""
        outer = () if self.is_ragged else (self.batch,)
        if not self.values:
            return (*outer, self.rows, self.heads, self.head_dim)
        padded = packed_rows(self.rows, self.batch) if self.is_ragged else padded_rows(self.rows)
        return (*outer, self.heads, self.head_dim, padded)

    @property
    def descale_shape(self) -> tuple[int, ...]:
        """Of the descale, by granularity."""
        if self.granularity == "tensor":
            return (1,)
        if self.granularity == "head":
            return (self.batch, self.heads // self.group)
        return (*(() if self.is_ragged else (self.batch,)), self.heads, self.columns)


def quantize_problem(
    x: TensorSpec,
    granularity: Any,
    *,
    cu_seqlens: TensorSpec | None,
    seqused: TensorSpec | None,
    qhead_per_kvhead: Any,
    hadamard: Any,
    signs: TensorSpec | None,
    rotary: tuple[TensorSpec | None, TensorSpec | None],
    rotary_interleaved: Any,
    offsets: TensorSpec | int,
    values: Any,
) -> QuantizeProblem:
    """Check a call of `quantize_fp8`; shapes as there. Raises ArgumentError, DTypeError, DeviceError or UnsupportedError."""
    for name, flag in (("hadamard", hadamard), ("values", values), ("rotary_interleaved", rotary_interleaved)):
        if not isinstance(flag, bool):
            raise DTypeError(f"{name} must be a bool, got {type(flag).__name__}")
    if granularity not in GRANULARITIES:
        raise ArgumentError(f"granularity must be one of {', '.join(GRANULARITIES)}, got {granularity!r}")
    batch, rows = _checked_rows(x, cu_seqlens, seqused)
    heads, head_dim = x.shape[-2:]
    group = checked_int("qhead_per_kvhead", qhead_per_kvhead, 1)
    if heads % group:
        raise ArgumentError(f"qhead_per_kvhead must divide the {heads} heads of x, got {group}")
    if group > 1 and granularity != "head":
        raise ArgumentError(f'qhead_per_kvhead is for granularity="head", got {group} with {granularity!r}')
    if signs is not None and not hadamard:
        raise ArgumentError("signs are part of the Hadamard transform: pass hadamard=True with them")
    turned = _checked_rotary(x, rotary, rotary_interleaved, offsets, batch)
    if values and (hadamard or turned is not NO_ROTARY):
        raise ArgumentError("values=True is for v, which gets no Hadamard transform and no rotary embedding")
    _check_signs(x, signs)
    return QuantizeProblem(
        dtype=common_dtype([x], QUANTIZED_DTYPES),
        batch=batch,
        rows=rows,
        heads=heads,
        head_dim=head_dim,
        granularity=granularity,
        group=group,
        hadamard=hadamard,
        has_signs=signs is not None,
        rotary=turned,
        is_ragged=cu_seqlens is not None,
        has_seqused=seqused is not None,
        values=values,
    )


def transform_problem(x: TensorSpec, signs: TensorSpec | None) -> QuantizeProblem:
    """Check a call of `hadamard_transform`; x: (batch, seqlen, heads, head_dim). Raises as `quantize_problem`."""
    batch, rows = _checked_rows(x, None, None)
    _check_signs(x, signs)
    return QuantizeProblem(
        dtype=common_dtype([x], QUANTIZED_DTYPES),
        batch=batch,
        rows=rows,
        heads=x.shape[2],
        head_dim=x.shape[3],
        granularity=None,
        group=1,
        hadamard=True,
        has_signs=signs is not None,
        rotary=NO_ROTARY,
        is_ragged=False,
        has_seqused=False,
        values=False,
    )


def _checked_rows(x: TensorSpec, cu_seqlens: TensorSpec | None, seqused: TensorSpec | None) -> tuple[int, int]:
    """(batch, rows) of x, whose layout, dtype and gradient are checked."""
    if x.requires_grad:
        raise UnsupportedError(
            f"{x.name} requires grad: there are no gradients through e4m3; call under torch.no_grad()"
        )
    if cu_seqlens is not None:
        check_rank(x, "(total rows, heads, head_dim)", " with cu_seqlens")
    else:
        check_rank(x, "(batch, seqlen, heads, head_dim)")
    common_dtype([x], QUANTIZED_DTYPES)
    check_last_stride(x)
    head_dim = x.shape[-1]
    if head_dim % HEAD_DIM_STEP or not HEAD_DIM_STEP <= head_dim <= MAX_HEAD_DIM:
        raise ArgumentError(
            f"head_dim of {x.name} must be a multiple of {HEAD_DIM_STEP} from {HEAD_DIM_STEP} to {MAX_HEAD_DIM}, got {head_dim}"
        )
    for lengths in (cu_seqlens, seqused):
        if lengths is not None:
            _check_ints(x, lengths)
    if cu_seqlens is None:
        batch = x.shape[0]
    elif cu_seqlens.shape[0] == 0:
        raise ArgumentError("cu_seqlens must have batch + 1 entries, got none")
    else:
        batch = cu_seqlens.shape[0] - 1
    if seqused is not None:
        check_shape(seqused, (batch,), "one a sequence")
    return batch, x.shape[-3]


def _check_ints(x: TensorSpec, given: TensorSpec) -> None:
    """One dimension of contiguous int32 on the device of x."""
    check_devices([x, given])
    if given.dtype_name != "torch.int32":
        raise DTypeError(f"{given.name} must have dtype torch.int32, got {given.dtype_name}; call {given.name}.int()")
    check_rank(given, "(batch)")
    check_last_stride(given)


def _check_signs(x: TensorSpec, signs: TensorSpec | None) -> None:
    if signs is None:
        return
    check_devices([x, signs])
    if signs.dtype is not DType.FP32:
        raise DTypeError(f"signs must be float32 (+1 and -1), got {signs.dtype_name}")
    check_shape(signs, (x.shape[-1],), "head_dim of x")
    check_last_stride(signs)


def _checked_rotary(
    x: TensorSpec,
    tables: Sequence[TensorSpec | None],
    interleaved: bool,
    offsets: TensorSpec | int,
    batch: int,
) -> Rotary:
    cos, sin = tables
    has_offsets = isinstance(offsets, TensorSpec)
    if cos is None or sin is None:
        if cos is not sin:
            raise ArgumentError("rotary_cos and rotary_sin must be given together")
        if has_offsets or offsets != 0:
            raise ArgumentError("seqlen_offsets are for rotary_cos and rotary_sin, which are not given")
        return NO_ROTARY
    check_devices([x, cos, sin])
    for table in (cos, sin):
        check_rank(table, "(positions, rotary_dim / 2)")
        if table.dtype not in (x.dtype, DType.FP32):
            raise DTypeError(f"{table.name} must have the dtype of x or float32, got {table.dtype_name}")
        check_last_stride(table)
    if sin.dtype is not cos.dtype:
        raise DTypeError(f"rotary_cos and rotary_sin must have one dtype, got {cos.dtype_name} and {sin.dtype_name}")
    check_shape(sin, cos.shape, "like rotary_cos")
    positions, half = cos.shape
    if 2 * half % ROTARY_STEP or not 0 < 2 * half <= x.shape[-1]:
        raise ArgumentError(
            f"rotary_dim must be a multiple of {ROTARY_STEP} up to head_dim {x.shape[-1]}, got {2 * half} (twice the columns "
            "of rotary_cos)"
        )
    first = 0
    if isinstance(offsets, TensorSpec):
        _check_ints(x, offsets)
        check_shape(offsets, (batch,), "one a sequence")
    else:
        first = checked_int("seqlen_offsets", offsets, 0)
    if positions == 0 or (x.rank == 4 and positions < first + x.shape[1]):
        raise ArgumentError(
            f"rotary_cos has {positions} positions, which x and seqlen_offsets exceed: {first} + {x.shape[-3]}"
        )
    return Rotary("interleaved" if interleaved else "halves", 2 * half, positions, cos.dtype, has_offsets)
