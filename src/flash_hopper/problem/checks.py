"""Checks of single arguments that every kind of request shares; each raises a typed error that names the argument.

`attention.py` and `ragged.py` call them. What arguments mean together is decided there.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError
from flash_hopper.problem.tensor import TensorSpec


def check_rank(t: TensorSpec, layout: str, why: str = "") -> None:
    """`layout` lists the dimensions, as in "(batch, seqlen, heads, head_dim)"; `why` says what asks for them."""
    rank = layout.count(",") + 1
    if t.rank != rank:
        raise ArgumentError(f"{t.name} must be {layout}{why}, got {t.rank} dimensions: {t.shape}")


def check_devices(tensors: Sequence[TensorSpec]) -> None:
    """All on one device."""
    if len({t.device for t in tensors}) > 1:
        raise DeviceError(
            "all tensors must be on one device, got " + ", ".join(f"{t.name}: {t.device}" for t in tensors)
        )


def common_dtype(tensors: Sequence[TensorSpec], allowed: Sequence[DType]) -> DType:
    """The one element type of all tensors, which must be among those allowed."""
    names = ", ".join(f"{t.name}: {t.dtype_name}" for t in tensors)
    if len({t.dtype_name for t in tensors}) > 1:
        raise DTypeError(f"all tensors must have one dtype, got {names}")
    dtype = tensors[0].dtype
    if dtype is None or dtype not in allowed:
        raise DTypeError(f"dtype must be one of {', '.join(map(str, allowed))} on {tensors[0].device}, got {names}")
    return dtype


def check_last_stride(t: TensorSpec) -> None:
    """Stride 1 in the last dimension, unless that holds one element."""
    if t.shape[-1] > 1 and t.strides[-1] != 1:
        raise ArgumentError(
            f"{t.name} must have stride 1 in its last dimension, got strides {t.strides}; call {t.name}.contiguous()"
        )


def check_shape(t: TensorSpec, want: tuple[int, ...], why: str) -> None:
    """Exactly the shape `want`; `why` says where its sizes come from."""
    if t.shape != want:
        raise ArgumentError(f"{t.name} must have shape {want} ({why}), got {t.shape}")


def check_no_overlap(t: TensorSpec) -> None:
    """No two elements at one address, as far as strides of 0 tell: the tensor is written to."""
    if 0 not in t.shape and any(stride == 0 and size > 1 for size, stride in zip(t.shape, t.strides, strict=True)):
        raise ArgumentError(f"{t.name} must not be expanded (a stride of 0), got strides {t.strides} for {t.shape}")


def check_heads(heads: int, heads_k: int) -> None:
    """Every key head has the same number of query heads."""
    if heads % heads_k if heads_k else heads > 0:
        raise ArgumentError(
            f"k and v have {heads_k} heads and q has {heads}: the heads of q must be a multiple of those of k and v"
        )


def checked_int(name: str, value: Any, low: int) -> int:
    """`value`, a Python or numpy integer that is at least `low`, as an int."""
    if isinstance(value, bool):
        raise DTypeError(f"{name} must be an int, got bool")
    try:
        number = operator.index(value)
    except TypeError:
        raise DTypeError(f"{name} must be an int, got {type(value).__name__}") from None
    if number < low:
        raise ArgumentError(f"{name} must be at least {low}, got {number}")
    return number


def is_finite(value: Any) -> bool:
    """True for an int or float that is neither NaN nor infinite; a bool is no number here."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
