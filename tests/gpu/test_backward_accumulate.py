"""The backward as a call of its own on a GPU: fresh gradients, and contributions added to float32 buffers.

A suite by the element rule, parts of the keys of many tiles, buffers with holes in them, every route of the backward,
repeated additions, graphs. The checks that both floors share are in `test_torch_explicit.py`.
"""

from dataclasses import replace

import pytest
import torch
from ragged_steps import attention

from flash_hopper import flash_attn_backward_func
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.compare import compare
from flash_hopper.testing.gradients import expect_gradients
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.ragged_cases import SIDES, ragged_case
from flash_hopper.testing.ragged_targets import Call, expect_ragged_gradients
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import suite
from flash_hopper.testing.window_cases import as_backward

CASES = [
    backward_case(64, (500, 700), batch=2, heads=(4, 4)),
    backward_case(64, (640, 640), True, batch=2, heads=(8, 2), dlse="bhs"),
    backward_case(128, (500, 500), True, batch=2, heads=(4, 4)),
    backward_case(128, (450, 640), batch=2, heads=(8, 2), dlse="bhs"),
    backward_case(128, (300, 333), heads=(4, 2), dtype=DType.FP16),
    backward_case((192, 128), (400, 500), True, batch=2, heads=(4, 2)),
    backward_case(256, (300, 400), batch=2, heads=(4, 2)),
    backward_case(96, (300, 401), True, heads=(3, 1)),
    backward_case(40, (200, 301), heads=(2, 2)),
]
RAGGED = [
    as_backward(ragged_case(64, (500, 600), "causal", batch=9, heads=(4, 2)), dlse="bhs"),
    as_backward(ragged_case(128, (500, 600), "full", batch=7, heads=(4, 4), **SIDES[2])),
    as_backward(ragged_case(128, (300, 300), "local", 3, batch=30, heads=(4, 2), lengths_q="empty_every")),
    as_backward(ragged_case(64, (300, 400), "causal", batch=6, heads=(4, 2), **SIDES[7])),
    as_backward(ragged_case(256, (300, 300), "full", batch=5, heads=(2, 2))),
]
NAMES = ("dq", "dk", "dv")
every_case = pytest.mark.parametrize("case", CASES, ids=str)
every_route = pytest.mark.parametrize("deterministic", [False, True])


def buffers_like(inputs, value=0.0):
    """Compact float32 buffers for dq, dk and dv."""
    return tuple(torch.full_like(x, value, dtype=torch.float32) for x in (inputs.q, inputs.k, inputs.v))


def strided(x):
    """A buffer of the sizes of x that is a part of a larger one, in every dimension but the batch, and that larger one."""
    sizes = [*x.shape[:-2], x.shape[-2] + 3, x.shape[-1] + 8]
    whole = torch.full(sizes, 7.0, dtype=torch.float32, device=x.device)
    part = whole[..., 1 : 1 + x.shape[-2], 4 : 4 + x.shape[-1]]
    part.zero_()
    return part, whole


def contribution(case, inputs, results, keys=slice(None), **options):
    """The call for a part of the keys, with out and lse of all of them."""
    out, lse = results
    given = {"causal": case.causal, "deterministic": case.deterministic, "dlse": inputs.dlse, **options}
    k, v = (x[:, keys] for x in (inputs.k, inputs.v))
    return flash_attn_backward_func(inputs.dout, inputs.q, k, v, out, lse, case.scale, **given)


def assert_expected(case, inputs, out, found, rounded=True):
    """Values by the rule for gradients; float32 sums are rounded first, as a caller would at the end."""
    options = {"softmax_scale": case.problem().softmax_scale, "mask": case.mask}
    expected = expect_gradients(inputs.q, inputs.k, inputs.v, out, inputs.dout, inputs.dlse, **options)
    for name, got in zip(NAMES, found, strict=True):
        result = compare(name, got.to(inputs.q.dtype) if rounded else got, *expected[name])
        assert result.passed, result.message


@pytest.mark.parametrize("case", suite("accumulate"), ids=str)
def test_the_accumulate_suite_passes(case, device):
    result = run_case(case, device, repeat=2)
    assert result.passed, result.message


@every_route
@every_case
def test_both_forms_give_right_gradients(case, deterministic, device):
    case = replace(case, deterministic=deterministic)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    fresh = contribution(case, inputs, results)
    assert all(x.dtype == inputs.q.dtype for x in fresh)
    assert_expected(case, inputs, results[0], fresh)
    into = buffers_like(inputs)
    added = contribution(case, inputs, results, grad_out=into)
    assert all(a is b for a, b in zip(added, into, strict=True))
    assert_expected(case, inputs, results[0], into)


