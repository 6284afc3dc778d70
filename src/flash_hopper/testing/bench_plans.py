"""Which kernels a benchmark calls, so that they can be compiled ahead of it, on a machine without a GPU.

`flash-hopper bench --pack` makes a pack of them; `flash-hopper bench` then runs where there is no compiler.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flash_hopper.compile.key import Plan
from flash_hopper.launch.fp8_values import value_plan
from flash_hopper.launch.quantize import plans_of as quantize_plans
from flash_hopper.plan.backward import BackwardRequest, plan_backward
from flash_hopper.plan.forward import plan_forward
from flash_hopper.plan.forward_fp8 import plan_forward_fp8
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.quantize import NO_ROTARY, Granularity, QuantizeProblem, Rotary
from flash_hopper.testing.bench_suites import QUANTISE, BenchShape


def plans_of(shapes: Iterable[BenchShape]) -> list[Plan]:
    """Every plan that providers of ours need for these shapes, each once; those that quantise their inputs, too."""
    return list(dict.fromkeys(plan for shape in shapes for plan in _plans(shape)))


def _plans(shape: BenchShape) -> Iterator[Plan]:
    if shape.direction == QUANTISE:
        yield from _quantisations(shape)
        return
    if shape.is_fp8:
        yield from _fp8_plans(shape)
        return
    if shape.direction == "forward":
        yield plan_forward(shape.problem)
        return
    for is_deterministic in (False, True):
        problem = shape.requested(return_lse=True, deterministic=is_deterministic)
        yield plan_forward(problem)
        request = BackwardRequest(needs_dq=True, needs_dkdv=True, has_dlse=False, is_deterministic=is_deterministic)
        yield from plan_backward(problem, request).kernels()


def _fp8_plans(shape: BenchShape) -> Iterator[Plan]:
    """Ours with descales of heads and of blocks and with v in rows, in bf16, and the quantisation of their inputs."""
    yield plan_forward_fp8(shape.problem, DType.BF16, "scalar")
    yield plan_forward_fp8(shape.problem, DType.BF16, "block")
    yield plan_forward_fp8(shape.problem, DType.BF16, "scalar", "plain")
    yield value_plan(shape.problem)
    yield plan_forward(replace(shape, dtype=DType.BF16).problem)
    granularities: tuple[Granularity, ...] = ("head", "block")
    for granularity in granularities:
        for values in (False, True):
            yield from quantize_plans(quantize_problem_of(shape.d, granularity, values=values))


def _quantisations(shape: BenchShape) -> Iterator[Plan]:
    """Those of the providers of ours in `fp8_providers.QUANTISE`."""
    rotary = Rotary("halves", shape.d, shape.seqlen_q, DType.BF16)
    yield from quantize_plans(quantize_problem_of(shape.d, "block", hadamard=True))
    yield from quantize_plans(quantize_problem_of(shape.d, "block", hadamard=True, rotary=rotary))
    yield from quantize_plans(quantize_problem_of(shape.d, "block", values=True))


def quantize_problem_of(
    head_dim: int, granularity: Granularity, *, hadamard: bool = False, values: bool = False, rotary: Rotary = NO_ROTARY
) -> QuantizeProblem:
    """A dense bf16 tensor of any other sizes, on which no plan depends."""
    return QuantizeProblem(
        DType.BF16,
        1,
        1,
        1,
        head_dim,
        granularity,
        1,
        hadamard,
        hadamard,
        rotary,
        is_ragged=False,
        has_seqused=False,
        values=values,
    )
