"""run_case: every promise of a call, broken on purpose, is found; the CPU backend keeps them all."""

import math
from dataclasses import replace

import pytest
import torch

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.cases import Case
from flash_hopper.testing.run import nan_allocations, run_case
from flash_hopper.testing.suites import sample, suite

CASE = Case(DType.BF16, 2, 4, 2, 30, 40, 16, 16, causal=True)
OWN_OUT = replace(CASE, give_out=False)
BACK = replace(OWN_OUT, direction="backward", dlse="bhs")


def right(q, k, v, scale, **options):
    return flash_hopper.flash_attn_func(q, k, v, scale, **options)


@pytest.mark.parametrize("case", [*sample(suite("smoke"), 30), *sample(suite("backward-smoke"), 40)], ids=str)
def test_the_public_function_passes_on_the_cpu(case):
    result = run_case(case, repeat=2)
    assert result.passed, result.message
    assert result.message == ""
    assert result.worst_ratio < 1
    assert math.isfinite(result.worst_error)


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_a_suite_passes_on_the_cpu_where_it_is_small(name):
    small = [c for c in suite(name) if c.batch * c.heads * max(c.seqlen_q, 1) * max(c.seqlen_k, 1) * (c.d + c.dv) < 1e7]
    assert len(small) > 500
    failures = [f"{r.case}: {r.message}" for r in map(run_case, sample(small, 100)) if not r.passed]
    assert not failures


def last_row_missing(q, k, v, scale, out, **options):
    before = out.clone()
    result = right(q, k, v, scale, out=out, **options)
    out[:, -1] = before[:, -1]
    return result


def written_beside(q, k, v, scale, out, **options):
    result = right(q, k, v, scale, out=out, **options)
    last = sum((n - 1) * stride for n, stride in zip(out.shape, out.stride(), strict=True))
    out.as_strided((1,), (1,), out.storage_offset() + last + 1).fill_(7.0)
    return result


def written_in_front(q, k, v, scale, out, **options):
    result = right(q, k, v, scale, out=out, **options)
    out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0.0)
    return result


def input_changed(q, k, v, scale, **options):
    result = right(q, k, v, scale, **options)
    v[1, 3, 0, 0] += 0.5
    return result


def beside_input_changed(q, k, v, scale, **options):
    result = right(q, k, v, scale, **options)
    q.as_strided((1,), (1,), q.storage_offset() + q.numel()).fill_(0.0)
    return result


def out_ignored(q, k, v, scale, out, **options):
    return right(q, k, v, scale, **options)


