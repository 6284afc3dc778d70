"""From a plan to something that `cute.compile` accepts: the function and placeholder arguments.

`compile/build.py` calls this and nothing else of the kernels.
"""

from typing import Any

from flash_hopper.kernels.forward.kernel import ForwardKernel, placeholder_arguments
from flash_hopper.plan.forward import ForwardPlan


def traceable(plan: ForwardPlan) -> tuple[Any, tuple[Any, ...]]:
    """(jit function, placeholder arguments) of a plan's kernel; no tensors, no GPU."""
    return ForwardKernel(plan), placeholder_arguments(plan)
