"""Inputs: the strides, values and surroundings that a case promises."""

from dataclasses import replace

import pytest
import torch

from flash_hopper.problem.dtypes import DType
from flash_hopper.reference import naive
from flash_hopper.testing.cases import LAYOUTS, VALUES, Case
from flash_hopper.testing.inputs import TORCH_DTYPES, draw, make_inputs

BASE = Case(DType.BF16, 2, 4, 2, 24, 24, 16, 16)
FITTING = {"size1": replace(BASE, batch=1)}


def with_layout(layout, **other):
    case = FITTING.get(layout, BASE)
    return replace(case, layout=layout, strided="qkv" if layout == "packed" else "qkvo", **other)


def operands(case, device="cpu"):
    inputs = make_inputs(case, device)
    found = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": inputs.out}
    return {name: x for name, x in found.items() if x is not None}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DType)
def test_every_layout_holds_the_same_values_with_last_stride_1(layout, dtype):
    case = with_layout(layout, dtype=dtype)
    plain = operands(replace(case, layout="bshd", strided="qkvo"))
    for name, x in operands(case).items():
        assert x.shape == case.shape(name)
        assert x.dtype == TORCH_DTYPES[dtype]
        assert x.stride(3) == 1
        if name == "o":
            assert x.isnan().all()
        elif layout not in ("expand_batch", "expand_heads"):
            assert torch.equal(x, plain[name])


@pytest.mark.parametrize(
    ("layout", "claim"),
    [
        ("bshd", lambda x: x.is_contiguous()),
        ("bhsd", lambda x: x.transpose(1, 2).is_contiguous()),
        ("sbhd", lambda x: x.transpose(0, 1).is_contiguous()),
        ("packed", lambda x: x.stride(1) == 8 * 16),
        ("headslice", lambda x: x.stride(1) == (x.shape[2] + 3) * 16),
        ("dimslice", lambda x: x.stride(2) == 16 + 24 and x.storage_offset() * 2 % 16 == 0),
        ("expand_batch", lambda x: x.stride(0) == 0),
        ("expand_heads", lambda x: x.stride(2) == 0),
        ("size1", lambda x: x.stride(0) > 2**32 and x.stride(0) % 8 == 1),
        ("offset", lambda x: x.is_contiguous() and x.data_ptr() % 32 == 16),
        ("misaligned", lambda x: x.is_contiguous() and x.data_ptr() % 16 != 0),
        ("misstride", lambda x: x.stride(2) * 2 % 16 != 0 and x.data_ptr() % 16 == 0),
    ],
)
def test_layouts_are_what_their_names_say(layout, claim):
    for name, x in operands(with_layout(layout)).items():
        if name != "o" or not layout.startswith(("expand", "packed")):
            assert claim(x), (name, x.stride(), x.data_ptr())


def test_aligned_layouts_are_aligned_to_16_bytes():
    for layout in set(LAYOUTS) - {"misaligned", "misstride"}:
        for x in operands(with_layout(layout)).values():
            assert x.data_ptr() % 16 == 0
            assert all(s * 2 % 16 == 0 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1)


@pytest.mark.parametrize("strided", ["q", "k", "v", "o", "kv"])
def test_only_the_named_operands_have_the_layout(strided):
    case = replace(BASE, layout="bhsd", strided=strided)
    for name, x in operands(case).items():
        assert x.is_contiguous() == (name not in strided)


def test_packed_key_and_value_of_different_dims_share_rows():
    case = replace(BASE, dv=8, layout="packed", strided="kv")
    found = operands(case)
    assert found["k"].stride() == found["v"].stride() == (24 * 2 * 24, 2 * 24, 24, 1)
    assert found["v"].data_ptr() - found["k"].data_ptr() == 16 * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_everything_around_the_views_is_nan(layout):
    case = with_layout(layout)
    inputs = make_inputs(case)
    for x in (inputs.q, inputs.k, inputs.v):
        x.fill_(float("nan"))
    assert all(flat.isnan().all() for flat in inputs.buffers.values())
    assert all(len(flat) >= 128 for flat in inputs.buffers.values())


