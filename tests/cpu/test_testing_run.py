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


def right(q, k, v, scale, **options):
    return flash_hopper.flash_attn_func(q, k, v, scale, **options)


@pytest.mark.parametrize("case", sample(suite("smoke"), 30), ids=str)
def test_the_public_function_passes_on_the_cpu(case):
    result = run_case(case, repeat=2)
    assert result.passed, result.message
    assert result.message == ""
    assert result.worst_ratio < 1
    assert math.isfinite(result.worst_error)


def test_the_forward_suite_passes_on_the_cpu_where_it_is_small():
    small = [
        c for c in suite("forward") if c.batch * c.heads * max(c.seqlen_q, 1) * max(c.seqlen_k, 1) * (c.d + c.dv) < 1e7
    ]
    assert len(small) > 800
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
