"""quantize_fp8 and hadamard_transform on the CPU: what they promise, and what they refuse."""

import math
from itertools import pairwise

import pytest
import torch

import flash_hopper
from flash_hopper import (
    ArgumentError,
    DTypeError,
    Fp8Values,
    UnsupportedError,
    hadamard_signs,
    hadamard_transform,
    quantize_fp8,
)
from flash_hopper.geometry.fp8 import position_of

HEAD_DIMS = (16, 64, 80, 96, 112, 128, 160, 192, 208, 256)
E4M3 = torch.float8_e4m3fn


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def hadamard_matrix(size):
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < size:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h


def per_row(descale, form, x, group=1, offsets=None):
    """The factor of every row, (.., rows, heads)."""
    *batch, rows, heads, _ = x.shape
    if form == "tensor":
        return descale.expand(*batch, rows, heads)
    if form == "head":
        assert offsets is None
        return descale.repeat_interleave(group, 1)[:, None].expand(*batch, rows, heads)
    if offsets is None:
        return descale.repeat_interleave(128, 2)[..., :rows].transpose(1, 2)
    result = torch.ones(rows, heads)
    for b, (start, end) in enumerate(pairwise(offsets)):
        for i in range(start, end):
            result[i] = descale[:, start // 128 + b + (i - start) // 128]
    return result


def assert_close(codes, scales, x):
    """Rounding to e4m3: half a unit of 4 significant bits, or half of the smallest subnormal."""
    error = (codes.float() * scales[..., None] - x.float()).abs()
    allowed = x.float().abs() * 2.0**-4 * (1 + 1e-5) + scales[..., None] * 2.0**-10
    assert (error <= allowed).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("form", "group"), [("tensor", 1), ("head", 1), ("head", 3), ("block", 1)])
