"""Memory of a backward beyond its gradients: statistics and float32 accumulators, linear in the lengths."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from backward_calls import leaves
from device_memory import in_use, peak_of

import flash_hopper
from flash_hopper.geometry.arith import round_up
from flash_hopper.plan.backward import STATISTICS_ROWS, BackwardDkdvPlan
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.suites import backward_plans_of

SLACK = 64 * 1024  # tile counters and the like

CASES = [
    backward_case(64, (4096, 4096), batch=2, heads=(8, 8)),
    backward_case(64, (1000, 4096), True, batch=2, heads=(8, 2)),
    backward_case(128, (4096, 4096), True, batch=2, heads=(8, 8)),
    backward_case(128, (4095, 1001), batch=2, heads=(8, 2)),
    backward_case(128, (4096, 4096), True, batch=2, heads=(8, 2), deterministic=True),
    backward_case((192, 128), (4096, 2048), True, batch=2, heads=(8, 8)),
    backward_case(256, (2048, 4096), batch=2, heads=(8, 2)),
    backward_case(128, (4096, 4096), True, batch=2, heads=(8, 2), grads="q"),
    backward_case(64, (4096, 4096), batch=2, heads=(8, 2), grads="kv"),
    backward_case(64, (4096, 4096), batch=2, heads=(8, 8), dlse="bhs"),
]


def used_by_backward(case, device):
    """Bytes in use at the peak of a backward beyond those in use before it, and the bytes of the gradients."""
    inputs = make_inputs(case, device)
    tensors = leaves(inputs, case.grads)
    wanted = [x for x in tensors if x.requires_grad]

    def run():
        out, lse = flash_hopper.flash_attn_func(
            *tensors, causal=case.causal, deterministic=case.deterministic, return_lse=True
        )
        passed = [(x, grad) for x, grad in ((out, inputs.dout), (lse, inputs.dlse)) if grad is not None]
        results, wishes = zip(*passed, strict=True)
        grads, used = peak_of(device, lambda: torch.autograd.grad(results, wanted, wishes))
        return used, sum(x.numel() * x.element_size() for x in grads)

    run()  # counters and whatever else is kept
    return run()


def workspace(case):
    """Statistics of every row, and the accumulators of a backward that adds in memory; bytes."""
    dkdv = next((plan for plan in backward_plans_of(case) if isinstance(plan, BackwardDkdvPlan)), None)
    rows = round_up(case.seqlen_q, STATISTICS_ROWS if dkdv is None else dkdv.tile_m)
    values = 2 * case.batch * case.heads * rows
    if dkdv is not None and dkdv.adds_dq:
        values += case.batch * case.heads * rows * dkdv.tile_hdim
    if dkdv is not None and dkdv.adds_dkdv:
        keys = round_up(case.seqlen_k, dkdv.tile_n)
        values += case.batch * case.heads_k * keys * (dkdv.tile_hdim + dkdv.tile_hdimv)
    return 4 * values


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_backward_needs_statistics_and_accumulators_and_nothing_else(case, device):
    used, gradients = used_by_backward(case, device)
    if len(case.grads) == 1 and case.grads != "q":
        gradients *= 2  # k and v are one kernel's work
    assert abs(used - gradients - workspace(case)) < SLACK, (used, gradients, workspace(case))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_memory_grows_with_the_lengths_and_not_with_their_product(d, deterministic, device):
    used = []
    for length in (1024, 2048, 4096, 8192):
        case = backward_case(d, (length, length), True, heads=(4, 4), deterministic=deterministic)
        used.append(used_by_backward(case, device)[0])
    for shorter, longer in pairwise(used):
        assert longer < 2 * shorter + SLACK, used


@pytest.mark.parametrize(
    ("dout", "is_copied"),
    [
        ("bshd", False), ("bhsd", False), ("sbhd", False), ("headslice", False), ("dimslice", False), ("offset", False),
        ("expand_batch", False), ("expand_rows", False), ("expand_heads", False), ("misaligned", True),
        ("misstride", True), ("dimfirst", True), ("step", True), ("expand_dim", True), ("expand_all", True),
    ],
)  # fmt: skip
def test_only_a_gradient_of_out_that_tma_cannot_address_is_copied(dout, is_copied, device):
    case = backward_case(128, (1000, 1000), batch=4, heads=(8, 8), dout=dout)
    used, gradients = used_by_backward(case, device)
    copy = 2 * case.batch * case.seqlen_q * case.heads * case.dv if is_copied else 0
    assert abs(used - gradients - workspace(case) - copy) < SLACK, (used, gradients, workspace(case), copy)


def test_nothing_stays_allocated_after_a_backward(device):
    case = replace(CASES[1], dlse="bhs")
    used_by_backward(case, device)
    before = in_use(device)
    for _ in range(3):
        used_by_backward(case, device)
    assert in_use(device) == before


def test_a_forward_that_needs_no_gradient_keeps_nothing(device):
    case = CASES[0]
    inputs = make_inputs(case, device)
    size = 2 * case.batch * case.seqlen_q * case.heads * case.dv
    lse = 4 * case.batch * case.heads * case.seqlen_q
    for tensors, kept in (((inputs.q, inputs.k, inputs.v), size), (leaves(inputs), size + lse)):
        before = in_use(device)
        out = flash_hopper.flash_attn_func(*tensors)
        assert abs(in_use(device) - before - kept) < SLACK
        del out
