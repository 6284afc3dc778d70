"""The CPU backend against the oracle: values, LSE, gradients, whatever the mask and the tile sizes.

Ragged batches are in `test_reference_ragged.py`.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.reference import naive, tiled
from flash_hopper.testing.cases import VALUES, Case
from flash_hopper.testing.compare import compare, expect
from flash_hopper.testing.inputs import TORCH_DTYPES, make_inputs

LENGTHS = [(1, 1), (33, 33), (50, 20), (20, 50), (64, 128), (65, 129), (40, 0), (0, 40), (100, 1)]
SCALES = [0.35, -0.35, 0.0]
CAUSAL = Mask(None, 0)
# windows and chunks smaller and larger than a tile, on both sides and on one
MASKS = [FULL, CAUSAL, Mask(5, 0), Mask(7, 20), Mask(None, 3), Mask(20, None), Mask(None, None, 24), Mask(9, 0, 40)]


def tensors(case, requires_grad=False):
    inputs = make_inputs(case)
    return [x.detach().clone().requires_grad_(requires_grad) for x in (inputs.q, inputs.k, inputs.v)]


def small(dtype=DType.FP64, lengths=(40, 50), heads=(4, 2), dims=(16, 8), **other):
    return Case(dtype, 2, *heads, *lengths, *dims, **other)


def assert_as_expected(q, k, v, scale, mask, **tiles):
    expected = expect(q, k, v, softmax_scale=scale, mask=mask)
    out, lse = tiled.attention(q, k, v, softmax_scale=scale, mask=mask, **tiles)
    assert out.dtype == q.dtype
    assert out.is_contiguous()
    assert lse.dtype == (torch.float64 if q.dtype == torch.float64 else torch.float32)
    for result in (
        compare("out", out, expected.out, expected.out_allowed),
        compare("lse", lse, expected.lse, expected.lse_allowed),
    ):
        assert result.passed, result.message


@pytest.mark.parametrize("dtype", tiled.DTYPES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_out_and_lse_are_right_for_every_dtype_mask_and_length(dtype, mask, lengths):
    for heads in ((2, 2), (6, 2), (3, 1)):
        q, k, v = tensors(small(dtype, lengths, heads))
        for scale in SCALES:
            assert_as_expected(q, k, v, scale, mask, tile_m=32, tile_n=16)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", tiled.DTYPES)
def test_out_and_lse_are_right_for_every_kind_of_values(dtype, values):
    for mask, scale in ((CAUSAL, None), (FULL, -0.3), (Mask(40, 10), None)):
        case = small(dtype, (70, 300), values=values, scale=scale)
        assert_as_expected(*tensors(case), case.problem().softmax_scale, mask)


@settings(max_examples=40, deadline=None)
@given(
    tile_m=st.integers(1, 70),
    tile_n=st.integers(1, 70),
    lengths=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    mask=st.builds(Mask, *[st.one_of(st.none(), st.integers(0, 60))] * 2, st.one_of(st.just(0), st.integers(0, 60))),
    scale=st.sampled_from(SCALES),
)
def test_tile_sizes_change_nothing_but_rounding(tile_m, tile_n, lengths, mask, scale):
    q, k, v = tensors(small(lengths=lengths), requires_grad=True)
    results = []
    for tiles in ({"tile_m": tile_m, "tile_n": tile_n}, {}):
        out, lse = tiled.attention(q, k, v, softmax_scale=scale, mask=mask, **tiles)
        seen = torch.isfinite(lse)
        loss = out.square().sum() + lse.masked_fill(~seen, 0.0).sin().sum()
        results.append((out, lse, *torch.autograd.grad(loss, (q, k, v))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mask", [FULL, CAUSAL, Mask(1, 1), Mask(None, None, 2)])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("lengths", [(3, 4), (4, 2), (1, 3), (5, 5)])
def test_gradients_are_those_of_finite_differences(lengths, scale, mask):
    inputs = tensors(small(lengths=lengths, heads=(2, 1), dims=(8, 8)), requires_grad=True)

    def seen(q, k, v):
        out, lse = tiled.attention(q, k, v, softmax_scale=scale, mask=mask, tile_m=2, tile_n=2)
        return out, lse[torch.isfinite(lse)]

    assert torch.autograd.gradcheck(seen, inputs, fast_mode=True)


def gradients(attention, q, k, v, d_out, d_lse, **options):
    """dq, dk, dv for gradients of out and lse; either may be None."""
    out, lse = attention(q, k, v, **options)
    given = [(x, g.to(x.dtype)) for x, g in ((out, d_out), (lse, d_lse)) if g is not None and x.requires_grad]
    found = torch.autograd.grad([x for x, _ in given], (q, k, v), [g for _, g in given], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, (q, k, v), strict=True)]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("lengths", [lengths for lengths in LENGTHS if 0 not in lengths])
def test_gradients_are_those_of_the_oracle(lengths, mask):
    for heads in ((2, 2), (6, 2)):
        q, k, v = tensors(small(lengths=lengths, heads=heads), requires_grad=True)
        d_out, d_lse = torch.randn(2, lengths[0], heads[0], 8).double(), torch.randn(2, heads[0], lengths[0]).double()
        for scale in SCALES:
            options = {"softmax_scale": scale, "mask": mask}
            for given_ in ((d_out, d_lse), (d_out, None), (None, d_lse)):
                got = gradients(tiled.attention, q, k, v, *given_, **options, tile_m=16, tile_n=32)
                want = gradients(naive.attention, q, k, v, *given_, **options)
                for g, w in zip(got, want, strict=True):
                    torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


def plain_attention(q, k, v, softmax_scale):
    """Causal attention as one writes it in PyTorch, every step in the dtype of q."""
    key, value = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, key) * softmax_scale
    shown = torch.ones(scores.shape[2:], dtype=torch.bool).tril(k.shape[1] - q.shape[1])
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~shown, -math.inf).softmax(dim=-1), value)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16, DType.FP32])
@pytest.mark.parametrize("values", ["normal", "extreme", "outlier", "onehot", "mixed", "slopes", "samesign"])
def test_gradients_of_narrow_dtypes_are_as_good_as_those_of_plain_pytorch(dtype, values):
    case = small(dtype, (70, 90), values=values)
    options = {"softmax_scale": case.problem().softmax_scale, "mask": CAUSAL}
    q, k, v = tensors(case, requires_grad=True)
    d_out = torch.randn(2, 70, 4, 8, generator=torch.Generator().manual_seed(0)).to(q.dtype)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    want = gradients(naive.attention, *wide, d_out, None, **options)
    got = gradients(tiled.attention, q, k, v, d_out, None, **options)
    plain = torch.autograd.grad(plain_attention(q, k, v, options["softmax_scale"]), (q, k, v), d_out)
    # P is recomputed from logits and an LSE that are float32 numbers
    lse = naive.attention(*wide, **options)[1].detach()
    rounding = 8 * torch.finfo(q.dtype).eps + 6e-7 * float(lse.nan_to_num(0, 0, 0).abs().max())
    for g, p, w in zip(got, plain, want, strict=True):
        assert g.dtype == q.dtype
        # by batch entry and head: values "mixed" differ by orders of magnitude between batch entries
        error, plain_error, size = (x.abs().amax(dim=(1, 3)) for x in (g.double() - w, p.double() - w, w))
        assert (error <= 2 * plain_error + rounding * size).all(), (error, plain_error, size)


@pytest.mark.parametrize("mask", [CAUSAL, Mask(2, 0), Mask(None, None, 4), Mask(1, 1, 8)])
def test_rows_without_keys_give_zero_and_minus_infinity_and_no_gradient_even_for_a_wild_one(mask):
    q, k, v = tensors(small(lengths=(9, 4)), requires_grad=True)
    out, lse = tiled.attention(q, k, v, softmax_scale=0.5, mask=mask, tile_m=4, tile_n=2)
    assert (out[:, :5] == 0).all()
    assert (lse[..., :5] == -math.inf).all()
    d_lse = torch.ones_like(lse)
    d_lse[..., :5] = math.nan
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), d_lse))
    assert all(torch.isfinite(g).all() for g in (dq, dk, dv))
    assert (dq[:, :5] == 0).all()


@pytest.mark.parametrize("lengths", [(3, 0), (0, 3), (0, 0)])
def test_empty_lengths_have_zero_gradients(lengths):
    q, k, v = tensors(small(lengths=lengths), requires_grad=True)
    out, lse = tiled.attention(q, k, v, softmax_scale=0.5, mask=CAUSAL)
    assert (lse == -math.inf).all()
    assert (out == 0).all()
    for x, gradient in zip((q, k, v), torch.autograd.grad((out.sum(), lse.sum()), (q, k, v)), strict=True):
        assert gradient.shape == x.shape
        assert (gradient == 0).all()


def test_autocast_does_not_lower_the_precision_inside():
    q, k, v = tensors(small(DType.FP32, (60, 60)), requires_grad=True)
    plain = tiled.attention(q, k, v, softmax_scale=0.3, mask=CAUSAL)
    want = torch.autograd.grad(plain[0].sum(), (q, k, v))
    with torch.autocast("cpu", torch.bfloat16):
        cast = tiled.attention(q, k, v, softmax_scale=0.3, mask=CAUSAL)
        got = torch.autograd.grad(cast[0].sum(), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip((*plain, *want), (*cast, *got), strict=True))


def test_any_subset_of_inputs_may_require_gradients():
    case = small(lengths=(10, 12))
    whole = tensors(case, requires_grad=True)
    want = torch.autograd.grad(tiled.attention(*whole, softmax_scale=0.4, mask=CAUSAL)[0].sum(), whole)
    for chosen in range(1, 8):
        inputs = [x.detach().requires_grad_(bool(chosen >> i & 1)) for i, x in enumerate(whole)]
        tiled.attention(*inputs, softmax_scale=0.4, mask=CAUSAL)[0].sum().backward()
        for x, w in zip(inputs, want, strict=True):
            assert x.grad is None if not x.requires_grad else torch.equal(x.grad, w)


def test_repeated_calls_give_the_same_bits():
    q, k, v = tensors(small(DType.BF16, (200, 300)))
    first = tiled.attention(q, k, v, softmax_scale=0.3, mask=CAUSAL)
    for _ in range(5):
        assert all(
            torch.equal(a, b)
            for a, b in zip(first, tiled.attention(q, k, v, softmax_scale=0.3, mask=CAUSAL), strict=True)
        )


def test_what_it_supports_is_stated():
    assert {TORCH_DTYPES[d] for d in tiled.DTYPES} == {torch.bfloat16, torch.float16, torch.float32, torch.float64}
    assert {Feature.CAUSAL, Feature.GQA, Feature.GRADIENT, Feature.LSE, Feature.PACK_GQA} <= tiled.SUPPORTED
    assert {Feature.WINDOW, Feature.CHUNK, Feature.VARLEN, Feature.SEQUSED} <= tiled.SUPPORTED
    assert not {Feature.BATCH_INVARIANT, Feature.SOFTCAP, Feature.FP8} & tiled.SUPPORTED
