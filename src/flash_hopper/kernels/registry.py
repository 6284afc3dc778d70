"""From a plan to something that `cute.compile` accepts: the function and placeholder arguments.

`compile/build.py` calls this and nothing else of the kernels.
"""

from typing import Any

from flash_hopper.kernels.backward_dkdv import kernel as backward_dkdv
from flash_hopper.kernels.backward_dq import kernel as backward_dq
from flash_hopper.kernels.forward import kernel as forward
from flash_hopper.kernels.forward_fp8 import kernel as forward_fp8
from flash_hopper.kernels.postprocess import kernel as postprocess
from flash_hopper.kernels.preprocess import kernel as preprocess
from flash_hopper.kernels.quantize import kernel as quantize

_KERNELS: dict[str, tuple[Any, Any]] = {
    "forward": (forward.ForwardKernel, forward.placeholder_arguments),
    "forward_fp8": (forward_fp8.ForwardFp8Kernel, forward_fp8.placeholder_arguments),
    "preprocess": (preprocess.PreprocessKernel, preprocess.placeholder_arguments),
    "backward_dkdv": (backward_dkdv.BackwardDkdvKernel, backward_dkdv.placeholder_arguments),
    "backward_dq": (backward_dq.BackwardDqKernel, backward_dq.placeholder_arguments),
    "postprocess": (postprocess.PostprocessKernel, postprocess.placeholder_arguments),
    "quantize": (quantize.QuantizeKernel, quantize.placeholder_arguments),
}


def traceable(plan: Any) -> tuple[Any, tuple[Any, ...]]:
    """(jit function, placeholder arguments) of a plan's kernel; no tensors, no GPU."""
    kernel, placeholder_arguments = _KERNELS[plan.kind]
    return kernel(plan), placeholder_arguments(plan)