@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"packed", "expand_batch", "expand_heads"}))
@pytest.mark.parametrize("dtype", DType)
def test_a_write_beside_out_is_found_wherever_it_falls(layout, dtype):
    case = with_layout(layout, dtype=dtype)
    inputs = make_inputs(case)
    inputs.out.fill_(1.0)
    assert inputs.out_is_contained()
    flat = inputs.buffers["o"]
    inside = torch.zeros(len(flat), dtype=torch.bool)
    inside.as_strided(inputs.out.shape, inputs.out.stride(), inputs.out.storage_offset()).fill_(True)
    for i in (~inside).nonzero().flatten()[:: max(1, len(flat) // 40)].tolist():
        inputs.refill_out()
        inputs.out.fill_(1.0)
        flat[i] = float("nan")  # as a kernel would store it, not the pattern
        assert not inputs.out_is_contained()


def test_a_change_of_an_input_is_found():
    inputs = make_inputs(BASE)
    before = inputs.snapshot()
    assert inputs.changed(before) is None
    inputs.k[1, 3, 0, 2] += 1
    assert inputs.changed(before) == "k"


def test_inputs_depend_on_the_seed_and_nothing_else():
    first, again, other = (make_inputs(replace(BASE, seed=seed)) for seed in (5, 5, 6))
    assert torch.equal(first.q, again.q)
    assert torch.equal(first.v, again.v)
    assert not torch.equal(first.q, other.q)


@pytest.mark.parametrize("shape", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads": 0, "heads_k": 0}])
@pytest.mark.parametrize("values", VALUES)
def test_sizes_may_be_zero(shape, values):
    case = replace(BASE, values=values, **shape)
    assert {name: tuple(x.shape) for name, x in operands(case).items()} == {n: case.shape(n) for n in "qkvo"}


def logits(case):
    """float64 logits (batch, heads, seqlen_q, seqlen_k) of the values of a case."""
    q, k, _ = (x.double() for x in draw(case))
    k = k.repeat_interleave(case.heads // case.heads_k, dim=2)
    return torch.einsum("bihd,bjhd->bhij", q, k) * case.problem().softmax_scale


@pytest.mark.parametrize("scale", [None, -0.2, 3.0])
def test_values_do_what_their_names_say(scale):
    def of(values, **other):
        return logits(replace(BASE, batch=3, seqlen_k=200, values=values, scale=scale, **other))

    extreme = of("extreme", d=64, dv=64)
    assert 90 < float(extreme.abs().median()) < 150
    signs = extreme[:, 2:].mean(dim=3).sign()  # query heads of the second key head: all keys of a row on one side
    assert ((extreme[:, 2:].sign() == signs[..., None]).double().mean()) > 0.99
    assert (of("negative") < -100).double().mean() > 0.99

    top = of("onehot", d=64, dv=64).topk(2, dim=3).values
    assert ((top[..., 0] - top[..., 1]) > 10).double().mean() > 0.95

    position = torch.linspace(-1, 1, 200).double()
    for values, direction in (("rising", 1), ("falling", -1)):
        along = of(values)
        centred = along - along.mean(dim=3, keepdim=True)
        correlation = (centred * position).sum(3) / (centred.norm(dim=3) * position.norm())
        assert (direction * correlation > 0.9).all()
        per_block = (along[..., 80:].mean(dim=3) - along[..., :80].mean(dim=3)).abs()
        assert (per_block > 10).all()
    slopes = of("slopes")[..., [0, 199]].diff(dim=3)
    assert 0.3 < (slopes > 0).double().mean() < 0.7

    sizes = of("mixed").abs().mean(dim=(1, 2, 3))
    assert sizes.max() / sizes.min() > 50


def test_values_of_v_have_their_sizes():
    sizes = {values: draw(replace(BASE, values=values))[2] for values in VALUES}
    assert (sizes["samesign"] >= 0.5).all()
    assert sizes["small"].abs().max() < 0.01
    assert sizes["large"].abs().max() > 1000
    assert sizes["outlier"][..., 3].abs().mean() > 10 * sizes["outlier"][..., 4].abs().mean()


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_values_stay_finite_in_16_bits_and_give_a_finite_result(values, dtype):
    for scale in (None, 20.0, 1e-8, 0.0):
        inputs = make_inputs(replace(BASE, values=values, dtype=dtype, scale=scale, d=256, dv=256))
        out, lse = naive.attention(inputs.q, inputs.k, inputs.v, softmax_scale=scale or 0.0, causal=False)
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()
