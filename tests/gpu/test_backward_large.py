"""More than 2^31 elements in a backward: in q, dout and dq, in k, dk and v, dv, in the statistics, and in strides.

The work is kept small by few keys or few queries. Sampled (batch, head) pairs and rows, with the first and last of
everything among them, are compared with float64 by the rule of `testing.gradients`; all gradients are looked through
for what was not written.
"""

import itertools

import pytest
import torch

import flash_hopper
from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.testing.compare import compare
from flash_hopper.testing.gradients import expect_gradients

LIMIT = 2**31
DTYPE = torch.bfloat16
CAUSAL = Mask(right=0)


def filled(shape, device):
    """Normal values, drawn for one batch entry at a time so that no larger temporary exists."""
    x = torch.empty(shape, dtype=DTYPE, device=device)
    for entry in x:
        entry.normal_()
    return x


def needs(memory_gb, wanted):
    if memory_gb < wanted:
        pytest.skip(f"needs {wanted} GB of free GPU memory, there are {memory_gb:.0f}")


def run(q, k, v, dout, causal=False, deterministic=False):
    """out, dq, dk, dv, all of whose elements were written."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = flash_hopper.flash_attn_func(*leaves, causal=causal, deterministic=deterministic)
    found = torch.autograd.grad(out, leaves, dout)
    for gradient in found:
        assert not any(bool(entry.isnan().any()) for entry in gradient)
    return out.detach(), *found


def assert_pairs(q, k, v, dout, out, gradients, causal):
    """All gradients of the first and the last key head of the first and the last batch entry, with their query heads."""
    group = q.shape[2] // k.shape[2]
    for b, h in itertools.product({0, q.shape[0] - 1}, {0, k.shape[2] - 1}):
        entry, heads, one = slice(b, b + 1), slice(h * group, (h + 1) * group), slice(h, h + 1)
        expected = expect_gradients(
            q[entry, :, heads], k[entry, :, one], v[entry, :, one], out[entry, :, heads], dout[entry, :, heads], None,
            softmax_scale=q.shape[3] ** -0.5, mask=CAUSAL if causal else FULL,
        )  # fmt: skip
        parts = gradients[0][entry, :, heads], gradients[1][entry, :, one], gradients[2][entry, :, one]
        for name, got in zip(("dq", "dk", "dv"), parts, strict=True):
            result = compare(name, got, *expected[name])
            assert result.passed, f"batch {b}, key head {h}: {result.message}"


def check(q, k, v, dout, causal=False, deterministic=False):
    out, *gradients = run(q, k, v, dout, causal, deterministic)
    assert_pairs(q, k, v, dout, out, gradients, causal)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_q_and_its_gradient_beyond_2_31_elements(device, memory_gb, d, causal, deterministic):
    """In float32 the accumulator of dq is twice as large."""
    needs(memory_gb, 60)
    heads, seqlen_q = 64, 70_001 * 128 // d
    q = filled((4, seqlen_q, heads, d), device)
    assert q.numel() > LIMIT
    k, v = filled((4, 130, 32, d), device), filled((4, 130, 32, d), device)
    check(q, k, v, filled((4, seqlen_q, heads, d), device), causal, deterministic)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(128, 128), (256, 64), (64, 256)])
def test_k_or_v_and_their_gradients_beyond_2_31_elements(device, memory_gb, d, dv, causal):
    needs(memory_gb, 48)
    seqlen_k = 70_001 * 128 // max(d, dv)
    k, v = filled((4, seqlen_k, 64, d), device), filled((4, seqlen_k, 64, dv), device)
    assert max(k.numel(), v.numel()) > LIMIT
    check(filled((4, 5, 64, d), device), k, v, filled((4, 5, 64, dv), device), causal)


def test_statistics_beyond_2_31_elements(device, memory_gb):
    needs(memory_gb, 110)
    batch, seqlen_q, heads = 33, 2**20 + 1, 32
    assert 2 * batch * heads * seqlen_q > LIMIT
    q, dout = filled((batch, seqlen_q, heads, 8), device), filled((batch, seqlen_q, heads, 8), device)
    k = filled((batch, 9, heads, 8), device)
    out, *gradients = run(q, k, k, dout, deterministic=True)
    # the last rows of the last heads; dk and dv need all rows of a head
    for first in (0, seqlen_q - 100):
        part = slice(-1, None), slice(first, first + 100), slice(-1, None)
        last = slice(-1, None), slice(None), slice(-1, None)
        expected = expect_gradients(q[part], k[last], k[last], out[part], dout[part], None, softmax_scale=8**-0.5)
        result = compare("dq", gradients[0][part], *expected["dq"])
        assert result.passed, result.message
    assert_pairs(q[-1:], k[-1:], k[-1:], dout[-1:], out[-1:], [x[-1:] for x in gradients], False)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", [0, 1, 2], ids=["batch", "seqlen", "heads"])
@pytest.mark.parametrize("operand", [0, 1, 2, 3], ids=["q", "k", "v", "dout"])
def test_strides_beyond_2_31_elements(device, memory_gb, operand, far, causal):
    """Two batch entries, two rows or two heads, each 2^31 elements and more apart."""
    needs(memory_gb, 16)
    d, distance = 64, LIMIT + 8 * 1237
    queries = (2, 2 if far == 1 and operand in (0, 3) else 200, 2, d)
    keys = (2, 2 if far == 1 and operand in (1, 2) else 300, 2, d)
    tensors = [filled(shape, device) for shape in (queries, keys, keys, queries)]
    strides, inner = [0, 0, 0, 1], d
    for dim in (2, 1, 0):
        if dim != far:
            strides[dim] = inner
            inner *= tensors[operand].shape[dim]
    strides[far] = distance
    buffer = torch.full((distance + inner,), float("nan"), dtype=DTYPE, device=device)
    view = buffer.as_strided(tensors[operand].shape, strides)
    view.copy_(tensors[operand])
    tensors[operand] = view
    check(*tensors, causal=causal)
