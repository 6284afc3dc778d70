"""Which kernels a benchmark calls, so that they can be compiled ahead of it, on a machine without a GPU.

`flash-hopper bench --pack` makes a pack of them; `flash-hopper bench` then runs where there is no compiler.
"""

from collections.abc import Iterable, Iterator

from flash_hopper.compile.key import Plan
from flash_hopper.plan.backward import BackwardRequest, plan_backward
from flash_hopper.plan.forward import plan_forward
from flash_hopper.testing.bench_suites import BenchShape


def plans_of(shapes: Iterable[BenchShape]) -> list[Plan]:
    """Every plan that ours, ours-out and ours-det need for these shapes, each once."""
    return list(dict.fromkeys(plan for shape in shapes for plan in _plans(shape)))


def _plans(shape: BenchShape) -> Iterator[Plan]:
    if shape.direction == "forward":
        yield plan_forward(shape.problem)
        return
    for is_deterministic in (False, True):
        problem = shape.requested(return_lse=True, deterministic=is_deterministic)
        yield plan_forward(problem)
        request = BackwardRequest(needs_dq=True, needs_dkdv=True, has_dlse=False, is_deterministic=is_deterministic)
        yield from plan_backward(problem, request).kernels()
