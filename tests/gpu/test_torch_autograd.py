"""Gradients by eager autograd through the kernels, and what only a GPU can show: memory, streams, devices."""

import pytest
import torch
from autograd_checks import *  # noqa: F403
from device_memory import in_use, peak_of
from places import Place

from flash_hopper import flash_attn_func
from flash_hopper.geometry.arith import round_up
from flash_hopper.problem.features import Feature

SLEEP_CYCLES = 20_000_000  # about 10 ms: far longer than any launch
ROWS = 256  # statistics and accumulators are padded to at most a multiple of this many rows
SLACK_BYTES = 64 * 1024


@pytest.fixture
def place(device) -> Place:
    return Place(device, torch.bfloat16, 2e-2)


def bytes_of(*tensors):
    return sum(x.numel() * x.element_size() for x in tensors)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads_k", [8, 2])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_training_needs_memory_for_results_statistics_and_accumulators_only(place, d, heads_k, deterministic):
    """Nothing quadratic: the forward keeps out and LSE, the backward two numbers a row and at most one float32 number for
    each of dQ's, and for grouped queries of dK's and dV's."""
    batch, heads, options = 2, 8, {"causal": True, "deterministic": deterministic}
    for seqlen in (2048, 8192):
        inputs = place.inputs(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, heads=heads, heads_k=heads_k, d=d, dv=d)
        dout = torch.ones_like(inputs[0])
        torch.autograd.grad(flash_attn_func(*inputs, **options), inputs, dout)
        (out, lse), used = peak_of(place.device, lambda i=inputs: flash_attn_func(*i, return_lse=True, **options))
        assert used <= bytes_of(out, lse) + SLACK_BYTES
        found, used = peak_of(place.device, lambda i=inputs, o=out, g=dout: torch.autograd.grad(o, i, g))
        rows = batch * round_up(seqlen, ROWS)
        numbers = 2 * heads * rows
        if not deterministic:
            numbers += heads * rows * d + (2 * heads_k * rows * d if heads_k < heads else 0)
        assert used <= bytes_of(*found) + 4 * numbers + SLACK_BYTES


@pytest.mark.parametrize("subset", ["q", "k", "v"])
def test_gradients_that_nobody_needs_take_no_memory(place, subset):
    inputs = place.inputs(batch=2, seqlen_q=4096, seqlen_k=4096, heads=8, heads_k=8, requires_grad=subset)
    dout = torch.ones_like(inputs[0])
    wanted = [x for x in inputs if x.requires_grad]
    torch.autograd.grad(flash_attn_func(*inputs), wanted, dout)
    out = flash_attn_func(*inputs)
    found, used = peak_of(place.device, lambda: torch.autograd.grad(out, wanted, dout))
    pairs = 1 if subset == "q" else 2  # dk and dv come from one kernel
    assert used <= pairs * bytes_of(*found) + 8 * 2 * 8 * 4096 + SLACK_BYTES


def test_repeated_training_steps_leave_no_memory_behind(place):
    inputs = place.inputs(batch=2, seqlen_q=1024, seqlen_k=1024)
    held = []
    for _ in range(5):
        flash_attn_func(*inputs, causal=True).sum().backward()
        for x in inputs:
            x.grad = None
        torch.cuda.synchronize(place.device)
        held.append(in_use(place.device))
    assert held[1:] == held[1:2] * 4


@pytest.mark.parametrize("causal", [False, True])
def test_the_backward_follows_the_order_of_a_side_stream(place, causal):
    """The gradient of out is written late on the stream of the forward, and the inputs are overwritten just after."""
    inputs = place.inputs(seqlen_q=300, seqlen_k=500)
    dout = place.normal(2, 300, 6, 64, seed=8)
    options = {"causal": causal, "deterministic": True}
    want = torch.autograd.grad(flash_attn_func(*inputs, **options), inputs, dout)
    torch.cuda.synchronize(place.device)
    stream = torch.cuda.Stream(place.device)
    for _ in range(5):
        with torch.cuda.stream(stream):
            leaves = [x.detach().clone().requires_grad_() for x in inputs]
            out = flash_attn_func(*leaves, **options)
            late = torch.zeros_like(dout)
            torch.cuda._sleep(SLEEP_CYCLES)
            late.copy_(dout)
            got = torch.autograd.grad(out, leaves, late)
            late.fill_(float("nan"))
            for x in leaves:
                x.detach().fill_(float("nan"))
            out.detach().fill_(float("nan"))
        stream.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_training_on_a_device_that_is_not_the_current_one(place, second_device):
    other = Place(second_device, place.dtype, place.tolerance)
    inputs = place.inputs()
    moved = other.inputs()
    options = {"causal": True, "deterministic": True}
    want = torch.autograd.grad(flash_attn_func(*inputs, **options).sum(), inputs)
    got = torch.autograd.grad(flash_attn_func(*moved, **options).sum(), moved)
    assert all(x.device == second_device for x in got)
    assert all(torch.equal(a, b.to(place.device)) for b, a in zip(got, want, strict=True))


def test_deterministic_is_part_of_what_the_backward_remembers(place):
    inputs = place.inputs()
    for deterministic in (True, False, True):
        out = flash_attn_func(*inputs, deterministic=deterministic)
        problem = out.grad_fn.problem
        assert (Feature.DETERMINISTIC in problem.features) == deterministic
