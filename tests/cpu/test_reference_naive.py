"""The oracle: against sums written out key by key, and where no key is seen."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_hopper.reference import naive

SIZES = st.tuples(
    st.integers(1, 2),  # batch
    st.integers(1, 3),  # heads_k
    st.integers(1, 3),  # query heads a key head
    st.integers(1, 6),  # seqlen_q
    st.integers(0, 6),  # seqlen_k
    st.integers(1, 4),  # d
    st.integers(1, 4),  # dv
)


def tensors(sizes, dtype=torch.float64, requires_grad=False):
    batch, heads_k, group, seqlen_q, seqlen_k, d, dv = sizes
    shapes = (batch, seqlen_q, heads_k * group, d), (batch, seqlen_k, heads_k, d), (batch, seqlen_k, heads_k, dv)
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


def written_out(q, k, v, scale, causal):
    """out and lse with Python floats, one key after the other."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k, dv = v.shape[1:]
    out, lse = torch.zeros(batch, seqlen_q, heads, dv).double(), torch.zeros(batch, heads, seqlen_q).double()
    for b, h, i in itertools.product(range(batch), range(heads), range(seqlen_q)):
        last = i + seqlen_k - seqlen_q if causal else seqlen_k - 1
        key_head = h * heads_k // heads
        weights = [math.exp(scale * float(q[b, i, h] @ k[b, j, key_head])) for j in range(last + 1)]
        total = math.fsum(weights)
        lse[b, h, i] = math.log(total) if total else -math.inf
        for j, weight in enumerate(weights):
            out[b, i, h] += weight / total * v[b, j, key_head]
    return out, lse


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, causal=st.booleans(), scale=st.sampled_from((0.7, 0.0, -0.4)), seed=st.integers(0, 99))
def test_it_is_the_formula_for_all_sizes_masks_and_scales(sizes, causal, scale, seed):
    torch.manual_seed(seed)
    q, k, v = tensors(sizes)
    got = naive.attention(q, k, v, softmax_scale=scale, causal=causal)
    want = written_out(q, k, v, scale, causal)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float64
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("budget", [1, 40, 150, 700])
@pytest.mark.parametrize("causal", [False, True])
def test_working_in_pieces_changes_nothing(monkeypatch, budget, causal):
    torch.manual_seed(0)
    q, k, v = tensors((3, 2, 3, 7, 9, 4, 5))
    whole = naive.attention(q, k, v, softmax_scale=0.5, causal=causal)
    monkeypatch.setattr(naive, "CPU_SCORES", budget)
    for piece, all_at_once in zip(naive.attention(q, k, v, softmax_scale=0.5, causal=causal), whole, strict=True):
        torch.testing.assert_close(piece, all_at_once, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_dtype_is_computed_in_float64(dtype):
    q, k, v = tensors((2, 2, 2, 5, 8, 4, 3), dtype)
    got = naive.attention(q, k, v, softmax_scale=0.3, causal=True)
    want = naive.attention(q.double(), k.double(), v.double(), softmax_scale=0.3, causal=True)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_logits_of_any_size_stay_finite():
    q, k, v = tensors((1, 1, 1, 8, 16, 4, 4))
    for scale in (1e4, -1e4, 1e300):
        out, lse = naive.attention(q, k, v, softmax_scale=scale, causal=False)
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 3), (4, 1), (3, 0)])
def test_rows_without_keys_are_zero_with_lse_minus_infinity_and_no_gradient(seqlen_q, seqlen_k):
    q, k, v = tensors((2, 1, 2, seqlen_q, seqlen_k, 4, 4), requires_grad=True)
    out, lse = naive.attention(q, k, v, softmax_scale=0.5, causal=True)
    blind = seqlen_q - seqlen_k
    assert (out[:, :blind] == 0).all()
    assert (lse[..., :blind] == -math.inf).all()
    assert torch.isfinite(lse[..., blind:]).all()
    (out.sum() + lse[..., blind:].sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
    assert (q.grad[:, :blind] == 0).all()


@pytest.mark.parametrize("empty", [0, 3])
def test_an_empty_result_has_its_shape(empty):
    sizes = [2, 1, 2, 4, 5, 4, 3]
    sizes[empty] = 0
    q, k, v = tensors(sizes)
    out, lse = naive.attention(q, k, v, softmax_scale=1.0, causal=True)
    assert out.shape == (sizes[0], sizes[3], 2, 3)
    assert lse.shape == (sizes[0], 2, sizes[3])


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_finite_differences(causal):
    torch.manual_seed(1)
    inputs = tensors((1, 2, 2, 3, 4, 2, 3), requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: naive.attention(*x, softmax_scale=0.6, causal=causal), inputs)
