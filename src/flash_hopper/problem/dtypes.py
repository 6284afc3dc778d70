"""Element types by their short names, without torch.

`DType` is what problems, plans and keys hold; `launch` and `reference` translate from torch.
"""

from enum import Enum


class DType(str, Enum):
    """Element type of q, k and v. The value is the short name used in keys, cases and tables."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"
    E4M3 = "e4m3"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return {DType.E4M3: 1, DType.BF16: 2, DType.FP16: 2, DType.FP32: 4, DType.FP64: 8}[self]

    def __str__(self) -> str:
        return self.value


KERNEL_DTYPES = (DType.BF16, DType.FP16)
