"""What the checks need to know about a tensor, without the tensor.

`launch` and `reference` fill a `TensorSpec` from a torch tensor; nothing here imports torch.
"""

from dataclasses import dataclass

from flash_hopper.problem.dtypes import DType


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides (elements), dtype and place of one argument.

    `dtype` is None for an element type without a short name; `dtype_name` is then what the message shows.
    """

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType | None
    dtype_name: str
    device: str
    requires_grad: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)