def another_dtype(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    return out.float(), lse


def half_lse(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    return out, lse.bfloat16()


def lse_by_row(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    return out, lse.transpose(1, 2).contiguous()


def lse_in_base_2(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    return out, lse * math.log2(math.e)


def no_lse(q, k, v, scale, return_lse, **options):
    return right(q, k, v, scale, **options)


def always_lse(q, k, v, scale, return_lse, **options):
    return right(q, k, v, scale, return_lse=True, **options)


def not_causal(q, k, v, scale, causal, **options):
    return right(q, k, v, scale, **options)


def neighbours_read(q, k, v, scale, **options):
    """Key 40 of an input of 40 keys: what lies behind the view."""
    longer = [x.as_strided((x.shape[0], 41, *x.shape[2:]), x.stride(), x.storage_offset()) for x in (k, v)]
    return right(q, *longer, scale, **options)


def uninitialised(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    fresh = torch.empty_like(out)
    fresh[:, :-1] = out[:, :-1]
    return fresh, lse


def refusing(q, k, v, scale, **options):
    raise flash_hopper.UnsupportedError("not\ntoday")


@pytest.mark.parametrize(
    ("case", "function", "told"),
    [
        (CASE, last_row_missing, "out[0, 29, 0, 0] = nan"),
        (CASE, written_beside, "outside the view of out"),
        (CASE, written_in_front, "outside the view of out"),
        (replace(CASE, layout="headslice"), written_beside, "outside the view of out"),
        (CASE, input_changed, "the memory of v was changed"),
        (CASE, beside_input_changed, "the memory of q was changed"),
        (CASE, out_ignored, "not the given out"),
        (OWN_OUT, another_dtype, "out is"),
        (CASE, half_lse, "lse is"),
        (CASE, lse_by_row, "lse is"),
        (CASE, lse_in_base_2, "lse["),
        (CASE, no_lse, "return_lse=True returned Tensor"),
        (replace(CASE, return_lse=False), always_lse, "return_lse=False returned tuple"),
        (CASE, not_causal, "out["),
        (replace(CASE, causal=False), neighbours_read, "elements are wrong"),
        (OWN_OUT, uninitialised, "= nan, float64 has"),
        (CASE, refusing, "UnsupportedError: not today"),
    ],
)
def test_a_broken_promise_is_found_and_told_in_one_line(case, function, told):
    result = run_case(case, function=function)
    assert not result.passed
    assert told in result.message
    assert "\n" not in result.message


class Through(torch.autograd.Function):
    """x, whose gradient is changed on its way back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad.clone()), None


def altered(operand, change):
    """The right function with another gradient of one operand."""

    def function(q, k, v, scale, **options):
        tensors = {"q": q, "k": k, "v": v}
        if tensors[operand].requires_grad:
            tensors[operand] = Through.apply(tensors[operand], change)
        return right(*tensors.values(), scale, **options)

    return function


def filled(index, value):
    def change(grad):
        grad[index] = value
        return grad

    return change


def dlse_ignored(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    return out, Through.apply(lse, torch.zeros_like)


def dout_changed(q, k, v, scale, **options):
    out, lse = right(q, k, v, scale, **options)
    out.register_hook(lambda grad: grad.mul_(2).div_(2).add_(0.5).sub_(0.5))
    return out, lse


def input_changed_in_the_backward(q, k, v, scale, **options):
    result = right(q, k, v, scale, **options)

    def change(grad):
        k.data[0, 0] = 0.0

    result[0].register_hook(change)
    return result


def no_gradient(q, k, v, scale, **options):
    with torch.no_grad():
        return right(q, k, v, scale, **options)


def of_another_scale(q, k, v, scale, **options):
    """The right out and lse; gradients as for scores that were scaled twice."""
    return right(Through.apply(q, lambda grad: grad / 4), Through.apply(k, lambda grad: grad / 4), v, scale, **options)


@pytest.mark.parametrize(
    ("case", "function", "told"),
    [
        (BACK, altered("q", filled((0, -1), math.nan)), "dq[0, 29, 0, 0] = nan"),
        (BACK, altered("k", filled((1, 39), 0.0)), "dk[1, 39, "),
        (BACK, altered("v", filled((1, 3, 1, 5), 9.0)), "dv[1, 3, 1, 5] = 9"),
        (BACK, altered("v", lambda grad: grad.roll(1, dims=2)), "dv["),
        (replace(BACK, causal=False), altered("q", lambda grad: -grad), "dq["),
        (BACK, of_another_scale, "dk["),
        (BACK, dlse_ignored, "dq["),
        (replace(BACK, dlse="none"), no_gradient, "does not require grad"),
        (BACK, dout_changed, "the memory of dout was changed"),
        (BACK, input_changed_in_the_backward, "the memory of k was changed"),
        (replace(BACK, layout="headslice"), altered("q", filled((0, 3), 1.0)), "dq[0, 3"),
        (replace(BACK, grads="v"), altered("v", filled((0, 0), 1.0)), "dv[0, 0, "),
        (replace(BACK, return_lse=False, dlse="none"), altered("q", filled((0, 2), math.inf)), "dq[0, 2, "),
    ],
)
def test_a_wrong_gradient_is_found_and_told_in_one_line(case, function, told):
    result = run_case(case, function=function)
    assert not result.passed
    assert told in result.message
    assert "\n" not in result.message


def test_only_the_gradients_asked_for_are_computed():
    asked = []

    def watching(q, k, v, scale, **options):
        asked.append((q.requires_grad, k.requires_grad, v.requires_grad))
        return right(q, k, v, scale, **options)

    for grads in ("q", "kv", "qkv"):
        assert run_case(replace(BACK, grads=grads), function=watching).passed
    assert asked == [(True, False, False), (False, True, True), (True, True, True)]


def test_deterministic_is_passed_on_and_no_other_option_is_added():
    given = []

    def watching(q, k, v, scale, **options):
        given.append(options)
        return right(q, k, v, scale, **options)

    for deterministic in (True, False):
        assert run_case(replace(BACK, deterministic=deterministic), function=watching).passed
    assert given[0] == {**given[1], "deterministic": True}
    assert set(given[1]) == {"causal", "return_lse"}


def drifting_gradient(at_call, change):
    """The right function; in one of its calls the gradient of q is changed."""
    calls = []

    def function(q, k, v, scale, **options):
        calls.append(1)
        return right(Through.apply(q, change) if len(calls) == at_call else q, k, v, scale, **options)

    return function


def test_gradients_of_repeated_calls_must_agree_bit_for_bit_if_deterministic_and_be_right_otherwise():
    def ulp(grad):
        grad.view(torch.int16)[1, 2, 3, 4] += 1
        return grad

    once = drifting_gradient(3, ulp)
    result = run_case(replace(BACK, deterministic=True), function=once, repeat=5)
    assert result.message == "dq of call 3 differs from that of call 1 in 1 elements"
    assert run_case(BACK, function=drifting_gradient(3, ulp), repeat=5).passed
    wrong = run_case(BACK, function=drifting_gradient(3, filled((1, 2), math.nan)), repeat=5)
    assert "dq[1, 2, " in wrong.message
    assert wrong.worst_ratio == math.inf


def test_calls_that_differ_are_found_when_repeated():
    calls = []

    def drifting(q, k, v, scale, **options):
        out, lse = right(q, k, v, scale, **options)
        calls.append(1)
        if len(calls) == 4:
            lse[1, 2, 3] = torch.nextafter(lse[1, 2, 3], torch.tensor(100.0))
        return out, lse

    result = run_case(CASE, function=drifting, repeat=5)
    assert result.message == "lse of call 4 differs from that of call 1 in 1 elements"
    assert len(calls) == 4


def test_each_repeated_call_starts_from_nan():
    seen = []

    def watching(q, k, v, scale, out, **options):
        seen.append(bool(out.isnan().all()))
        return right(q, k, v, scale, out=out, **options)

    assert run_case(CASE, function=watching, repeat=3).passed
    assert seen == [True, True, True]


def test_allocations_are_nan_only_within_the_context():
    with nan_allocations():
        assert torch.empty(5).isnan().all()
        assert torch.empty(5, dtype=torch.bfloat16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
