"""More than one GPU: the backward runs where the tensors are, whatever device is current."""

import pytest
import torch
from backward_calls import assert_same, leaves, step

from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import suite

CASES = [
    backward_case(64, (300, 500), batch=2, heads=(4, 2), dlse="bhs"),
    backward_case(128, (300, 500), True, batch=2, heads=(4, 2)),
    backward_case(128, (129, 257), batch=2, heads=(4, 4), dtype=DType.FP16, dout="misaligned"),
    backward_case(64, (40, 0), batch=2),
]


@pytest.mark.parametrize("case", [*CASES, *suite("backward-sanitizer")], ids=str)
def test_a_backward_runs_where_its_tensors_are(case, device, second_device):
    for current, place in ((device, second_device), (second_device, device), (second_device, second_device)):
        with torch.cuda.device(current):
            result = run_case(case, place, repeat=2)
            assert result.passed, result.message
            assert torch.cuda.current_device() == current.index


def test_both_devices_at_once_give_the_same_bits(device, second_device):
    case = backward_case(128, (300, 500), True, batch=2, heads=(4, 2), deterministic=True)
    both = [make_inputs(case, place) for place in (device, second_device)]
    results = []
    for _ in range(20):
        for inputs in both:
            results.append(step(leaves(inputs), inputs.dout, inputs.dlse, case))
    torch.cuda.synchronize(device)
    torch.cuda.synchronize(second_device)
    want = [x.cpu() for x in results[0]]
    for i, result in enumerate(results):
        assert all(x.device == (device, second_device)[i % 2] for x in result)
        assert_same([x.cpu() for x in result], want, case)
