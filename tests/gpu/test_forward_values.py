"""Values on the GPU: a sample of the suite, and what a case cannot say: other CTA counts, memory use, refusals."""

from dataclasses import replace

import pytest
import torch
from device_memory import peak_of

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.cases import LAYOUTS, Case
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import sample, suite

BASE = Case(DType.BF16, 2, 8, 2, 500, 700, 128, 128)


def call(inputs, **options):
    return flash_hopper.flash_attn_func(inputs.q, inputs.k, inputs.v, return_lse=True, **options)


@pytest.mark.parametrize("case", sample(suite("forward"), 300), ids=str)
def test_the_forward_suite_passes(case, device):
    result = run_case(case, device, repeat=2)
    assert result.passed, result.message


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_any_number_of_ctas_gives_the_same_bits(device, d, causal):
    inputs = make_inputs(replace(BASE, d=d, dv=d, causal=causal), device)
    want = call(inputs, causal=causal)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for margin in (1, 2, 7, sms // 2, sms - 3, sms - 2, sms - 1, sms, 10 * sms):
        got = call(inputs, causal=causal, sm_margin=margin)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), margin


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"packed", "size1"}))
def test_only_misaligned_tensors_are_copied(device, layout):
    """Memory beyond out and lse is a copy, and only TMA's alignment rule asks for one."""
    case = replace(BASE, layout=layout, strided="qkv", batch=8)
    inputs = make_inputs(case, device)
    call(inputs)
    result, used = peak_of(device, lambda: call(inputs))
    results = sum(x.numel() * x.element_size() for x in result)
    operands = sum(x.numel() * x.element_size() for x in (inputs.q, inputs.k, inputs.v))
    copies = operands if layout in ("misaligned", "misstride") else 0
    assert abs(used - results - copies) < 64 * 1024, (used, results, copies)


def test_a_refused_call_allocates_nothing(device):
    inputs = make_inputs(BASE, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    refused = (
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q[0], k, v)),
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q, k[:, :, :1], v)),
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q[:, :, :7], k, v)),
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q[..., :60], k[..., :60], v)),
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q[..., ::2], k[..., ::2], v)),
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q, k, v, float("nan"))),
        (flash_hopper.ArgumentError, lambda: flash_hopper.flash_attn_func(q, k, v, out=q[:1])),
        (flash_hopper.DTypeError, lambda: flash_hopper.flash_attn_func(q, k, v.view(torch.float16))),
        (flash_hopper.DTypeError, lambda: flash_hopper.flash_attn_func(*(x.view(torch.int16) for x in (q, k, v)))),
        (flash_hopper.UnsupportedError, lambda: flash_hopper.flash_attn_func(q, k, v, num_splits=3)),
        (flash_hopper.UnsupportedError, lambda: flash_hopper.flash_attn_func(q, k, v, softcap=30.0)),
    )
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for error, attempt in refused:
        with pytest.raises(error):
            attempt()
    assert torch.cuda.max_memory_allocated(device) == before


def test_tensors_on_gpu_and_cpu_together_are_refused(device):
    inputs = make_inputs(BASE, device)
    with pytest.raises(flash_hopper.DeviceError, match="v: cpu"):
        flash_hopper.flash_attn_func(inputs.q, inputs.k, inputs.v.cpu())
    with pytest.raises(flash_hopper.DeviceError, match="cpu"):
        flash_hopper.flash_attn_func(inputs.q.cpu(), inputs.k, inputs.v)
