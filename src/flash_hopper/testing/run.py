"""Run a case: build its inputs, call the function, and check all that a call promises.

Checked are values of out and lse against float64 (`testing.compare`), shapes and dtypes, that `out=` is what is
returned, that nothing around it was written, that q, k, v and their surroundings are unchanged, and that repeated
calls give the same bits. Memory that the call allocates with torch starts as NaN, like a given `out`. Called by
`cli/verify.py` and `tests/`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_hopper.api import flash_attn_func
from flash_hopper.testing.cases import Case
from flash_hopper.testing.compare import Comparison, compare, expect
from flash_hopper.testing.inputs import Inputs, make_inputs

Attention = Callable[..., Any]
"""Something with the signature of `flash_hopper.flash_attn_func`."""


@dataclass(frozen=True)
class CaseResult:
    """Outcome of a case. `message` is one line, empty if it passed.

    `worst_error` is the largest absolute error of out, `worst_ratio` the largest error of out or lse as a multiple
    of what is allowed; both are infinite if no values could be compared.
    """

    case: Case
    passed: bool
    message: str
    worst_error: float
    worst_ratio: float


class _Broken(Exception):
    """A promise other than the values is broken; the text says which."""


def run_case(
    case: Case, device: torch.device | str = "cpu", *, function: Attention | None = None, repeat: int = 1
) -> CaseResult:
    """Run `case` on `device` and check it; with `repeat` > 1 also that all calls give the same bits.

    `function` is called like `flash_hopper.flash_attn_func`, which is the default. An exception, whatever it is,
    makes the case fail with its text.
    """
    try:
        out, lse = _checked_values(case, torch.device(device), function or flash_attn_func, repeat)
    except Exception as error:
        text = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"
        return CaseResult(case, False, " ".join(text.split()), torch.inf, torch.inf)
    message = "; ".join(part.message for part in (out, lse) if not part.passed)
    return CaseResult(case, not message, message, out.worst_error, max(out.worst_ratio, lse.worst_ratio))


def lost_device(device: torch.device | str) -> str | None:
    """What a CUDA device answers to a trivial request if its context is beyond repair; None if it works."""
    place = torch.device(device)
    if place.type != "cuda":
        return None
    try:
        torch.zeros(1, device=place).add_(1).item()
        torch.cuda.synchronize(place)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


@contextmanager
def nan_allocations() -> Iterator[None]:
    """Within it, memory that torch allocates without filling it holds NaN (integers: the largest value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic
    filled = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = filled


def _checked_values(
    case: Case, device: torch.device, function: Attention, repeat: int
) -> tuple[Comparison, Comparison]:
    inputs = make_inputs(case, device)
    before = inputs.snapshot()
    problem = case.problem()
    expected = expect(inputs.q, inputs.k, inputs.v, softmax_scale=problem.softmax_scale, causal=case.causal)
    out, lse = _call(case, inputs, function)
    result = compare("out", out, expected.out, expected.out_allowed)
    lse_result = Comparison(0.0, 0.0, "")
    if lse is not None:
        lse_result = compare("lse", lse, expected.lse, expected.lse_allowed)
    del expected
    bits = _bits(out), None if lse is None else _bits(lse)
    for count in range(2, repeat + 1):
        if case.give_out:
            inputs.refill_out()
        again, lse_again = _call(case, inputs, function)
        for name, first, later in (("out", bits[0], again), ("lse", bits[1], lse_again)):
            if first is not None and later is not None and not torch.equal(first, _bits(later)):
                raise _Broken(
                    f"{name} of call {count} differs from that of call 1 in {_differing(first, later)} elements"
                )
    if case.give_out and not inputs.out_is_contained():
        raise _Broken("memory outside the view of out was written")
    changed = inputs.changed(before)
    if changed:
        raise _Broken(f"the memory of {changed} was changed")
    return result, lse_result


def _call(case: Case, inputs: Inputs, function: Attention) -> tuple[Tensor, Tensor | None]:
    """One call, finished, with everything but the values checked."""
    given = {"out": inputs.out} if case.give_out else {}
    with nan_allocations():
        result = function(
            inputs.q, inputs.k, inputs.v, case.scale, causal=case.causal, return_lse=case.return_lse, **given
        )
        if inputs.q.is_cuda:
            torch.cuda.synchronize(inputs.q.device)
    if isinstance(result, tuple) != case.return_lse or (case.return_lse and len(result) != 2):
        raise _Broken(f"return_lse={case.return_lse} returned {type(result).__name__}")
    out, lse = result if case.return_lse else (result, None)
    _check_like("out", out, case.shape("o"), inputs.q.dtype, inputs.q.device)
    if lse is not None:
        wide = torch.float64 if inputs.q.dtype == torch.float64 else torch.float32
        _check_like("lse", lse, (case.batch, case.heads, case.seqlen_q), wide, inputs.q.device)
    if inputs.out is not None and (out.data_ptr() != inputs.out.data_ptr() or out.stride() != inputs.out.stride()):
        raise _Broken("what is returned is not the given out")
    return out, lse


def _check_like(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    got, want = (tuple(x.shape), x.dtype, x.device), (shape, dtype, device)
    if got != want:
        raise _Broken(f"{name} is {got}, expected {want}")


def _bits(x: Tensor) -> Tensor:
    """A compact copy of x as integers, for comparisons in which NaN equals itself."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.clone(memory_format=torch.contiguous_format).view(integer)


def _differing(first: Tensor, later: Tensor) -> int:
    return int((first != _bits(later)).sum())
