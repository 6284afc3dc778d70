"""The suites of cases, by name, and the kernels that they need.

The grids are in `forward_cases`, `backward_cases`, `window_cases`, `ragged_cases` and `fp8_cases`. Called by `cli/verify.py`, `cli/compile.py` and `tests/`.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from flash_hopper.compile.key import Plan
from flash_hopper.launch.fp8_values import value_plan
from flash_hopper.plan.backward import BackwardRequest, plan_backward
from flash_hopper.plan.forward import ForwardPlan, plan_forward
from flash_hopper.plan.forward_fp8 import ForwardFp8Plan, plan_forward_fp8
from flash_hopper.plan.quantize import QuantizePlan
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.fp8 import DescaleForm
from flash_hopper.testing import backward_cases, forward_cases, fp8_cases, ragged_cases, window_cases
from flash_hopper.testing.cases import Case

_SEED_STEP = 1_000_003  # between the seeds of two `--seed` values; larger than any suite
_SUITES: dict[str, Callable[[], list[Case]]] = {
    "forward": forward_cases.forward,
    "smoke": forward_cases.smoke,
    "sanitizer": forward_cases.sanitizer,
    "backward": backward_cases.backward,
    "backward-smoke": backward_cases.smoke,
    "backward-sanitizer": backward_cases.sanitizer,
    "ragged": ragged_cases.ragged,
    "window": window_cases.windows,
    "ragged-smoke": ragged_cases.smoke,
    "ragged-sanitizer": ragged_cases.sanitizer,
    "accumulate": ragged_cases.accumulate,
    "fp8": fp8_cases.fp8,
    "fp8-rows": fp8_cases.in_rows,
    "fp8-sanitizer": fp8_cases.sanitizer,
}


def suite(name: str, seed: int = 0) -> list[Case]:
    """The cases of a suite in a fixed order; `seed` changes the random numbers of all of them. Raises ArgumentError."""
    if name not in _SUITES:
        raise ArgumentError(f"suite must be one of {', '.join(_SUITES)}, got {name!r}")
    return [replace(case, seed=seed * _SEED_STEP + i) for i, case in enumerate(_SUITES[name]())]


def names() -> tuple[str, ...]:
    """The names that `suite` knows."""
    return tuple(_SUITES)


def sample(cases: list[Case], limit: int | None) -> list[Case]:
    """At most `limit` of the cases, evenly spread over the list."""
    if limit is None or limit >= len(cases):
        return cases
    return [cases[i * len(cases) // limit] for i in range(limit)]


def plan_of(case: Case) -> ForwardPlan | ForwardFp8Plan | None:
    """The forward kernel that a case needs; None if there is nothing to compute."""
    problem = case.problem()
    if problem.has_no_output or problem.has_no_keys:
        return None
    if not case.is_fp8:
        return plan_forward(problem)
    form: DescaleForm = "block" if "b" in case.descales else "scalar"
    return plan_forward_fp8(problem, case.out_dtype, form)


def backward_plans_of(case: Case) -> list[Plan]:
    """The kernels of a case's backward; empty if it has none or there is nothing to compute."""
    problem = case.problem()
    if not case.is_backward or problem.has_no_output or problem.has_no_keys:
        return []
    request = BackwardRequest(
        "q" in case.grads, case.grads != "q", case.dlse != "none", case.deterministic, case.into != "fresh"
    )
    return list(plan_backward(problem, request).kernels())


def reordering_of(case: Case) -> QuantizePlan | None:
    """The kernel that transposes an e4m3 case's v in rows, if it has such a v and anything is computed."""
    if not case.is_fp8 or case.v_form != "rows" or plan_of(case) is None:
        return None
    return value_plan(case.problem())


def plans_of(cases: Iterable[Case]) -> list[Plan]:
    """The kernels that some cases need, each once, in the order of first use."""
    found: dict[Plan, None] = {}
    for case in cases:
        forward = plan_of(case)
        if forward is None:
            continue
        reordering = reordering_of(case)
        in_front = [] if reordering is None else [reordering]
        found |= dict.fromkeys([*in_front, forward, *backward_plans_of(case)])
    return list(found)
