"""Placeholder arguments for `cute.compile`: what a kernel relies on, checked at every call of the compiled function.

Sizes and strides are run-time values; a symbol used twice is checked to be equal. Needs no GPU and no tensors.
"""

from typing import Any

from flash_hopper.device.dsl import Float32, Int32, Int64, cute, make_fake_stream, make_fake_tensor
from flash_hopper.device.sequences import LengthArgs, RaggedArgs
from flash_hopper.plan.backward import STATISTICS_ROWS


def size() -> Any:
    """Any size."""
    return cute.sym_int32()


def head_dim_size(multiple: int = 8) -> Any:
    """A head dim."""
    return cute.sym_int32(divisibility=multiple)


def heads_tensor(dtype: Any, *shape: Any) -> Any:
    """(batch, seqlen, heads, head_dim), or (rows, heads, head_dim) of a ragged batch, of 16 or 8 bit, as TMA wants it: last
    stride 1, others and the address multiples of 16 bytes."""
    strides = (*(cute.sym_int64(divisibility=128 // dtype.width) for _ in shape[1:]), 1)
    return make_fake_tensor(dtype, shape, strides, assumed_align=16)


def statistics(batch: Any, heads: Any) -> Any:
    """(2, batch, heads, rows) float32 of the preprocess kernel."""
    rows = cute.sym_int32(divisibility=STATISTICS_ROWS)
    strides = (*(cute.sym_int64(divisibility=STATISTICS_ROWS) for _ in range(3)), 1)
    return make_fake_tensor(Float32, (2, batch, heads, rows), strides, assumed_align=16)


def accumulator(batch: Any, heads: Any, multiple: int) -> Any:
    """(batch, heads, values) float32; values and strides are multiples of `multiple`."""
    values = cute.sym_int32(divisibility=multiple)
    strides = (*(cute.sym_int64(divisibility=multiple) for _ in range(2)), 1)
    return make_fake_tensor(Float32, (batch, heads, values), strides, assumed_align=16)


def tile_counter(scheduler: str) -> Any:
    """(1,) int32 of the dynamic scheduler; None for the static one."""
    return make_fake_tensor(Int32, (1,), (1,), assumed_align=4) if scheduler == "dynamic" else None


def ragged(tensors: int, is_first: bool = False) -> RaggedArgs:
    """Of a ragged batch with so many tensors that have rows; the first kernel of a call gets lengths."""
    lengths = LengthArgs(*(Int64(0) for _ in range(4)), *(Int32(1) for _ in range(4))) if is_first else None
    return RaggedArgs(Int64(0), Int32(1), tuple(Int64(0) for _ in range(tensors)), lengths)


def mask_bounds(kind: str) -> tuple[Int32 | None, Int32 | None, Int32 | None]:
    """left, right and chunk: run-time values of windows and chunks, absent for other masks."""
    return (Int32(0), Int32(0), Int32(0)) if kind in ("local", "chunk") else (None, None, None)


def stream() -> Any:
    """torch's current stream, which the compiled function finds itself."""
    return make_fake_stream(use_tvm_ffi_env_stream=True)
