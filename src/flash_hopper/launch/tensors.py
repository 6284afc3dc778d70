"""torch tensors as the checks and the kernels see them."""

from typing import Any

import torch

from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError
from flash_hopper.problem.tensor import TensorSpec

DTYPES = {
    torch.bfloat16: DType.BF16,
    torch.float16: DType.FP16,
    torch.float32: DType.FP32,
    torch.float64: DType.FP64,
    torch.float8_e4m3fn: DType.E4M3,
}
ALIGN_BYTES = 16  # of addresses and of every stride but the last, for TMA


def describe(name: str, tensor: Any) -> TensorSpec:
    """What `problem` needs to know about an argument. Raises DTypeError if it is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise DTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=DTYPES.get(tensor.dtype),
        dtype_name=str(tensor.dtype),
        device=str(tensor.device),
        requires_grad=tensor.requires_grad and torch.is_grad_enabled(),
    )


def result_shapes(problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of out and of lse: like q, whose packed rows are one dimension, and with the heads before the rows."""
    p = problem
    if p.ragged is not None and p.ragged.packed_q:
        return (p.rows_q, p.heads, p.head_dim_v), (p.heads, p.rows_q)
    return (p.batch, p.seqlen_q, p.heads, p.head_dim_v), (p.batch, p.heads, p.seqlen_q)


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of lse for q of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_results(
    problem: AttentionProblem,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Raise unless out and lse are what the forward of `problem` returns, and dout and dlse, if any, gradients of them.

    Shape, dtype and device count, strides do not. Raises ArgumentError, DTypeError or DeviceError.
    """
    out_shape, lse_shape = result_shapes(problem)
    for name, tensor, shape, dtype in (
        ("out", out, out_shape, q.dtype),
        ("dout", dout, out_shape, q.dtype),
        ("lse", lse, lse_shape, lse_dtype(q.dtype)),
        ("dlse", dlse, lse_shape, lse_dtype(q.dtype)),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ArgumentError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise DTypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise DeviceError(f"{name} must be on {q.device} like q, got {tensor.device}")


def has_plain_strides(tensor: torch.Tensor) -> bool:
    """True if the strides, also of dimensions of size 1, suit TMA and a kernel's argument check as they are."""
    step = ALIGN_BYTES // tensor.element_size()
    *outer, last = tensor.stride()
    return last == 1 and all(stride % step == 0 for stride in outer)


def is_aligned(tensor: torch.Tensor) -> bool:
    """True if TMA can address the tensor: base and strides (of dimensions longer than 1) on 16-byte boundaries."""
    step = ALIGN_BYTES // tensor.element_size()
    *outer, last = zip(tensor.shape, tensor.stride(), strict=True)
    return (
        tensor.data_ptr() % ALIGN_BYTES == 0
        and (last[0] == 1 or last[1] == 1)
        and all(size == 1 or stride % step == 0 for size, stride in outer)
    )


def addressable(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in a form that TMA can address: the tensor itself where possible, a view of it if only strides of
    dimensions of size 1 are odd, else one contiguous copy."""
    if tensor.data_ptr() % ALIGN_BYTES == 0 and has_plain_strides(tensor):
        return tensor
    if is_aligned(tensor):
        return with_plain_unit_strides(tensor)
    return tensor.clone(memory_format=torch.contiguous_format)


def with_plain_unit_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, with harmless strides in dimensions of size 1 (and 1 in the last one).

    Such strides are never used, but a kernel's argument check looks at them. No copy.
    """
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    strides[-1] = 1
    return tensor.as_strided(tensor.shape, strides)
