"""Programmatic dependent launch: kernels that start while the one before them still runs read nothing too early.

Thousands of forwards and backwards back to back, in which the gradient of out is written at the last moment by a slow
kernel: the library's own forward, which lets its successor start early, or a copy. Two sets of values take turns, so
that a stale value is a wrong one. Comparisons are counted on the GPU: nothing waits between launches.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
from backward_calls import leaves, mistakes, step

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.inputs import make_inputs

LAUNCHES = 10_000
BURST = 20  # steps without a foreign kernel among them
SLOW_KEYS = 6000  # of the forward that writes dout
SLEEP_CYCLES = 20_000  # about 10 us

CASES = [
    backward_case(64, (300, 260), batch=2, heads=(4, 4)),
    backward_case(64, (300, 260), True, batch=2, heads=(4, 2), dlse="bhs"),
    backward_case(128, (200, 300), True, batch=2, heads=(4, 4)),
    backward_case(128, (200, 300), batch=2, heads=(4, 1), dtype=DType.FP16),
    backward_case(64, (300, 260), True, batch=2, heads=(4, 2), deterministic=True, dlse="bhs"),
    backward_case(128, (200, 300), batch=2, heads=(4, 2), deterministic=True),
    backward_case((192, 128), (200, 150), True, batch=2, heads=(4, 4)),
    backward_case(256, (150, 200), batch=2, heads=(4, 2), dlse="bhs"),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


class SlowForward:
    """Writes dout with the library's own forward kernel: each row of v of a set is one number, and so is each row."""

    def __init__(self, case, dout):
        self.case, self.dout = case, dout
        make = {"dtype": dout.dtype, "device": dout.device}
        self.q = torch.randn(dout.shape[0], dout.shape[1], dout.shape[2], case.d, **make)
        self.k = torch.randn(dout.shape[0], SLOW_KEYS, dout.shape[2], case.d, **make)
        self.v = [torch.randn(dout.shape[0], SLOW_KEYS, dout.shape[2], case.dv, **make) + sign for sign in (2, -2)]

    def write(self, number):
        with torch.no_grad():
            flash_hopper.flash_attn_func(self.q, self.k, self.v[number], out=self.dout)


class SlowCopy:
    """Writes dout with a copy after a pause."""

    def __init__(self, case, dout):
        self.dout = dout
        self.sources = [torch.randn_like(dout) + sign for sign in (2, -2)]

    def write(self, number):
        torch.cuda._sleep(SLEEP_CYCLES)
        self.dout.copy_(self.sources[number])


def prepared(case, device, producer):
    """Tensors of a case, the producer of their dout, and what each of its two sets gives, one call at a time."""
    inputs = make_inputs(case, device)
    tensors = leaves(inputs)
    producer = producer(case, inputs.dout)
    wanted = []
    for number in (0, 1):
        producer.write(number)
        torch.cuda.synchronize(device)
        wanted.append(step(tensors, inputs.dout, inputs.dlse, case))
        torch.cuda.synchronize(device)
    for a, b in zip(wanted[0][2:], wanted[1][2:], strict=True):
        assert not torch.allclose(a, b, rtol=0.1), "the two sets must differ"
    return inputs, tensors, producer, wanted


def count_mistakes(case, device, producer, launches):
    """Steps whose dout is written just before their backward, in bursts."""
    inputs, tensors, producer, wanted = prepared(case, device, producer)
    found = torch.zeros((), dtype=torch.int64, device=device)
    for first in range(0, launches, BURST):
        results = []
        for i in range(first, first + BURST):
            q, k, v = tensors
            options = {"causal": case.causal, "deterministic": case.deterministic}
            out, lse = flash_hopper.flash_attn_func(q, k, v, case.scale, return_lse=True, **options)
            producer.write(i % 2)
            passed = [(out, inputs.dout), (lse, inputs.dlse)][: 1 if inputs.dlse is None else 2]
            grads = torch.autograd.grad([x for x, _ in passed], tensors, [grad for _, grad in passed])
            results.append((out.detach(), lse.detach(), *grads))
        for i, got in enumerate(results, first):
            found += mistakes(got, wanted[i % 2], case)
    return int(found)


@every_case
def test_backwards_behind_the_librarys_own_slow_kernel_read_no_stale_gradient(case, device):
    assert count_mistakes(case, device, SlowForward, LAUNCHES) == 0


@every_case
def test_backwards_behind_a_slow_copy_read_no_stale_gradient(case, device):
    assert count_mistakes(case, device, SlowCopy, LAUNCHES // 5) == 0


@every_case
def test_inputs_written_just_before_a_step_and_overwritten_just_after_it_are_the_ones_used(case, device):
    """q, k, v and dout of two sets take turns in the same memory, which holds NaN in between."""
    sets = [make_inputs(replace(case, seed=seed), device) for seed in (0, 1)]
    wanted = []
    for inputs in sets:
        wanted.append(step(leaves(inputs), inputs.dout, inputs.dlse, case))
        torch.cuda.synchronize(device)
    static = [torch.empty_like(x) for x in (sets[0].q, sets[0].k, sets[0].v, sets[0].dout)]
    dlse = None if sets[0].dlse is None else torch.empty_like(sets[0].dlse)
    tensors = tuple(x.detach().requires_grad_() for x in static[:3])
    found = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(LAUNCHES // 10):
        inputs = sets[i % 2]
        sources = [(x, y) for x, y in zip(static, (inputs.q, inputs.k, inputs.v, inputs.dout), strict=True)]
        for x, source in [*sources, *([(dlse, inputs.dlse)] if dlse is not None else [])]:
            x.data.copy_(source)
        got = step(tensors, static[3], dlse, case)
        for x in static:
            x.data.fill_(float("nan"))
        found += mistakes(got, wanted[i % 2], case)
    assert int(found) == 0


def test_backwards_of_different_kernels_follow_each_other_without_a_gap(device):
    """Every kind is the predecessor of every other, and of itself."""
    made = [prepared(case, device, SlowForward) for case in CASES]
    found = torch.zeros((), dtype=torch.int64, device=device)
    for turn, first in product(range(5), range(len(CASES))):
        results = []
        for second in range(len(CASES)):
            for i in (first, second):
                inputs, tensors, producer, wanted = made[i]
                number = (turn + second) % 2
                producer.write(number)
                results.append((step(tensors, inputs.dout, inputs.dlse, CASES[i]), wanted[number], CASES[i]))
        for got, want, case in results:
            found += mistakes(got, want, case)
    assert int(found) == 0
