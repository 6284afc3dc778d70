"""Register conversions between accumulators and operands."""

from flash_hopper.device.dsl import Int32, cute
from flash_hopper.device.ptx import pack_16bit
from flash_hopper.problem.dtypes import DType


def to_operand(acc: cute.Tensor, operand: cute.Tensor, dtype: DType) -> None:
    """A float32 accumulator as a 16-bit register operand: element i of one is element i of the other."""
    n = cute.size(operand)
    source = cute.make_tensor(acc.iterator, cute.make_layout(n))
    packed = cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(n)), Int32)
    for i in range(n // 2):
        packed[i] = pack_16bit(source[2 * i], source[2 * i + 1], dtype)
