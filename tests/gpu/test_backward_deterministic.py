"""deterministic=True: the same bits a thousand times, in bursts, and beside other work; otherwise right every time."""

from dataclasses import replace

import pytest
import torch
from backward_calls import leaves, step

from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.run import run_case

# every tile of both kernels, both masks, equal and grouped heads, several waves of tiles, lengths that end within a tile
CASES = [
    backward_case(64, (1000, 1100), batch=4, heads=(8, 8), deterministic=True),
    backward_case(64, (1000, 1000), True, batch=4, heads=(8, 2), deterministic=True, dlse="bhs"),
    backward_case(64, (3000, 3000), True, heads=(6, 2), deterministic=True),
    backward_case(64, (900, 1300), True, batch=3, heads=(8, 8), dtype=DType.FP16, deterministic=True),
    backward_case(128, (1300, 700), batch=2, heads=(16, 4), deterministic=True),
    backward_case(128, (1100, 1900), True, batch=2, heads=(16, 16), deterministic=True, dtype=DType.FP16),
    backward_case(128, (2000, 2000), True, heads=(16, 2), deterministic=True, dlse="bhs"),
    backward_case(96, (1500, 800), batch=2, heads=(8, 8), deterministic=True),
    backward_case((192, 128), (900, 1000), True, batch=2, heads=(8, 2), deterministic=True),
    backward_case(192, (1000, 900), batch=2, heads=(8, 8), deterministic=True, dlse="bhs"),
    backward_case(256, (700, 800), True, batch=2, heads=(8, 1), deterministic=True),
    backward_case(256, (800, 700), batch=2, heads=(8, 8), deterministic=True),
    backward_case((64, 256), (500, 600), True, batch=2, heads=(6, 3), deterministic=True),
    backward_case(128, (1000, 1000), True, batch=2, heads=(8, 2), deterministic=True, grads="qv"),
    backward_case(128, (1000, 1000), batch=2, heads=(8, 2), deterministic=True, values="extreme", scale=-0.1),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)


@every_case
def test_a_thousand_backwards_give_the_same_bits(case, device):
    result = run_case(case, device, repeat=1000)
    assert result.passed, result.message


@every_case
def test_backwards_that_follow_each_other_at_once_give_the_same_bits(case, device):
    """No synchronisation between calls: each kernel overlaps with the end of the one before it."""
    inputs = make_inputs(case, device)
    tensors = leaves(inputs, case.grads)
    first = step(tensors, inputs.dout, inputs.dlse, case)
    torch.cuda.synchronize(device)
    for _ in range(10):
        burst = [step(tensors, inputs.dout, inputs.dlse, case) for _ in range(20)]
        torch.cuda.synchronize(device)
        assert all(torch.equal(a, b) for results in burst for a, b in zip(results, first, strict=True))


@pytest.mark.parametrize("case", CASES[::3], ids=str)
def test_other_work_on_the_gpu_does_not_change_the_bits(case, device):
    """A matrix product on another stream takes SMs, cache and bandwidth away at random moments."""
    inputs = make_inputs(case, device)
    tensors = leaves(inputs, case.grads)
    other = torch.cuda.Stream(device)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize(device)
    want = step(tensors, inputs.dout, inputs.dlse, case)
    torch.cuda.synchronize(device)
    for _ in range(30):
        with torch.cuda.stream(other):
            busy = matrix @ matrix
        got = step(tensors, inputs.dout, inputs.dlse, case)
        torch.cuda.synchronize(device)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        del busy


@pytest.mark.parametrize("case", [replace(case, deterministic=False) for case in CASES if case.grads == "qkv"], ids=str)
def test_gradients_that_may_be_added_in_any_order_are_right_every_time(case, device):
    result = run_case(case, device, repeat=100)
    assert result.passed, result.message