def test_codes_times_descale_are_the_values_up_to_rounding(form, group, dtype):
    x = randn(2, 300, 6, 64, dtype=dtype) * torch.logspace(-2, 2, 6)[:, None].to(dtype)
    codes, descale = quantize_fp8(x, form, qhead_per_kvhead=group)
    assert codes.dtype == E4M3 and codes.shape == x.shape and descale.dtype == torch.float32
    assert descale.shape == {"tensor": (1,), "head": (2, 6 // group), "block": (2, 6, 3)}[form]
    assert_close(codes, per_row(descale, form, x, group), x)


@pytest.mark.parametrize("form", ["tensor", "head", "block"])
def test_the_largest_magnitude_of_each_group_becomes_448(form):
    x = randn(2, 300, 4, 64)
    codes, descale = quantize_fp8(x, form)
    tops = codes.float().abs()
    if form == "block":
        tops = torch.cat((tops, tops.new_zeros(2, 84, 4, 64)), 1).unflatten(1, (3, 128)).amax((2, 4)).transpose(1, 2)
    else:
        tops = tops.amax((1, 3)) if form == "head" else tops.amax()[None]
    assert tops.shape == descale.shape and (tops == 448).all()


@pytest.mark.parametrize("form", ["tensor", "head", "block"])
def test_a_ragged_batch_is_quantised_sequence_by_sequence(form):
    offsets = [0, 0, 5, 133, 133, 400, 656]
    x = randn(700, 2, 64)
    cu = torch.tensor(offsets, dtype=torch.int32)
    codes, descale = quantize_fp8(x, form, cu_seqlens=cu)
    assert (codes[656:].float() == 0).all()
    lengths = list(pairwise(offsets))
    if form == "tensor":
        alone, expected = quantize_fp8(x[None, :656], form)
        assert torch.equal(codes[:656].float(), alone[0].float()) and torch.equal(descale, expected)
        return
    assert descale.shape == {"head": (6, 2), "block": (2, 700 // 128 + 7)}[form]
    for b, (start, end) in enumerate(lengths):
        alone, expected = quantize_fp8(x[None, start:end], form)
        assert torch.equal(codes[start:end].float(), alone[0].float())
        if form == "head":
            assert torch.equal(descale[b], expected[0])
        else:
            first = start // 128 + b
            assert torch.equal(descale[:, first : first + expected.shape[2]], expected[0])


@pytest.mark.parametrize("offsets", [None, [0, 7, 300, 300, 513]])
def test_values_are_the_codes_transposed_and_permuted_with_zeros_behind(offsets):
    x = randn(513, 2, 80)
    options = {} if offsets is None else {"cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
    x = x if offsets else x[None]
    codes, descale = quantize_fp8(x, **options)
    values, same = quantize_fp8(x, values=True, **options)
    assert isinstance(values, Fp8Values) and values.seqlen == 513 and torch.equal(descale, same)
    found = values.codes.float()
    expected = torch.zeros_like(found)
    if offsets is None:
        for row in range(513):
            expected[0, :, :, position_of(row)] = codes[0, row].float()
    else:
        assert found.shape == (2, 80, (513 // 128 + 5) * 128)
        for b, (start, end) in enumerate(pairwise(offsets)):
            for row in range(end - start):
                expected[:, :, (start // 128 + b) * 128 + position_of(row)] = codes[start + row].float()
    assert torch.equal(found, expected)


def test_unused_rows_may_hold_anything_and_get_zeros():
    x = randn(3, 200, 2, 64)
    used = torch.tensor([0, 130, 200], dtype=torch.int32)
    clean = x.clone()
    for b, n in enumerate(used):
        x[b, n:] = math.nan
        clean[b, n:] = 0
    for form in ("tensor", "head", "block"):
        for values in (False, True):
            codes, descale = quantize_fp8(x, form, seqused=used, values=values)
            expected, same = quantize_fp8(clean, form, values=values)
            assert torch.equal(descale, same)
            if values:
                codes, expected = codes.codes, expected.codes
            assert torch.equal(codes.float(), expected.float())


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-30, 1e-10, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("hadamard", [False, True])
def test_finite_values_of_any_size_give_finite_codes_and_scales(scale, hadamard):
    x = torch.sign(randn(1, 130, 1, 128, dtype=torch.float32)) * scale
    for form in ("tensor", "head", "block"):
        codes, descale = quantize_fp8(x, form, hadamard=hadamard)
        assert codes.float().isfinite().all() and descale.isfinite().all() and (descale > 0).all()
        if scale == 0.0:
            assert (descale == 1).all() and (codes.float() == 0).all()


def test_nan_gives_nan_where_it_is_and_does_not_count_for_the_scale():
    x = randn(1, 128, 1, 64)
    x[0, 3, 0, 5] = math.nan
    clean = x.nan_to_num(0.0)
    codes, descale = quantize_fp8(x)
    expected, same = quantize_fp8(clean)
    assert torch.equal(descale, same)
    assert codes.float().isnan().nonzero().tolist() == [[0, 3, 0, 5]]
    assert torch.equal(codes.float().nan_to_num(0.0), expected.float())


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_hadamard_transform_is_the_matrix_of_each_block_and_orthogonal(head_dim):
    x = randn(3, 5, head_dim, dtype=torch.float32)
    signs = hadamard_signs(head_dim, seed=3)
    size = head_dim & -head_dim
    blocks = (x.double() * signs.double()).unflatten(-1, (-1, size))
    expected = (blocks @ hadamard_matrix(size) / math.sqrt(size)).flatten(-2)
    torch.testing.assert_close(hadamard_transform(x, signs).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(hadamard_transform(hadamard_transform(x)), x)
    torch.testing.assert_close(hadamard_transform(x, scale=2.0), hadamard_transform(x) * math.sqrt(size) * 2)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_signs_are_balanced_and_the_same_for_a_seed(head_dim):
    signs = hadamard_signs(head_dim, seed=7)
    assert signs.dtype == torch.float32 and set(signs.tolist()) == {1.0, -1.0}
    assert torch.equal(signs, hadamard_signs(head_dim, seed=7))
    assert len({tuple(hadamard_signs(head_dim, seed=s).tolist()) for s in range(20)}) == 20
    assert abs(sum(hadamard_signs(256, seed=s).sum().item() for s in range(64))) < 6 * math.sqrt(64 * 256)


def test_scores_of_transformed_queries_and_keys_are_what_they_were():
    q, k = randn(1, 64, 2, 96, seed=1), randn(1, 64, 2, 96, seed=2)
    (q8, dq), (k8, dk) = quantize_fp8(q, hadamard=True), quantize_fp8(k, hadamard=True)
    real_q, real_k = q8.float() * dq.transpose(1, 2)[..., None], k8.float() * dk.transpose(1, 2)[..., None]
    scores = torch.einsum("bqhd,bkhd->bhqk", real_q, real_k)
    expected = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float())
    assert (scores - expected).std() < 0.05 * expected.std()


def test_with_rare_outliers_the_transform_takes_a_third_off_the_error_of_attention():
    q, k, v = (randn(1, 1024, 2, 128, dtype=torch.float32, seed=s) for s in (1, 2, 3))
    for x, seed in ((q, 4), (k, 5), (v, 6)):
        is_outlier = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < 1e-3
        x += is_outlier * 10 * randn(*x.shape, dtype=torch.float32, seed=seed + 10)

    def attention(q, k):
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(128**-0.5).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    def error(**options):
        rounded = []
        for x in (q, k):
            codes, descale = quantize_fp8(x, **options)
            rounded.append(codes.float() * per_row(descale, "block", x)[..., None])
        return (attention(*rounded) - attention(q, k)).pow(2).mean().sqrt()

    assert error(hadamard=True) < 0.67 * error()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [32, 96])
def test_rotary_embedding_comes_first(rotary_dim, interleaved):
    x, offsets = randn(2, 50, 3, 96, dtype=torch.float32), torch.tensor([0, 9], dtype=torch.int32)
    angles = torch.arange(80)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    turned = x.clone()
    for b in range(2):
        for i in range(50):
            c, s = angles[i + int(offsets[b])].cos(), angles[i + int(offsets[b])].sin()
            first = slice(0, rotary_dim, 2) if interleaved else slice(0, rotary_dim // 2)
            second = slice(1, rotary_dim, 2) if interleaved else slice(rotary_dim // 2, rotary_dim)
            x0, x1 = x[b, i, :, first], x[b, i, :, second]
            turned[b, i, :, first], turned[b, i, :, second] = x0 * c - x1 * s, x0 * s + x1 * c
    options = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "rotary_interleaved": interleaved}
    for hadamard in (False, True):
        codes, descale = quantize_fp8(x, hadamard=hadamard, seqlen_offsets=offsets, **options)
        expected, same = quantize_fp8(turned, hadamard=hadamard)
        torch.testing.assert_close(descale, same)
        distance = (codes.float() - expected.float()).abs()
        assert (distance <= expected.float().abs() * 2.0**-3 + 2.0**-9).all() and (distance > 0).float().mean() < 0.01


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"x": torch.zeros(1, 8, 1, 72)}, ArgumentError),
        ({"x": torch.zeros(1, 8, 1, 272)}, ArgumentError),
        ({"x": torch.zeros(8, 1, 64)}, ArgumentError),
        ({"x": torch.zeros(1, 8, 1, 64, dtype=torch.float64)}, DTypeError),
        ({"x": [1.0]}, DTypeError),
        ({"x": torch.zeros(1, 8, 1, 64, requires_grad=True)}, UnsupportedError),
        ({"x": torch.zeros(1, 8, 64, 64).transpose(2, 3)}, ArgumentError),
        ({"granularity": "row"}, ArgumentError),
        ({"granularity": "head", "qhead_per_kvhead": 3}, ArgumentError),
        ({"qhead_per_kvhead": 2}, ArgumentError),
        ({"values": 1}, DTypeError),
        ({"values": True, "hadamard": True}, ArgumentError),
        ({"signs": torch.ones(64)}, ArgumentError),
        ({"hadamard": True, "signs": torch.ones(32)}, ArgumentError),
        ({"hadamard": True, "signs": torch.ones(64, dtype=torch.int8)}, DTypeError),
        ({"rotary_cos": torch.ones(8, 16)}, ArgumentError),
        ({"rotary_cos": torch.ones(7, 16), "rotary_sin": torch.ones(7, 16)}, ArgumentError),
        ({"rotary_cos": torch.ones(8, 12), "rotary_sin": torch.ones(8, 12)}, ArgumentError),
        ({"rotary_cos": torch.ones(8, 48), "rotary_sin": torch.ones(8, 48)}, ArgumentError),
        ({"seqlen_offsets": 3}, ArgumentError),
        ({"seqused": torch.zeros(2, dtype=torch.int32)}, ArgumentError),
        ({"seqused": torch.zeros(1)}, DTypeError),
        ({"seqused": torch.full((1,), 9, dtype=torch.int32)}, ArgumentError),
        ({"x": torch.zeros(8, 1, 64), "cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}, ArgumentError),
        ({"x": torch.zeros(8, 1, 64), "cu_seqlens": torch.tensor([0, 4, 2], dtype=torch.int32)}, ArgumentError),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_name(change, error):
    arguments = {"x": torch.zeros(1, 8, 2, 64)} | change
    with pytest.raises(error):
        quantize_fp8(**arguments)


@pytest.mark.parametrize("shape", [(0, 5, 2, 64), (2, 0, 2, 64), (2, 5, 0, 64)])
def test_empty_tensors_give_empty_codes(shape):
    for form in ("tensor", "head", "block"):
        codes, descale = quantize_fp8(torch.zeros(shape), form)
        assert codes.shape == shape and (descale == 1).all()
    assert hadamard_transform(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_fp8_attention_refuses_gradients_by_name(name):
    tensors = {n: randn(1, 8, 1, 64) for n in "qkv"}
    tensors[name].requires_grad_()
    with pytest.raises(UnsupportedError, match=name):
        flash_hopper.flash_attn_fp8_func(**tensors)


def test_fp8_attention_takes_16_bit_tensors_of_one_dtype():
    q = torch.zeros(1, 8, 1, 64)
    with pytest.raises(DTypeError):
        flash_hopper.flash_attn_fp8_func(q, q, q)
    with pytest.raises(DTypeError):
        flash_hopper.flash_attn_fp8_func(q.half(), q.bfloat16(), q.half())
