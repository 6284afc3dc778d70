"""The oracle: against sums written out key by key, against PyTorch's own attention, and where no key is seen.

Ragged batches are in `test_reference_ragged.py`.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.reference import naive

CAUSAL = Mask(None, 0)
ENDS = st.sampled_from((None, 0, 1, 2, 5))
MASKS = st.builds(Mask, ENDS, ENDS, st.sampled_from((0, 0, 1, 2, 3, 7)))

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


def sees(row, key, seqlen_q, seqlen_k, mask):
    p = row + seqlen_k - seqlen_q
    left, right = math.inf if mask.left is None else mask.left, math.inf if mask.right is None else mask.right
    return p - left <= key <= p + right and (not mask.chunk or math.floor(p / mask.chunk) == key // mask.chunk)


def written_out(q, k, v, scale, mask):
    """out and lse with Python floats, one key after the other."""
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k, heads_k, dv = v.shape[1:]
    out, lse = torch.zeros(batch, seqlen_q, heads, dv).double(), torch.zeros(batch, heads, seqlen_q).double()
    for b, h, i in itertools.product(range(batch), range(heads), range(seqlen_q)):
        key_head = h * heads_k // heads
        seen = [j for j in range(seqlen_k) if sees(i, j, seqlen_q, seqlen_k, mask)]
        weights = [math.exp(scale * float(q[b, i, h] @ k[b, j, key_head])) for j in seen]
        total = math.fsum(weights)
        lse[b, h, i] = math.log(total) if total else -math.inf
        for j, weight in zip(seen, weights, strict=True):
            out[b, i, h] += weight / total * v[b, j, key_head]
    return out, lse


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, mask=MASKS, scale=st.sampled_from((0.7, 0.0, -0.4)), seed=st.integers(0, 99))
def test_it_is_the_formula_for_all_sizes_masks_and_scales(sizes, mask, scale, seed):
    torch.manual_seed(seed)
    q, k, v = tensors(sizes)
    got = naive.attention(q, k, v, softmax_scale=scale, mask=mask)
    want = written_out(q, k, v, scale, mask)
    for g, w in zip(got, want, strict=True):
        assert g.dtype == torch.float64
        torch.testing.assert_close(g, w, rtol=1e-12, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    mask=st.builds(Mask, *[st.one_of(st.none(), st.integers(0, 40))] * 2, st.integers(0, 40)),
)
def test_it_agrees_with_pytorchs_attention_under_an_explicit_mask(lengths, mask):
    q, k, v = tensors((2, 2, 3, *lengths, 8, 4))
    table = torch.tensor([[sees(i, j, *lengths, mask) for j in range(lengths[1])] for i in range(lengths[0])])
    want = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=table, scale=0.4, enable_gqa=True
    ).transpose(1, 2)
    out, lse = naive.attention(q, k, v, softmax_scale=0.4, mask=mask)
    blind = ~table.any(dim=1)
    torch.testing.assert_close(out[:, ~blind], want[:, ~blind], rtol=1e-10, atol=1e-12)
    assert (out[:, blind] == 0).all()
    assert torch.equal(lse == -math.inf, blind.expand_as(lse))


@pytest.mark.parametrize("budget", [1, 40, 150, 700])
@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(2, 1), Mask(None, 0, 4)])
def test_working_in_pieces_changes_nothing(monkeypatch, budget, mask):
    torch.manual_seed(0)
    q, k, v = tensors((3, 2, 3, 7, 9, 4, 5))
    whole = naive.attention(q, k, v, softmax_scale=0.5, mask=mask)
    monkeypatch.setattr(naive, "CPU_SCORES", budget)
    for piece, all_at_once in zip(naive.attention(q, k, v, softmax_scale=0.5, mask=mask), whole, strict=True):
        torch.testing.assert_close(piece, all_at_once, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_dtype_is_computed_in_float64(dtype):
    q, k, v = tensors((2, 2, 2, 5, 8, 4, 3), dtype)
    got = naive.attention(q, k, v, softmax_scale=0.3, mask=CAUSAL)
    want = naive.attention(q.double(), k.double(), v.double(), softmax_scale=0.3, mask=CAUSAL)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_logits_of_any_size_stay_finite():
    q, k, v = tensors((1, 1, 1, 8, 16, 4, 4))
    for scale in (1e4, -1e4, 1e300):
        out, lse = naive.attention(q, k, v, softmax_scale=scale, mask=FULL)
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 3), (4, 1), (3, 0)])
def test_rows_without_keys_are_zero_with_lse_minus_infinity_and_no_gradient(seqlen_q, seqlen_k):
    q, k, v = tensors((2, 1, 2, seqlen_q, seqlen_k, 4, 4), requires_grad=True)
    out, lse = naive.attention(q, k, v, softmax_scale=0.5, mask=CAUSAL)
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
    out, lse = naive.attention(q, k, v, softmax_scale=1.0, mask=CAUSAL)
    assert out.shape == (sizes[0], sizes[3], 2, 3)
    assert lse.shape == (sizes[0], 2, sizes[3])


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(1, 1), Mask(None, None, 2)])
def test_gradients_are_those_of_finite_differences(mask):
    torch.manual_seed(1)
    inputs = tensors((1, 2, 2, 3, 4, 2, 3), requires_grad=True)
    assert torch.autograd.gradcheck(lambda *x: naive.attention(*x, softmax_scale=0.6, mask=mask), inputs)
