"""Register conversions between accumulators and operands."""

from flash_hopper.device.dsl import Int32, cute
from flash_hopper.device.ptx import pack_16bit, pack_e4m3
from flash_hopper.problem.dtypes import DType


def to_operand(acc: cute.Tensor, operand: cute.Tensor, dtype: DType) -> None:
    """A float32 accumulator as a 16-bit register operand: element i of one is element i of the other."""
    n = cute.size(operand)
    source = cute.make_tensor(acc.iterator, cute.make_layout(n))
    packed = cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(n)), Int32)
    for i in range(n // 2):
        packed[i] = pack_16bit(source[2 * i], source[2 * i + 1], dtype)


def to_operand_e4m3(acc: cute.Tensor, operand: cute.Tensor) -> None:
    """A float32 accumulator as an 8-bit register operand, whose keys are then in the order of `geometry.fp8.key_at`.

    Accumulator registers count (e, row, i), those of the operand (e, i % 2, row, i // 2 % 2, i // 4): both a pair of columns
    8 i + 2 q + e of two rows.
    """
    n = cute.size(acc)
    s = cute.make_tensor(acc.iterator, cute.make_layout(n))
    packed = cute.recast_tensor(cute.make_tensor(operand.iterator, cute.make_layout(n)), Int32)
    for word in range(n // 4):
        row, first = word % 2, word // 2 * 8 + word % 2 * 2
        assert first == 4 * (word // 2 * 2) + 2 * row, "columns 8 i + 2 q and 8 (i + 1) + 2 q of the row"
        packed[word] = pack_e4m3(s[first], s[first + 1], s[first + 4], s[first + 5])


def anew(thread: Int32, known: Int32) -> Int32:
    """The same thread, as a number that is not there before `known` is, which is not negative and of this block or tile.

    Otherwise places in memory, computed from the thread alone, are kept in registers from block to block, more than there are
    (up to 188 bytes a thread were spilled).
    """
    return thread + (known >> 31)
