"""More than 2^31 elements: in q and out, in k, in v, in the LSE, and between two neighbours (strides).

The work is kept small by few keys or few queries. Sampled rows, with the first and last of everything among them, are
compared with float64 by the rule of `testing.compare`; all of out and lse is looked through for what was not written.
"""

import itertools
import random

import pytest
import torch

import flash_hopper
from flash_hopper.problem.mask import Mask
from flash_hopper.testing.compare import compare, expect

LIMIT = 2**31
DTYPE = torch.bfloat16


def filled(shape, device):
    """Normal values, drawn for one batch entry at a time so that no larger temporary exists."""
    x = torch.empty(shape, dtype=DTYPE, device=device)
    for entry in x:
        entry.normal_()
    return x


def assert_sampled(q, k, v, out, lse, causal, samples=24, rows=40):
    """Compare rows of some (batch, head) pairs with float64."""
    batch, seqlen_q, heads, d = q.shape
    seqlen_k, heads_k = k.shape[1:3]
    draw = random.Random(0)
    corners = itertools.product((0, batch - 1), (0, heads - 1), (0, max(0, seqlen_q - rows)))
    some = ((draw.randrange(batch), draw.randrange(heads), draw.randrange(seqlen_q)) for _ in range(samples))
    for b, h, first in {*corners, *some}:
        last = min(first + rows, seqlen_q)
        # causal rows [first, last) are the rows of a shorter problem that ends with the last key they see
        keys = max(0, last + seqlen_k - seqlen_q) if causal else seqlen_k
        key_head = h // (heads // heads_k)
        one = slice(b, b + 1)
        part_q = q[one, first:last, h : h + 1]
        part_k, part_v = (x[one, :keys, key_head : key_head + 1] for x in (k, v))
        expected = expect(part_q, part_k, part_v, softmax_scale=d**-0.5, mask=Mask(right=0 if causal else None))
        got = compare("out", out[one, first:last, h : h + 1], expected.out, expected.out_allowed)
        got_lse = compare("lse", lse[one, h : h + 1, first:last], expected.lse, expected.lse_allowed)
        assert got.passed, f"batch {b}, head {h}, rows from {first}: {got.message}"
        assert got_lse.passed, f"batch {b}, head {h}, rows from {first}: {got_lse.message}"


def assert_written(*results):
    for result in results:
        assert not any(bool(entry.isnan().any()) for entry in result)


def check(q, k, v, causal=False, out=None):
    """Run attention into an out of NaN and check it."""
    if out is None:
        out = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    for entry in out:
        entry.fill_(float("nan"))
    returned, lse = flash_hopper.flash_attn_func(q, k, v, causal=causal, out=out, return_lse=True)
    assert returned.data_ptr() == out.data_ptr()
    assert_written(out, lse)
    assert_sampled(q, k, v, out, lse, causal)


def needs(memory_gb, wanted):
    if memory_gb < wanted:
        pytest.skip(f"needs {wanted} GB of free GPU memory, there are {memory_gb:.0f}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_q_and_out_beyond_2_31_elements(device, memory_gb, d, causal):
    needs(memory_gb, 16)
    heads, seqlen_q = 64, 70_001 * 128 // d
    q = filled((4, seqlen_q, heads, d), device)
    assert q.numel() > LIMIT
    k, v = filled((4, 130, 8, d), device), filled((4, 130, 8, d), device)
    check(q, k, v, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(128, 128), (256, 64), (64, 256)])
def test_k_or_v_beyond_2_31_elements(device, memory_gb, d, dv, causal):
    needs(memory_gb, 24)
    seqlen_k = 70_001 * 128 // max(d, dv)
    k, v = filled((4, seqlen_k, 64, d), device), filled((4, seqlen_k, 64, dv), device)
    assert max(k.numel(), v.numel()) > LIMIT
    check(filled((4, 5, 64, d), device), k, v, causal)


def test_one_batch_entry_of_q_k_v_and_out_beyond_2_31_elements(device, memory_gb):
    """The offset of a row within a single batch entry passes 2^31 too."""
    needs(memory_gb, 24)
    q = filled((1, 264_000, 128, 64), device)
    assert q[0].numel() > LIMIT
    few = filled((1, 70, 1, 64), device)
    check(q, few, few)
    del few
    check(filled((1, 3, 128, 64), device), q, q)


def test_an_lse_beyond_2_31_elements(device, memory_gb):
    needs(memory_gb, 100)
    batch, seqlen_q, heads = 65, 2**20 + 1, 32
    assert batch * heads * seqlen_q > LIMIT
    q = filled((batch, seqlen_q, heads, 8), device)
    k = filled((batch, 9, 1, 8), device)
    check(q, k, k)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("far", [0, 1, 2], ids=["batch", "seqlen", "heads"])
@pytest.mark.parametrize("operand", [0, 1, 2, 3], ids=["q", "k", "v", "out"])
def test_strides_beyond_2_31_elements(device, memory_gb, operand, far, causal):
    """Two batch entries, two rows or two heads, each 2^31 elements and more apart."""
    needs(memory_gb, 16)
    check_far(device, operand, far, causal, distance=LIMIT + 8 * 1237)


def check_far(device, operand, far, causal, distance):
    """One operand with `distance` elements between the two entries of dimension `far`; the others are contiguous."""
    d, sizes = 64, [2, 200, 2]
    if far == 1 and operand in (0, 3):
        sizes[1] = 2
    shape_q = (2, sizes[1], 2, d)
    shape_k = (2, 2 if far == 1 and operand in (1, 2) else 300, 2, d)
    shapes = [shape_q, shape_k, shape_k, shape_q]
    tensors = [filled(shape, device) for shape in shapes]
    shape = shapes[operand]
    inner = 1
    strides = [0, 0, 0, 1]
    for dim in (2, 1, 0):
        if dim != far:
            strides[dim] = inner * d
            inner *= shape[dim]
    strides[far] = distance
    buffer = torch.full((distance + inner * d,), float("nan"), dtype=DTYPE, device=device)
    view = buffer.as_strided(shape, strides)
    view.copy_(tensors[operand])
    tensors[operand] = view
    q, k, v, out = tensors
    check(q, k, v, causal, out)
    if operand == 3:
        # nothing between the two entries was written
        out.fill_(float("nan"))
        assert all(bool(part.isnan().all()) for part in buffer.split(2**28))
