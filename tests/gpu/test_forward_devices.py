"""More than one GPU: tensors decide where a call runs, whatever device is current."""

import pytest
import torch

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.cases import Case
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import suite

CASES = [
    Case(DType.BF16, 2, 4, 2, 300, 500, 64, 64),
    Case(DType.BF16, 2, 4, 2, 300, 500, 128, 128, causal=True),
    Case(DType.FP16, 2, 4, 2, 129, 257, 128, 128, layout="misaligned"),
    Case(DType.BF16, 2, 4, 2, 40, 0, 64, 64, give_out=False),
]


@pytest.mark.parametrize("case", [*CASES, *suite("sanitizer")], ids=str)
def test_a_call_runs_where_its_tensors_are(case, device, second_device):
    for current, place in ((device, second_device), (second_device, device), (second_device, second_device)):
        with torch.cuda.device(current):
            result = run_case(case, place, repeat=2)
            assert result.passed, result.message
            assert torch.cuda.current_device() == current.index


def test_both_devices_at_once_give_the_same_bits(device, second_device):
    case = CASES[1]
    here, there = (make_inputs(case, place) for place in (device, second_device))
    results = []
    for _ in range(20):
        for inputs in (here, there):
            results.append(flash_hopper.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True))
    torch.cuda.synchronize(device)
    torch.cuda.synchronize(second_device)
    want = [x.cpu() for x in results[0]]
    for i, result in enumerate(results):
        assert all(x.device == (device, second_device)[i % 2] for x in result)
        assert all(torch.equal(x.cpu(), w) for x, w in zip(result, want, strict=True))


def test_a_call_takes_the_current_stream_of_its_own_device(device, second_device):
    """Work queued on the second GPU's current stream is seen by a call made while the first GPU is current."""
    case = CASES[1]
    inputs = make_inputs(case, second_device)
    q, k, v = inputs.q, inputs.k, inputs.v
    want = flash_hopper.flash_attn_func(q, k, v, causal=True)
    torch.cuda.synchronize(second_device)
    late = torch.full_like(q, float("nan"))
    stream = torch.cuda.Stream(second_device)
    torch.cuda.synchronize(second_device)
    with torch.cuda.stream(stream), torch.cuda.device(second_device):
        torch.cuda._sleep(50_000_000)
        late.copy_(q)
        with torch.cuda.device(device):
            got = flash_hopper.flash_attn_func(late, k, v, causal=True)
    torch.cuda.synchronize(second_device)
    assert torch.equal(got, want)


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_tensors_on_two_devices_are_refused(moved, device, second_device):
    inputs = make_inputs(CASES[0], device)
    tensors = [inputs.q, inputs.k, inputs.v]
    tensors[moved] = tensors[moved].to(second_device)
    with pytest.raises(flash_hopper.DeviceError, match=f"{'qkv'[moved]}: {second_device}"):
        flash_hopper.flash_attn_func(*tensors)


def test_an_out_on_another_device_is_refused(device, second_device):
    inputs = make_inputs(CASES[0], device)
    with pytest.raises(flash_hopper.DeviceError, match=f"out: {second_device}"):
        flash_hopper.flash_attn_func(inputs.q, inputs.k, inputs.v, out=inputs.out.to(second_device))
