"""Adding an accumulator in registers to float32 values in global memory, for gradients that a caller sums up.

One mechanism for every kernel that finishes a gradient. Each element belongs to one thread of one launch, which loads, adds
and stores it: the bits repeat, and subnormal numbers count, which the memory's own additions take for 0.
"""

from typing import Any

from flash_hopper.device.dsl import Float32, Int32, cute, cutlass, make_fake_tensor
from flash_hopper.device.layouts import acc_as_rows
from flash_hopper.device.ptx import add_products_f32


@cute.jit
def add_to_rows(
    acc: cute.Tensor, factor: Float32, m: cute.Tensor, first_row: Int32, first_col: Int32, rows: Int32, thread: Int32
) -> None:
    """m[first_row + r, first_col + c] += factor * acc[r, c] for rows below `rows` and columns that m has.

    acc: a warpgroup's 64 x N float32 accumulator, N a multiple of 8, `thread` counts within the warpgroup; m: (rows, cols)
    float32 in global memory, 4-byte aligned, whose columns are contiguous and a multiple of 8.
    """
    values = acc_as_rows(acc)
    own_row = first_row + thread // 32 * 16 + thread % 32 // 4
    for r in cutlass.range_constexpr(2):
        row = own_row + 8 * r
        cols = cutlass.select_(row < rows, m.shape[1] - first_col, 0)
        g = cute.domain_offset((first_col + thread % 4 * 2,), m[row, None])
        address = g.iterator.toint()
        for i in cutlass.range_constexpr(0, cute.size(values, mode=[1]), 2):
            add_products_f32(address, 4 * i, cols, factor, (values[r, i], values[r, i + 1]))


def summed_tensor(*shape: Any) -> Any:
    """Placeholder of a gradient that is added to: (batch, rows, heads, head_dim) float32, or, of a ragged batch, without the
    batch; any strides but the last, 1."""
    strides = (*(cute.sym_int64() for _ in shape[1:]), 1)
    return make_fake_tensor(Float32, shape, strides, assumed_align=4)
