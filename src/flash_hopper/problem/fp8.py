"""What an e4m3 call has beyond q, k and v: descales, and values whose keys are in the tensor core's order.

Real q = codes of q * q_descale, and likewise k and v. A descale is given for all of a tensor, for each sequence and key
head, or for each block of `FP8_BLOCK` rows (specification 6.4); `descale_places` tells the forms apart and checks them.
`geometry/fp8.py` has the order of keys; `attention.py` checks everything else.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from flash_hopper.problem.checks import check_last_stride, check_no_overlap, check_rank, check_shape, checked_int
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError
from flash_hopper.problem.tensor import TensorSpec

# What a kernel must be able to do: factors of a whole sequence and head, or of each block of rows.
DescaleForm = Literal["scalar", "block"]
FP8_BLOCK = 128  # rows that share a descale; also what the keys of `Fp8Values` are padded to

FP8_HEAD_DIM_STEP = 16


class Fp8Values(NamedTuple):
    """v in e4m3 as the second product reads it: transposed, keys in the order of `geometry.fp8.key_at`, unused keys zero.

    codes: float8_e4m3fn, (batch, heads_k, head_dim_v, padded_rows(seqlen)), or, of packed sequences, (heads_k, head_dim_v,
    packed_rows(seqlen, sequences)) where sequence b starts at (cu_seqlens_k[b] // FP8_BLOCK + b) * FP8_BLOCK; last stride 1.
    seqlen: rows of the v that it stands for, of packed sequences all of them together.
    """

    codes: Any
    seqlen: int


def block_count(rows: int) -> int:
    """Blocks of a sequence, the last one possibly short."""
    return (rows + FP8_BLOCK - 1) // FP8_BLOCK


def padded_rows(rows: int) -> int:
    """Keys of `Fp8Values` for a sequence of so many rows."""
    return block_count(rows) * FP8_BLOCK


def packed_block_count(rows: int, sequences: int) -> int:
    """Columns of a descale of packed sequences: sequence b starts at column cu_seqlens[b] // FP8_BLOCK + b."""
    return rows // FP8_BLOCK + sequences + 1


def packed_rows(rows: int, sequences: int) -> int:
    """Keys of `Fp8Values` for packed sequences of so many rows in all."""
    return packed_block_count(rows, sequences) * FP8_BLOCK


class DescalePlaces(NamedTuple):
    """Where the factor of a row is in a descale: so many elements further for each batch entry (or sequence), head of q, key head,
    block in front of a packed sequence, and block of rows within it."""

    batch: int = 0
    head: int = 0
    key_head: int = 0
    packed: int = 0
    block: int = 0


class Scaled(NamedTuple):
    """A tensor that a descale belongs to. `rows`: of a sequence, or of all if they are packed; `is_query`: its heads are not
    those of k and v."""

    name: str
    heads: int
    rows: int
    is_packed: bool
    is_query: bool


def descale_places(t: TensorSpec | None, scaled: Scaled, entries: int, heads_k: int) -> DescalePlaces:
    """The form of a descale, checked. entries: of the batch, or sequences. None stands for 1.

    Shapes: () or (1,); (entries, heads_k), for q too; blocks: (entries, heads of the tensor, block_count(rows)), or, packed,
    (heads of the tensor, packed_block_count(rows, entries)). Raises ArgumentError or DTypeError. Values are not looked at:
    they must be finite and above 0.
    """
    if t is None:
        return DescalePlaces()
    if t.dtype is not DType.FP32:
        raise DTypeError(f"{t.name} must have dtype torch.float32, got {t.dtype_name}")
    if t.shape in ((), (1,)):
        return DescalePlaces()
    if t.shape == (entries, heads_k):
        return DescalePlaces(batch=t.strides[0], key_head=t.strides[1])
    blocks: tuple[int, ...] = (entries, scaled.heads, block_count(scaled.rows))
    if scaled.is_packed:
        blocks = (scaled.heads, packed_block_count(scaled.rows, entries))
    if t.shape != blocks:
        raise ArgumentError(
            f"{t.name} must have shape () or (1,), {(entries, heads_k)} (batch, heads of k), or {blocks} (blocks of {FP8_BLOCK} "
            f"rows of {scaled.name}), got {t.shape}"
        )
    *batch, of_head, of_block = t.strides
    places = DescalePlaces(batch=0 if scaled.is_packed else batch[0], block=of_block)
    places = places._replace(packed=of_block if scaled.is_packed else 0)
    return places._replace(head=of_head) if scaled.is_query else places._replace(key_head=of_head)


def descale_form(places: Sequence[DescalePlaces]) -> DescaleForm:
    """What a kernel must be able to do for these."""
    return "block" if any(p.block for p in places) else "scalar"


def value_spec(codes: TensorSpec, seqlen: Any, sequences: int | None) -> TensorSpec:
    """The v that `Fp8Values` stand for, as checks want it. sequences: how many, if they are packed.

    Raises ArgumentError if the codes are not shaped as `Fp8Values` says.
    """
    rows = checked_int("seqlen of Fp8Values", seqlen, 0)
    layout = "(heads_k, head_dim_v, keys)" if sequences is not None else "(batch, heads_k, head_dim_v, keys)"
    check_rank(codes, layout, ", the codes of Fp8Values,")
    *batch, heads, head_dim, keys = codes.shape
    want = padded_rows(rows) if sequences is None else packed_rows(rows, sequences)
    if keys != want:
        raise ArgumentError(f"the codes of Fp8Values must hold {want} keys for {rows} rows, got {keys}: {codes.shape}")
    check_last_stride(codes)
    shape = (*batch, rows, heads, head_dim)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return replace(codes, shape=shape, strides=strides)


def check_fp8_head_dims(head_dim: int, head_dim_v: int) -> None:
    """e4m3 wants rows of whole 16 bytes."""
    for name, size in (("q and k", head_dim), ("v", head_dim_v)):
        if size % FP8_HEAD_DIM_STEP:
            raise ArgumentError(
                f"head_dim of {name} must be a multiple of {FP8_HEAD_DIM_STEP} in e4m3, got {size}; pad with zeros (and pass "
                "softmax_scale for the real head_dim)"
            )


def check_fp8_out(out: TensorSpec, shape: tuple[int, ...], dtypes: Sequence[DType], device: str) -> None:
    """`out` of an e4m3 call is what a 16-bit call would return."""
    if out.dtype is None or out.dtype not in dtypes:
        raise DTypeError(f"out must have dtype {' or '.join(map(str, dtypes))} for e4m3 inputs, got {out.dtype_name}")
    if out.device != device:
        raise DeviceError(f"out must be on {device} like q, got {out.device}")
    check_shape(out, shape, "rows and heads of q, head_dim of v")
    check_last_stride(out)
    check_no_overlap(out)
