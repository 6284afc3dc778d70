"""Gradients on the GPU: a sample of the suite, and what a case cannot say: other CTA counts, parts of one another."""

from dataclasses import replace

import pytest
import torch
from backward_calls import assert_same, leaves, step

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.compare import compare
from flash_hopper.testing.gradients import expect_gradients
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import sample, suite

SIZES = {"batch": 2, "heads": (8, 2)}
CASES = [
    backward_case(64, (500, 700), **SIZES, dlse="bhs"),
    backward_case(64, (700, 500), True, batch=2, heads=(4, 4)),
    backward_case(128, (500, 700), True, **SIZES),
    backward_case(128, (450, 300), batch=2, heads=(4, 4), dlse="bhs"),
    backward_case((192, 128), (500, 400), True, **SIZES),
    backward_case(256, (300, 500), **SIZES, dlse="bhs"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("case", sample(suite("backward"), 300), ids=str)
def test_the_backward_suite_passes(case, device):
    result = run_case(case, device, repeat=2)
    assert result.passed, result.message


def assert_right(results, inputs, case):
    out, _, *found = results
    options = {"softmax_scale": case.problem().softmax_scale, "mask": case.mask}
    expected = expect_gradients(inputs.q, inputs.k, inputs.v, out, inputs.dout, inputs.dlse, **options)
    for name, got in zip(("dq", "dk", "dv"), found, strict=True):
        result = compare(name, got, *expected[name])
        assert result.passed, result.message


@pytest.mark.parametrize("deterministic", [False, True])
@every_case
def test_any_number_of_ctas_gives_right_gradients(case, deterministic, device):
    case = replace(case, deterministic=deterministic)
    inputs = make_inputs(case, device)
    tensors = leaves(inputs)
    want = step(tensors, inputs.dout, inputs.dlse, case)
    assert_right(want, inputs, case)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for margin in (1, 7, sms // 2, sms - 3, sms - 1, 10 * sms):
        got = step(tensors, inputs.dout, inputs.dlse, case, sm_margin=margin)
        assert_right(got, inputs, case)
        assert_same(got, want, case)


@every_case
def test_a_part_of_the_gradients_has_the_bits_of_deterministic_ones(case, device):
    """Each is computed by a kernel that owns it, whatever else is asked for."""
    case = replace(case, deterministic=True)
    inputs = make_inputs(case, device)
    whole = dict(zip(("out", "lse", "q", "k", "v"), step(leaves(inputs), inputs.dout, inputs.dlse, case), strict=True))
    for grads in ("q", "k", "v", "qk", "qv", "kv"):
        for deterministic in (True, False):
            if grads[0] == "q" and len(grads) == 2 and not deterministic:
                continue  # may be added up in memory
            part = step(
                leaves(inputs, grads), inputs.dout, inputs.dlse, case, deterministic=deterministic
            )  # fmt: skip
            for name, got in zip(("out", "lse", *grads), part, strict=True):
                assert torch.equal(got, whole[name]), (grads, name)


@every_case
def test_a_strided_gradient_of_out_gives_the_bits_of_a_contiguous_one(case, device):
    case = replace(case, deterministic=True)
    for dout in ("bhsd", "dimfirst", "step", "misaligned", "expand_heads", "expand_dim", "expand_all"):
        inputs = make_inputs(replace(case, dout=dout), device)
        tensors = leaves(inputs)
        got = step(tensors, inputs.dout, inputs.dlse, case)
        plain = inputs.dout.clone(memory_format=torch.contiguous_format)
        assert_same(got, step(tensors, plain, inputs.dlse, case), case)


def test_a_gradient_of_lse_of_zeros_changes_no_bit(device):
    for case in CASES:
        case = replace(case, deterministic=True, dlse="none")
        inputs = make_inputs(case, device)
        tensors = leaves(inputs)
        zeros = torch.zeros(case.batch, case.heads, case.seqlen_q, device=device)
        assert_same(step(tensors, inputs.dout, zeros, case), step(tensors, inputs.dout, None, case), case)


def test_gradients_are_linear_in_those_that_come_back(device):
    """A power of two goes through bit by bit."""
    for case in CASES:
        case = replace(case, deterministic=True)
        inputs = make_inputs(case, device)
        tensors = leaves(inputs)
        dlse = None if inputs.dlse is None else 4 * inputs.dlse
        got = step(tensors, 4 * inputs.dout, dlse, case)
        want = step(tensors, inputs.dout, inputs.dlse, case)
        assert all(torch.equal(a, 4 * b) for a, b in zip(got[2:], want[2:], strict=True))


def test_a_graph_kept_for_a_second_backward_gives_the_same_gradients(device):
    case = replace(CASES[2], deterministic=True)
    inputs = make_inputs(case, device)
    q, k, v = leaves(inputs)
    out = flash_hopper.flash_attn_func(q, k, v, causal=True, deterministic=True)
    first, second = (torch.autograd.grad(out, (q, k, v), inputs.dout, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_refusals_of_a_backward_come_at_the_forward_call_and_allocate_nothing(device):
    inputs = make_inputs(backward_case(128, (300, 300), dtype=DType.BF16), device)
    q, k, v = leaves(inputs)
    attention = flash_hopper.flash_attn_func
    refused = (
        (flash_hopper.ArgumentError, lambda: attention(q, k, v, out=torch.empty(0, device=device))),
        (flash_hopper.UnsupportedError, lambda: attention(q, k, v, num_splits=3)),
        (flash_hopper.UnsupportedError, lambda: attention(q, k, v, softcap=30.0)),
        (flash_hopper.DTypeError, lambda: attention(q.float(), k.float(), v.float())),
    )
    for error, call in refused:
        torch.cuda.synchronize(device)
        with pytest.raises(error):
            call()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for error, call in refused[1:3]:
        with pytest.raises(error):
            call()
    assert torch.cuda.max_memory_allocated(device) == before
