"""Inputs: the strides, values and surroundings that a case promises."""

from dataclasses import replace

import pytest
import torch

from flash_hopper.problem.dtypes import DType
from flash_hopper.reference import naive
from flash_hopper.testing.cases import DLSES, DOUTS, LAYOUTS, VALUES, Case
from flash_hopper.testing.inputs import TORCH_DTYPES, draw, draw_gradients, make_inputs

BASE = Case(DType.BF16, 2, 4, 2, 24, 24, 16, 16)
BACK = replace(BASE, direction="backward", give_out=False, seqlen_k=30, dlse="bhs")
FITTING = {"size1": replace(BASE, batch=1)}
DTYPES_AND_LAYOUTS = [(t, layout) for t in DType for layout in LAYOUTS if (t, layout) != (DType.E4M3, "packed")]
DIFFERENTIABLE = [t for t in DType if t != DType.E4M3]


def with_layout(layout, **other):
    case = FITTING.get(layout, BASE)
    return replace(case, layout=layout, strided="qkv" if layout == "packed" else "qkvo", **other)


def operands(case, device="cpu"):
    inputs = make_inputs(case, device)
    found = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "o": inputs.out}
    return {name: x for name, x in found.items() if x is not None}


@pytest.mark.parametrize(("dtype", "layout"), DTYPES_AND_LAYOUTS)
def test_every_layout_holds_the_same_values_with_last_stride_1(layout, dtype):
    case = with_layout(layout, dtype=dtype)
    plain = operands(replace(case, layout="bshd", strided="qkvo"))
    for name, x in operands(case).items():
        assert x.shape == case.shape(name)
        assert x.dtype == TORCH_DTYPES[case.out_dtype if case.is_fp8 and name == "o" else dtype]
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


@pytest.mark.parametrize("dout", sorted(set(DOUTS) - {"none"}))
@pytest.mark.parametrize("dtype", DIFFERENTIABLE)
def test_every_layout_of_dout_holds_the_same_values(dout, dtype):
    plain = make_inputs(replace(BACK, dtype=dtype)).dout
    x = make_inputs(replace(BACK, dtype=dtype, dout=dout)).dout
    assert (x.shape, x.dtype) == (BACK.shape("o"), TORCH_DTYPES[dtype])
    free = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    assert torch.equal(x[free], plain[free])
    assert torch.equal(x, x[free].expand_as(x))


@pytest.mark.parametrize(
    ("dout", "claim"),
    [
        ("bshd", lambda x: x.is_contiguous()),
        ("bhsd", lambda x: x.transpose(1, 2).is_contiguous()),
        ("sbhd", lambda x: x.transpose(0, 1).is_contiguous()),
        ("dimfirst", lambda x: x.permute(0, 3, 1, 2).is_contiguous()),
        ("headslice", lambda x: x.stride(1) == (x.shape[2] + 3) * 16),
        ("dimslice", lambda x: x.stride(2) == 16 + 24 and x.data_ptr() % 16 == 0),
        ("step", lambda x: x.stride() == (24 * 4 * 32, 4 * 32, 32, 2)),
        ("offset", lambda x: x.is_contiguous() and x.data_ptr() % 32 == 16),
        ("misaligned", lambda x: x.is_contiguous() and x.data_ptr() % 16 != 0),
        ("misstride", lambda x: x.stride(2) == 17),
        ("expand_batch", lambda x: x.stride() == (0, 4 * 16, 16, 1)),
        ("expand_rows", lambda x: x.stride() == (4 * 16, 0, 16, 1)),
        ("expand_heads", lambda x: x.stride() == (24 * 16, 16, 0, 1)),
        ("expand_dim", lambda x: x.stride() == (24 * 4, 4, 1, 0)),
        ("expand_all", lambda x: x.stride() == (0, 0, 0, 0)),
        ("none", lambda x: x is None),
    ],
)
def test_layouts_of_dout_are_what_their_names_say(dout, claim):
    assert claim(make_inputs(replace(BACK, dout=dout)).dout)


def test_dlse_is_float32_and_lies_as_its_name_says():
    made = {dlse: make_inputs(replace(BACK, dlse=dlse)).dlse for dlse in DLSES}
    assert made.pop("none") is None
    assert all((x.shape, x.dtype) == ((2, 4, 24), torch.float32) for x in made.values())
    assert made["bhs"].is_contiguous()
    assert made["bsh"].transpose(1, 2).is_contiguous()
    assert made["expand_all"].stride() == (0, 0, 0)
    assert torch.equal(made["bhs"], made["bsh"])
    assert (made["expand_all"] == made["bhs"][0, 0, 0]).all()
    assert make_inputs(replace(BACK, dtype=DType.FP64)).dlse.dtype == torch.float64


def test_gradients_have_their_own_random_numbers_and_leave_those_of_the_inputs():
    forward, backward = make_inputs(replace(BACK, direction="forward", dlse="none")), make_inputs(BACK)
    assert forward.dout is forward.dlse is None
    assert all(torch.equal(getattr(forward, x), getattr(backward, x)) for x in "qkv")
    assert not torch.equal(backward.dout, backward.q)
    assert not torch.equal(backward.dout, make_inputs(replace(BACK, seed=1)).dout)


@pytest.mark.parametrize("dout", sorted(set(DOUTS) - {"none"}))
def test_everything_around_dout_and_dlse_is_nan_and_a_change_of_either_is_found(dout):
    inputs = make_inputs(replace(BACK, dout=dout))
    before = inputs.snapshot()
    assert inputs.changed(before) is None
    for name, x in (("dlse", inputs.dlse), ("dout", inputs.dout)):
        x.as_strided((1,), (1,), x.storage_offset()).fill_(3.0)
        assert inputs.changed(before) == name
        one = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
        x[one] = float("nan")
        assert inputs.buffers[name].isnan().all()


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
    for dout in set(DOUTS) - {"none"}:
        back = make_inputs(replace(BACK, dout=dout, values=values, **shape))
        assert tuple(back.dout.shape) == replace(BACK, **shape).shape("o")


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


def test_values_of_dout_have_their_sizes():
    drawn = {values: draw_gradients(replace(BACK, batch=5, seqlen_q=400, values=values))[0] for values in VALUES}
    assert (drawn["samesign"] >= 0.5).all()
    assert drawn["large"].abs().max() < 0.01
    assert drawn["outlier"][..., 3].abs().mean() > 10 * drawn["outlier"][..., 4].abs().mean()
    by_entry = drawn["mixed"].abs().mean(dim=(1, 2, 3))
    assert by_entry.max() / by_entry.min() > 1000
    rows = drawn["gated"].abs().amax(dim=3)
    assert 0.1 < (rows == 0).float().mean() < 0.3
    assert rows[rows > 0].min() < 1e-3 < 0.5 < rows.max()
    dlse = draw_gradients(BACK)[1]
    assert 3 < dlse.std() < 5


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_values_stay_finite_in_16_bits_and_give_a_finite_result(values, dtype):
    for scale in (None, 20.0, 1e-8, 0.0):
        inputs = make_inputs(replace(BASE, values=values, dtype=dtype, scale=scale, d=256, dv=256))
        out, lse = naive.attention(inputs.q, inputs.k, inputs.v, softmax_scale=scale or 0.0)
        assert torch.isfinite(out).all()
        assert torch.isfinite(lse).all()