@every_route
@every_case
def test_halves_of_the_keys_add_up_to_the_whole_gradient(case, deterministic, device):
    """As in a ring: out and lse are those of all keys; the mask of a half is aligned by its own length."""
    case = replace(case, deterministic=deterministic)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    dq, dk, dv = buffers_like(inputs)
    seqlen_k, cut = case.seqlen_k, case.seqlen_k // 2 + 3
    for keys in (slice(0, cut), slice(cut, seqlen_k)):
        window = (None, seqlen_k - keys.stop) if case.causal else (None, None)
        into = (dq, dk[:, keys], dv[:, keys])
        contribution(case, inputs, results, keys, causal=False, window_size=window, grad_out=into)
    assert_expected(case, inputs, results[0], (dq, dk, dv))


@every_case
def test_each_buffer_may_be_missing_and_the_others_get_the_same(case, device):
    case = replace(case, deterministic=True)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    whole = contribution(case, inputs, results, grad_out=buffers_like(inputs))
    for wanted in ("q", "k", "v", "qk", "qv", "kv"):
        into = tuple(x if name in wanted else None for name, x in zip("qkv", buffers_like(inputs), strict=True))
        found = contribution(case, inputs, results, grad_out=into)
        for name, got, want in zip("qkv", found, whole, strict=True):
            assert (got is None) == (name not in wanted)
            assert got is None or torch.equal(got, want), (wanted, name)


@every_route
@every_case
def test_buffers_with_holes_are_written_where_they_are_and_nowhere_else(case, deterministic, device):
    case = replace(case, deterministic=deterministic)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    made = [strided(x) for x in (inputs.q, inputs.k, inputs.v)]
    contribution(case, inputs, results, grad_out=tuple(part for part, _ in made))
    assert_expected(case, inputs, results[0], [part for part, _ in made])
    for part, whole in made:
        part.fill_(7.0)
        assert (whole == 7.0).all()


@every_case
def test_what_the_buffers_hold_stays_part_of_the_sum(case, device):
    case = replace(case, deterministic=True)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    once = contribution(case, inputs, results, grad_out=buffers_like(inputs))
    for start in (64.0, -3.0):
        total = buffers_like(inputs, start)
        for _ in range(3):
            contribution(case, inputs, results, grad_out=total)
        for got, one in zip(total, once, strict=True):
            want = start + 3 * one.double()
            allowed = 4 * 2.0**-23 * (abs(start) + 3 * one.double().abs()) + 1e-6 * one.double().abs().amax()
            assert ((got.double() - want).abs() <= allowed).all()


@every_case
def test_deterministic_additions_give_the_same_bits(case, device):
    case = replace(case, deterministic=True)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    first = contribution(case, inputs, results, grad_out=buffers_like(inputs))
    for _ in range(20):
        again = contribution(case, inputs, results, grad_out=buffers_like(inputs))
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_route
@pytest.mark.parametrize("case", RAGGED, ids=str)
def test_contributions_of_ragged_batches_are_added(case, deterministic, device):
    """Rows of no sequence keep what their buffers hold."""
    case = replace(case, deterministic=deterministic)
    inputs = make_inputs(case, device)
    tensors = inputs.q, inputs.k, inputs.v
    results = attention(case, tensors, inputs.lengths)
    options = {
        "causal": case.causal, "window_size": (case.left, case.right), "attention_chunk": case.chunk,
        "deterministic": deterministic, "dlse": inputs.dlse, "max_seqlen_q": case.hinted("q"),
        "max_seqlen_k": case.hinted("k"), **inputs.lengths,
    }  # fmt: skip
    into = buffers_like(inputs)
    found = flash_attn_backward_func(inputs.dout, *tensors, *results, case.scale, grad_out=into, **options)
    sides = case.side("q"), case.side("k")
    call = Call(*tensors, *sides, case.problem().softmax_scale, case.mask)
    expected = expect_ragged_gradients(call, results[0], inputs.dout, inputs.dlse)
    fresh = flash_attn_backward_func(inputs.dout, *tensors, *results, case.scale, **options)
    for name, got, plain in zip(NAMES, found, fresh, strict=True):
        for result in (compare(name, got.to(inputs.q.dtype), *expected[name]), compare(name, plain, *expected[name])):
            assert result.passed, result.message
    held = buffers_like(inputs, 5.0)
    flash_attn_backward_func(inputs.dout, *tensors, *results, case.scale, grad_out=held, **options)
    for got, target in zip(held, (expected[name] for name in NAMES), strict=True):
        is_unused = (target.want == 0).all(dim=-1, keepdim=True).all(dim=-2, keepdim=True) & (target.allowed < 1e-200)
        assert (got[is_unused.expand_as(got)] == 5.0).all()


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[6]], ids=str)
def test_a_graph_of_contributions_adds_at_every_replay(case, device):
    case = replace(case, deterministic=True)
    inputs = make_inputs(case, device)
    results = attention(case, (inputs.q, inputs.k, inputs.v), {})
    once = contribution(case, inputs, results, grad_out=buffers_like(inputs))
    into = buffers_like(inputs)
    contribution(case, inputs, results, grad_out=into)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        contribution(case, inputs, results, grad_out=into)
    for x in into:
        x.zero_()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize(device)
    for got, one in zip(into, once, strict=True):
        torch.testing.assert_close(got, 3 * one, rtol=1e-5, atol=1e-6 * float(one.abs().amax()))
