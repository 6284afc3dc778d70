"""Quantisation on the GPU: the same bits as the reference, whatever the shape, the lengths and the memory behind them."""

from itertools import pairwise

import pytest
import torch

import flash_hopper
from flash_hopper import Fp8Values, UnsupportedError, hadamard_signs, hadamard_transform, quantize_fp8

HEAD_DIMS = tuple(range(16, 257, 16))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMS = (("tensor", 1), ("head", 1), ("head", 3), ("block", 1))
RAGGED = {
    "usual": [0, 200, 300, 1300],
    "empty": [0, 0, 0, 5, 133, 133, 400, 656, 656],
    "words": list(range(0, 700, 7)),
    "blocks": list(range(0, 1281, 128)),
    "nothing": [0, 0],
    "many": [0, *range(1, 301)],
}


def values(*shape, dtype=torch.bfloat16, seed=0):
    """N(0, 1) with heads of different sizes and rare outliers."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    outliers = torch.rand(shape, generator=generator) < 1e-3
    x = torch.where(outliers, 10 * x, x) * torch.logspace(-2, 2, shape[-2])[:, None]
    return x.to(dtype)


def on(device, options):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}


def parts(result):
    codes, descale = result
    return (codes.codes if isinstance(codes, Fp8Values) else codes), descale


def assert_as_reference(device, x, form, rows=None, **options):
    """Codes of the first `rows` rows and scales that are read, bit for bit."""
    codes, descale = parts(quantize_fp8(x.to(device), form, **on(device, options)))
    expected, scales = parts(quantize_fp8(x, form, **options))
    assert codes.dtype == torch.float8_e4m3fn and codes.shape == expected.shape and descale.shape == scales.shape
    torch.testing.assert_close(descale.cpu(), scales, rtol=0, atol=0)
    torch.testing.assert_close(codes.cpu().float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_codes_and_block_scales_are_those_of_the_reference(device, head_dim, hadamard):
    assert_as_reference(device, values(2, 391, 3, head_dim), "block", hadamard=hadamard)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_transposed_values_are_those_of_the_reference(device, head_dim):
    assert_as_reference(device, values(2, 391, 3, head_dim), "block", values=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "group"), FORMS)
@pytest.mark.parametrize("mode", ["plain", "hadamard", "values"])
def test_every_form_and_dtype_is_that_of_the_reference(device, form, group, dtype, mode):
    options = {} if mode == "plain" else {mode: True}
    assert_as_reference(device, values(3, 300, 6, 64, dtype=dtype), form, qhead_per_kvhead=group, **options)


@pytest.mark.parametrize("offsets", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("form", ["tensor", "head", "block"])
@pytest.mark.parametrize("mode", ["hadamard", "values"])
def test_ragged_batches_are_those_of_the_reference(device, form, offsets, mode):
    x = values(offsets[-1] + 130, 2, 128)
    x[offsets[-1] :] = float("nan")
    lengths = torch.tensor(offsets, dtype=torch.int32)
    assert_as_reference(device, x, form, cu_seqlens=lengths, **{mode: True})
    used = torch.tensor([(b - a) * 3 // 4 for a, b in pairwise(offsets)], dtype=torch.int32)
    for n, (start, end) in zip(used.tolist(), pairwise(offsets), strict=True):
        x[start + n : end] = float("nan")
    assert_as_reference(device, x, form, cu_seqlens=lengths, seqused=used, **{mode: True})


@pytest.mark.parametrize("form", ["tensor", "head", "block"])
def test_unused_rows_of_a_padded_batch_may_hold_anything(device, form):
    x, used = values(4, 300, 2, 96), torch.tensor([0, 128, 131, 300], dtype=torch.int32)
    for b, n in enumerate(used.tolist()):
        x[b, n:] = float("inf")
    for mode in ("hadamard", "values"):
        assert_as_reference(device, x, form, seqused=used, **{mode: True})


@pytest.mark.parametrize("rows", [*range(1, 20), 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000])
def test_every_length_is_quantised_to_its_end_and_no_further(device, rows):
    assert_as_reference(device, values(1, rows, 2, 64), "block", hadamard=True)
    assert_as_reference(device, values(1, rows, 2, 64), "block", values=True)
    buffer = torch.full((2, rows + 1, 1, 64), 7.0, device=device, dtype=torch.bfloat16)
    buffer[:, rows] = float("nan")
    codes, descale = quantize_fp8(buffer[:, :rows])
    assert (codes.float() == 448).all() and descale.isfinite().all()


@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e-30, 1e-10, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("hadamard", [False, True])
def test_finite_values_of_any_size_give_finite_codes(device, scale, hadamard):
    x = torch.sign(values(1, 130, 1, 128, dtype=torch.float32)) * scale
    for form in ("tensor", "head", "block"):
        codes, descale = quantize_fp8(x.to(device), form, hadamard=hadamard)
        assert codes.float().isfinite().all() and descale.isfinite().all() and (descale > 0).all()
        if scale > 1e-37:
            assert_as_reference(device, x, form, hadamard=hadamard)


def test_nan_gives_nan_where_it_is_and_does_not_count_for_the_scale(device):
    x = values(1, 200, 2, 64)
    x[0, 3, 0, 5] = x[0, 190, 1, 63] = float("nan")
    for form in ("tensor", "head", "block"):
        assert_as_reference(device, x, form)
        assert_as_reference(device, x, form, values=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 112, 128, 192, 256])
def test_the_hadamard_transform_is_that_of_the_reference(device, head_dim, dtype):
    x = values(5, 77, 3, head_dim, dtype=dtype)
    for signs, scale in ((None, None), (hadamard_signs(head_dim, 5), None), (None, 0.25)):
        on_device = None if signs is None else signs.to(device)
        found = hadamard_transform(x.to(device), on_device, scale)
        assert found.dtype == dtype and torch.equal(found.cpu(), hadamard_transform(x, signs, scale))
    assert torch.equal(hadamard_transform(x[0, 0, 0].to(device)).cpu(), hadamard_transform(x[0, 0, 0]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 128), (128, 32), (96, 96), (80, 48), (256, 256)])
@pytest.mark.parametrize("wide", [False, True])
def test_rotary_embedding_in_front_is_that_of_the_reference_up_to_rounding(
    device, head_dim, rotary_dim, interleaved, wide
):
    x, offsets = values(2, 200, 2, head_dim), torch.tensor([3, 40], dtype=torch.int32)
    angles = torch.arange(300)[:, None] / 100 ** (torch.arange(rotary_dim // 2) / rotary_dim)
    table = torch.float32 if wide else x.dtype
    cos, sin = angles.cos().to(table), angles.sin().to(table)
    for hadamard in (False, True):
        options = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved, "hadamard": hadamard}
        for given in (offsets, 11):
            on_cpu = options | {"seqlen_offsets": given}
            codes, descale = quantize_fp8(x.to(device), **on(device, on_cpu))
            expected, scales = quantize_fp8(x, **on_cpu)
            torch.testing.assert_close(descale.cpu(), scales, rtol=1e-5, atol=0)
            a, b = codes.cpu().float(), expected.float()
            assert ((a - b).abs() <= b.abs() * 2.0**-3 + 2.0**-9).all() and (a != b).float().mean() < 1e-2


@pytest.mark.parametrize("change", ["strided", "misaligned", "expanded", "transposed"])
def test_any_strides_are_taken(device, change):
    x = values(2, 300, 3, 64)
    wide = torch.full((2, 300, 3, 136), float("nan"), dtype=x.dtype)
    given = {
        "strided": lambda: wide[..., 64:128].copy_(x),
        "misaligned": lambda: wide[..., 1:65].copy_(x),
        "expanded": lambda: x[:1, :, :1].expand(2, 300, 3, 64),
        "transposed": lambda: x.transpose(1, 2).contiguous().transpose(1, 2),
    }[change]()
    moved = given.to(device)
    if change != "expanded":
        memory = torch.zeros(2 * 300 * 3 * 136 + 8, dtype=x.dtype, device=device)
        moved = torch.as_strided(memory, given.shape, given.stride(), 1 if change == "misaligned" else 0).copy_(given)
    expected, scales = quantize_fp8(given.contiguous(), hadamard=True)
    codes, descale = quantize_fp8(moved, hadamard=True)
    assert torch.equal(codes.cpu().float(), expected.float()) and torch.equal(descale.cpu(), scales)


def test_many_blocks_are_quantised_by_few_ctas(device):
    assert_as_reference(device, values(3, 4096, 16, 128), "block", hadamard=True)
    assert_as_reference(device, values(1, 20000, 3, 256), "head", values=True)


def test_repeated_calls_give_the_same_bits(device):
    x = values(2, 2000, 8, 128).to(device)
    for form in ("tensor", "block"):
        first = parts(quantize_fp8(x, form, hadamard=True))
        for _ in range(20):
            again = parts(quantize_fp8(x, form, hadamard=True))
            assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("form", ["tensor", "head", "block"])
def test_a_captured_call_quantises_what_the_tensor_holds_at_replay(device, form):
    x = values(2, 300, 2, 128).to(device)
    quantize_fp8(x, form, hadamard=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, descale = quantize_fp8(x, form, hadamard=True)
    x.mul_(-3)
    graph.replay()
    expected, scales = quantize_fp8(x, form, hadamard=True)
    assert torch.equal(codes.float(), expected.float()) and torch.equal(descale, scales)


def test_gradients_are_refused(device):
    x = values(1, 8, 1, 64).to(device).requires_grad_()
    with pytest.raises(UnsupportedError):
        quantize_fp8(x)
    with pytest.raises(UnsupportedError):
        hadamard_transform(x)
    with pytest.raises(UnsupportedError):
        flash_hopper.flash_attn_fp8_func(x, x, x)
