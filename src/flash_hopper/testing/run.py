"""Run a case: build its inputs, call the function, and check all that a call promises.

Checked are values against float64 (out and lse by `testing.compare`, gradients by `testing.gradients`), shapes and
dtypes, that `out=` is what is returned, that nothing around it was written, that the inputs, dout and dlse and their
surroundings are unchanged, and that repeated calls give the same bits (gradients: with deterministic=True; otherwise
every call's are compared with float64). Memory that the call allocates with torch starts as NaN, like a given `out`.
In a ragged call rows that no sequence uses hold NaN in every input; results are checked there as well.
Called by `cli/verify.py` and `tests/`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flash_hopper.api import flash_attn_backward_func, flash_attn_func, flash_attn_varlen_func
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.fp8 import Scaled, descale_places
from flash_hopper.reference.fp8 import decode
from flash_hopper.testing.cases import Case
from flash_hopper.testing.compare import Comparison, Target, compare, expect
from flash_hopper.testing.fp8_errors import expect_fp8
from flash_hopper.testing.gradients import expect_gradients
from flash_hopper.testing.inputs import TORCH_DTYPES, Inputs, make_inputs
from flash_hopper.testing.ragged_targets import Call, expect_ragged, expect_ragged_gradients

_AROUND = 7.0  # what lies around a buffer of gradients

Attention = Callable[..., Any]
"""Something with the signature of `flash_hopper.flash_attn_func`, or of `flash_attn_varlen_func` for ragged cases."""

Results = dict[str, Tensor]
"""What a call gave: out, lse if it was returned, and dq, dk, dv as far as they were asked for."""


@dataclass(frozen=True)
class CaseResult:
    """Outcome of a case. `message` is one line, empty if it passed.

    `worst_error` is the largest absolute error of out or a gradient, `worst_ratio` the largest error of anything as a
    multiple of what is allowed; both are infinite if no values could be compared.
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

    `function` is called like `flash_hopper.flash_attn_func`, which is the default, or, for a ragged case, like
    `flash_attn_varlen_func`. An exception, whatever it is,
    makes the case fail with its text.
    """
    try:
        found = _checked(case, torch.device(device), function or _public_function(case), repeat)
    except Exception as error:
        text = str(error) if isinstance(error, _Broken) else f"{type(error).__name__}: {error}"
        return CaseResult(case, False, " ".join(text.split()), torch.inf, torch.inf)
    message = "; ".join(part.message for part in found.values() if not part.passed)
    worst_error = max(part.worst_error for name, part in found.items() if name != "lse")
    return CaseResult(case, not message, message, worst_error, max(part.worst_ratio for part in found.values()))


def lost_device(device: torch.device | str) -> str | None:
    """What a CUDA device answers to a trivial request if its context is beyond repair; None if it works."""
    place = torch.device(device)
    if place.type != "cuda":
        return None
    try:
        torch.zeros(1, device=place).add_(1).item()
        torch.cuda.synchronize(place)
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
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


def _checked(case: Case, device: torch.device, function: Attention, repeat: int) -> dict[str, Comparison]:
    """The comparison of each result, by name. Raises _Broken or whatever the function raises."""
    inputs = make_inputs(case, device)
    before = inputs.snapshot()
    first = _call(case, inputs, function)
    expected = _expected(case, inputs, first["out"])
    found = {name: compare(name, x, *expected[name]) for name, x in first.items()}
    fixed = {name: _bits(x) for name, x in first.items() if case.deterministic or name in ("out", "lse")}
    del first
    for count in range(2, repeat + 1):
        if case.give_out:
            inputs.refill_out()
        for name, again in _call(case, inputs, function).items():
            if name not in fixed:
                other = compare(name, again, *expected[name])
                found[name] = max(found[name], other, key=lambda c: c.worst_ratio)
            elif not torch.equal(fixed[name], _bits(again)):
                differing = int((fixed[name] != _bits(again)).sum())
                raise _Broken(f"{name} of call {count} differs from that of call 1 in {differing} elements")
    if case.give_out and not inputs.out_is_contained():
        raise _Broken("memory outside the view of out was written")
    changed = inputs.changed(before)
    if changed:
        raise _Broken(f"the memory of {changed} was changed")
    return found


def _public_function(case: Case) -> Attention:
    return flash_attn_varlen_func if case.is_ragged else flash_attn_func


def _expected(case: Case, inputs: Inputs, out: Tensor) -> dict[str, Target]:
    """What float64 gives for each result, with the error allowed; gradients for the out that was returned."""
    problem = case.problem()
    q, k, v, rule = inputs.q, inputs.k, inputs.v, expect
    if case.is_fp8:
        q, k, v = real_values(case, inputs)
        rule = partial(expect_fp8, out_dtype=out.dtype)
    if case.is_ragged:
        call = Call(q, k, v, case.side("q"), case.side("k"), problem.softmax_scale, problem.mask)
        gradients = expect_ragged_gradients(call, out, inputs.dout, inputs.dlse) if case.is_backward else {}
        return expect_ragged(call, rule) | gradients
    options: dict[str, Any] = {"softmax_scale": problem.softmax_scale, "mask": problem.mask}
    right = rule(q, k, v, **options)
    expected = {"out": Target(right.out, right.out_allowed), "lse": Target(right.lse, right.lse_allowed)}
    if case.is_backward:
        expected |= expect_gradients(inputs.q, inputs.k, inputs.v, out, inputs.dout, inputs.dlse, **options)
    return expected


def real_values(case: Case, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """What the codes of an e4m3 case stand for, in float64, shaped like q, k and v."""
    of_q, of_k = (inputs.lengths.get(f"cu_seqlens_{side}") for side in "qk")
    v = inputs.v if inputs.values is None else inputs.values
    found = []
    for name, x, cu_seqlens in (("q", inputs.q, of_q), ("k", inputs.k, of_k), ("v", v, of_k)):
        descale = inputs.descales.get(f"{name}_descale")
        spec = None if descale is None else describe(f"{name}_descale", descale)
        scaled = Scaled(name, case.grid(name)[2], case.grid(name)[1], case.is_packed(name), name == "q")
        places = descale_places(spec, scaled, case.batch, case.heads_k)
        found.append(decode(x, descale, places, case.heads_k, cu_seqlens).real)
    return found[0], found[1], found[2]


def _call(case: Case, inputs: Inputs, function: Attention) -> Results:
    """One call with its backward, if the case asks for it, finished, with everything but the values checked."""
    q, k, v = (
        x.detach().requires_grad_() if case.is_backward and name in case.grads and case.into == "fresh" else x
        for name, x in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True)
    )
    with nan_allocations():
        values: Any = inputs.values if inputs.values is not None else v
        result = function(q, k, values, *_lengths(case, inputs), **call_options(case, inputs))
        results = _unpacked(case, result)
        if case.is_backward and case.into == "fresh":
            results |= _gradients(case, inputs, results, {"q": q, "k": k, "v": v})
        elif case.is_backward:
            results |= _added_gradients(case, inputs, results)
        if q.is_cuda:
            torch.cuda.synchronize(q.device)
    results = {name: x.detach() for name, x in results.items()}
    _check_alike(case, inputs, results)
    return results


def _lengths(case: Case, inputs: Inputs) -> tuple[Any, ...]:
    """What stands behind q, k and v: the scale, or what makes a call ragged."""
    if not case.is_ragged:
        return (case.scale,)
    hints = (max_seqlen(case, side, inputs.q.device) for side in ("q", "k"))
    return inputs.lengths.get("cu_seqlens_q"), inputs.lengths.get("cu_seqlens_k"), *hints


def max_seqlen(case: Case, side: str, device: torch.device) -> Any:
    """max_seqlen_q or max_seqlen_k as the case gives it."""
    value = case.hinted(side)
    if case.hint == "none":
        return None
    if case.hint == "numpy":
        return torch.tensor(value).numpy()[()]  # numpy's own integer
    if case.hint in ("host", "device"):
        return torch.tensor(value, dtype=torch.int32, device=device if case.hint == "device" else "cpu")
    return value


def call_options(case: Case, inputs: Inputs) -> dict[str, Any]:
    """The keyword arguments of the call; none but those that the case is about."""
    given: dict[str, Any] = {"causal": case.causal, "return_lse": case.return_lse}
    if case.give_out:
        given["out"] = inputs.out
    if case.deterministic:
        given["deterministic"] = True
    if (case.left, case.right) != (None, None):
        given["window_size"] = (case.left, case.right)
    if case.chunk:
        given["attention_chunk"] = case.chunk
    given |= inputs.descales
    if case.is_ragged:
        given["softmax_scale"] = case.scale
        given |= {name: x for name, x in inputs.lengths.items() if name.startswith("seqused")}
    return given


def _unpacked(case: Case, result: Any) -> Results:
    if isinstance(result, tuple) != case.return_lse or (case.return_lse and len(result) != 2):
        raise _Broken(f"return_lse={case.return_lse} returned {type(result).__name__}")
    return dict(zip(("out", "lse"), result, strict=True)) if case.return_lse else {"out": result}


def _gradients(case: Case, inputs: Inputs, results: Results, operands: dict[str, Tensor]) -> Results:
    """dq, dk, dv, as far as the case asks for them, from those of out and lse that it passes back."""
    passed = [(results["out"], inputs.dout)] if inputs.dout is not None else []
    passed += [(results["lse"], inputs.dlse)] if inputs.dlse is not None else []
    found = torch.autograd.grad(
        [x for x, _ in passed], [operands[name] for name in case.grads], [grad for _, grad in passed]
    )
    return {f"d{name}": grad for name, grad in zip(case.grads, found, strict=True)}


def _added_gradients(case: Case, inputs: Inputs, results: Results) -> Results:
    """dq, dk, dv, as far as the case asks for them, added to float32 zeros by the explicit backward."""
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    wholes: Results = {}
    targets: dict[str, Tensor | None] = dict.fromkeys(tensors)
    for name in case.grads:
        heads, dim = tensors[name].shape[-2:]
        around = (3, 8) if case.into == "holes" else (0, 0)
        sizes = (*tensors[name].shape[:-2], heads + around[0], dim + around[1])
        wholes[name] = torch.full(sizes, _AROUND, dtype=torch.float32, device=inputs.q.device)
        part = wholes[name][..., around[0] // 2 :, around[1] // 2 :][..., :heads, :dim]
        targets[name] = part.zero_()
    options = call_options(case, inputs)
    del options["return_lse"]
    if case.is_ragged:
        options |= {name: x for name, x in inputs.lengths.items() if name.startswith("cu_seqlens")}
        options |= {f"max_seqlen_{side}": max_seqlen(case, side, inputs.q.device) for side in ("q", "k")}
    options["softmax_scale"] = case.scale
    given = inputs.dout, *tensors.values(), results["out"], results["lse"]
    found = flash_attn_backward_func(*given, dlse=inputs.dlse, grad_out=tuple(targets.values()), **options)  # type: ignore[arg-type]
    if not all(got is given for got, given in zip(found, targets.values(), strict=True)):
        raise _Broken("what is returned are not the given buffers of gradients")
    added = {f"d{name}": target.clone() for name, target in targets.items() if target is not None}
    for name, whole in wholes.items():
        target = targets[name]
        assert target is not None, "a buffer that was made"
        target.fill_(_AROUND)
        if not bool((whole == _AROUND).all()):
            raise _Broken(f"memory outside the view of d{name} was written")
    return added


def _check_alike(case: Case, inputs: Inputs, results: Results) -> None:
    """Shapes, dtypes and devices of everything; out is the one that was given."""
    dtype, device = inputs.q.dtype, inputs.q.device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if case.is_fp8:
        dtype = TORCH_DTYPES[case.out_dtype]
    shapes = {"out": case.shape("o"), "dq": case.shape("q"), "dk": case.shape("k"), "dv": case.shape("v")}
    for name, x in results.items():
        is_added = case.into != "fresh" and name in ("dq", "dk", "dv")
        want: tuple[Any, ...] = shapes.get(name), torch.float32 if is_added else dtype, device
        if name == "lse":
            want = case.lse_shape, wide, device
        if (tuple(x.shape), x.dtype, x.device) != want:
            raise _Broken(f"{name} is {(tuple(x.shape), x.dtype, x.device)}, expected {want}")
    out = results["out"]
    if inputs.out is not None and (out.data_ptr() != inputs.out.data_ptr() or out.stride() != inputs.out.stride()):
        raise _Broken("what is returned is not the given out")


def _bits(x: Tensor) -> Tensor:
    """A compact copy of x as integers, for comparisons in which NaN equals itself."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.clone(memory_format=torch.contiguous_format).view(integer)
