"""Gradients by eager autograd, whatever computes them: both floors import these tests and bring a `place`."""

from itertools import chain, combinations

import pytest
import torch

import flash_hopper
from flash_hopper import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func
from flash_hopper.kernels import backward_support
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask
from flash_hopper.reference import naive, tiled

SUBSETS = ["".join(c) for c in chain.from_iterable(combinations("qkv", n) for n in (1, 2, 3))]

# what comes back for out (batch, seqlen, heads, d): a view of some memory with these strides
GRADIENT_LAYOUTS = {
    "contiguous": lambda x: x,
    "one number": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "one per row": lambda x: x[..., :1].expand_as(x),
    "one row": lambda x: x[:, :1].expand_as(x),
    "one batch entry": lambda x: x[:1].expand_as(x),
    "one head": lambda x: x[:, :, :1].expand_as(x),
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "dims first": lambda x: x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
    "rows last": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "part of more dims": lambda x: torch.cat((x, x, x), dim=3)[..., 3 : 3 + x.shape[3]],
    "every other dim": lambda x: x.repeat_interleave(2, dim=3)[..., ::2],
    "every other row": lambda x: x.repeat_interleave(2, dim=1)[:, 1::2],
    "odd offset": lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view_as(x),
}


def gradients(place, inputs, dout=None, dlse=None, **options):
    """(out, lse) and gradients of those inputs that require one, for gradients of out and lse."""
    out, lse = flash_attn_func(*inputs, return_lse=True, **options)
    given = [(x, g) for x, g in ((out, dout), (lse, dlse)) if g is not None]
    wanted = [x for x in inputs if x.requires_grad]
    return (out, lse), torch.autograd.grad([x for x, _ in given], wanted, [g for _, g in given])


def right_gradients(inputs, dout=None, dlse=None, softmax_scale=None, causal=False):
    wide = [x.detach().double().requires_grad_() for x in inputs]
    scale = inputs[0].shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    out, lse = naive.attention(*wide, softmax_scale=scale, mask=Mask(right=0 if causal else None))
    given = [(x, g.double()) for x, g in ((out, dout), (lse, dlse)) if g is not None]
    found = torch.autograd.grad([x for x, _ in given], wide, [g for _, g in given], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, wide, strict=True)]


def output_gradients(place, q, v):
    batch, seqlen_q, heads, _ = q.shape
    dlse = place.normal(batch, heads, seqlen_q, seed=5).to(place.device, torch.float32)
    return place.normal(batch, seqlen_q, heads, v.shape[3], seed=4), dlse


@pytest.mark.parametrize("through", ["out", "lse", "both"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"softmax_scale": -0.3, "causal": True}, {"softmax_scale": 0.0}, {"deterministic": True}],
    ids=str,
)
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)])
def test_gradients_through_out_and_lse_are_right(place, dims, options, through):
    for lengths in ((40, 70), (70, 40), (1, 129)):
        inputs = place.inputs(seqlen_q=lengths[0], seqlen_k=lengths[1], d=dims[0], dv=dims[1])
        dout, dlse = output_gradients(place, inputs[0], inputs[2])
        given = (dout if through != "lse" else None, dlse if through != "out" else None)
        scale_and_mask = {name: value for name, value in options.items() if name != "deterministic"}
        if through == "lse":
            _, got = gradients(place, (*inputs[:2], inputs[2].detach()), *given, **options)
            place.assert_all_close(got, right_gradients(inputs, *given, **scale_and_mask)[:2])
        else:
            _, got = gradients(place, inputs, *given, **options)
            place.assert_all_close(got, right_gradients(inputs, *given, **scale_and_mask))
        assert all(g.dtype == place.dtype and g.device == place.device for g in got)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("d", [64, 256])
@pytest.mark.parametrize("subset", SUBSETS)
def test_any_subset_of_the_inputs_may_require_grad(place, subset, d, deterministic):
    options = {"causal": True, "deterministic": deterministic}
    every = place.inputs(d=d, dv=d)
    dout, dlse = output_gradients(place, every[0], every[2])
    _, want = gradients(place, every, dout, dlse, **options)
    some = place.inputs(d=d, dv=d, requires_grad=subset)
    (out, lse), got = gradients(place, some, dout, dlse, **options)
    assert out.requires_grad
    assert lse.requires_grad
    wanted = [g for name, g in zip("qkv", want, strict=True) if name in subset]
    place.assert_all_close(got, wanted)
    out, lse = flash_attn_func(*some, return_lse=True, **options)
    torch.autograd.backward((out, lse), (dout, dlse))
    assert [x.grad is not None for x in some] == [name in subset for name in "qkv"]


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
@pytest.mark.parametrize("d", [64, 128])
def test_the_gradient_of_out_may_have_any_strides(place, d, layout):
    inputs = place.inputs(d=d, dv=d)
    dout, _ = output_gradients(place, inputs[0], inputs[2])
    strided = GRADIENT_LAYOUTS[layout](dout)
    options = {"causal": True, "deterministic": True}
    _, got = gradients(place, inputs, strided, **options)
    _, want = gradients(place, inputs, strided.clone(memory_format=torch.contiguous_format), **options)
    place.assert_all_close(got, want)


@pytest.mark.parametrize("layout", ["contiguous", "one number", "one per row", "rows last", "every other row"])
def test_the_gradient_of_lse_may_have_any_strides(place, layout):
    inputs = place.inputs()
    _, dlse = output_gradients(place, inputs[0], inputs[2])
    strided = GRADIENT_LAYOUTS[layout](dlse.unsqueeze(0)).squeeze(0)
    inputs = (*inputs[:2], inputs[2].detach())
    _, got = gradients(place, inputs, None, strided, deterministic=True)
    _, want = gradients(place, inputs, None, strided.contiguous(), deterministic=True)
    place.assert_all_close(got, want)


def test_sums_and_means_of_the_results_can_be_differentiated(place):
    """The gradients that these send back are expanded numbers."""
    inputs = place.inputs()
    out, lse = flash_attn_func(*inputs, return_lse=True)
    got = torch.autograd.grad(out.sum() + 3 * lse.mean(), inputs)
    want = right_gradients(inputs, torch.ones_like(out), torch.full_like(lse, 3 / lse.numel()))
    place.assert_all_close(got, want)


def test_a_result_that_was_not_used_sends_no_gradient(place):
    inputs = place.inputs()
    out, lse = flash_attn_func(*inputs, return_lse=True)
    assert torch.autograd.grad(out[:, :0].sum() + lse.sum(), inputs)[2].abs().max() == 0
    out, lse = flash_attn_func(*inputs, return_lse=True)
    unused = torch.autograd.grad(lse.sum(), inputs, allow_unused=True)
    place.assert_all_close(unused, right_gradients(inputs, None, torch.ones_like(lse)))


@pytest.mark.parametrize("expanded", ["batch of k and v", "heads of k and v", "keys", "rows of q", "batch of q"])
def test_gradients_of_expanded_inputs_are_summed_by_autograd(place, expanded):
    q, k, v = place.inputs(heads=4, heads_k=4)
    cut = {
        "batch of k and v": lambda x, is_q: x if is_q else x[:1],
        "heads of k and v": lambda x, is_q: x if is_q else x[:, :, :1],
        "keys": lambda x, is_q: x if is_q else x[:, :1],
        "rows of q": lambda x, is_q: x[:, :1] if is_q else x,
        "batch of q": lambda x, is_q: x[:1] if is_q else x,
    }[expanded]
    shapes = (q.shape, k.shape, v.shape)
    leaves = [cut(x, x is q).detach().clone().requires_grad_() for x in (q, k, v)]
    dout, _ = output_gradients(place, q, v)
    found = []
    for prepare in (lambda x: x, lambda x: x.clone(memory_format=torch.contiguous_format)):
        whole = [prepare(x.expand(shape)) for x, shape in zip(leaves, shapes, strict=True)]
        found.append(torch.autograd.grad(flash_attn_func(*whole, deterministic=True), leaves, dout))
    for leaf, got, want in zip(leaves, *found, strict=True):
        assert got.shape == leaf.shape
        assert got.dtype == place.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_tensors_get_the_gradients_of_their_parts(place, causal):
    q, k, v = place.inputs(seqlen_q=50, seqlen_k=50, heads=4, heads_k=4)
    dout, _ = output_gradients(place, q, v)
    _, want = gradients(place, (q, k, v), dout, causal=causal, deterministic=True)
    qkv = torch.stack((q, k, v), dim=2).detach().requires_grad_()
    out = flash_attn_qkvpacked_func(qkv, causal=causal, deterministic=True)
    place.assert_close(torch.autograd.grad(out, qkv, dout)[0], torch.stack(want, dim=2))
    kv = torch.stack((k, v), dim=2).detach().requires_grad_()
    out = flash_attn_kvpacked_func(q, kv, causal=causal, deterministic=True)
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    place.assert_all_close((dq, dkv), (want[0], torch.stack(want[1:], dim=2)))


def test_slices_of_one_projection_get_its_gradient(place):
    """q, k and v as a model makes them: parts of one tensor, with its strides."""
    packed = place.normal(2, 50, 8, 64).requires_grad_()
    dout = place.normal(2, 50, 4, 64, seed=9)
    out = flash_attn_func(*packed.split((4, 2, 2), dim=2), causal=True)
    (got,) = torch.autograd.grad(out, packed, dout)
    want = right_gradients(packed.detach().split((4, 2, 2), dim=2), dout, causal=True)
    place.assert_close(got, torch.cat(want, dim=2))


@pytest.mark.parametrize(
    "sizes", [{"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}, {"seqlen_q": 0, "seqlen_k": 0}], ids=str
)
def test_empty_inputs_have_zero_gradients(place, sizes):
    inputs = place.inputs(**sizes)
    out, lse = flash_attn_func(*inputs, return_lse=True)
    for x, g in zip(inputs, torch.autograd.grad(out.sum() + lse.nan_to_num(0, 0, 0).sum(), inputs), strict=True):
        assert g.shape == x.shape
        assert (g == 0).all()


def test_rows_that_see_no_key_get_and_give_no_gradient(place):
    inputs = place.inputs(seqlen_q=70, seqlen_k=40)
    dout, dlse = output_gradients(place, inputs[0], inputs[2])
    _, got = gradients(place, inputs, dout, dlse, causal=True, deterministic=True)
    assert (got[0][:, :30] == 0).all()
    wild = dout.clone(), dlse.clone()
    wild[0][:, :30], wild[1][..., :30] = 1e3, 1e3
    _, same = gradients(place, inputs, *wild, causal=True, deterministic=True)
    assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))


def test_a_graph_may_be_walked_twice_and_its_gradients_add_up(place):
    inputs = place.inputs()
    dout, _ = output_gradients(place, inputs[0], inputs[2])
    out = flash_attn_func(*inputs, deterministic=True)
    first = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    second = torch.autograd.grad(out, inputs, dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(out, inputs, dout)


def test_an_input_that_was_changed_in_place_is_noticed(place):
    for changed in range(3):
        leaves = place.inputs()
        inputs = [x * 1.0 for x in leaves]
        out = flash_attn_func(*inputs)
        with torch.no_grad():
            inputs[changed].mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_saved_tensors_may_be_kept_elsewhere(place):
    inputs = place.inputs()
    want = torch.autograd.grad(flash_attn_func(*inputs, deterministic=True).square().sum(), inputs)
    with torch.autograd.graph.save_on_cpu():
        out = flash_attn_func(*inputs, deterministic=True)
    got = torch.autograd.grad(out.square().sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_nothing_is_saved_where_no_gradient_is_wanted(place):
    inputs = place.inputs()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        with torch.no_grad():
            assert not flash_attn_func(*inputs).requires_grad
        with torch.inference_mode():
            assert not flash_attn_func(*inputs).requires_grad
        assert not flash_attn_func(*(x.detach() for x in inputs)).requires_grad
        assert not kept
        flash_attn_func(*inputs)
    assert len(kept) == 5, "q, k, v, out and lse"


def test_out_is_refused_with_inputs_that_require_grad(place):
    inputs = place.inputs()
    given = torch.empty_like(inputs[0], requires_grad=False)
    with pytest.raises(flash_hopper.ArgumentError, match="out= cannot be combined with inputs that require grad"):
        flash_attn_func(*inputs, out=given)
    with torch.no_grad():
        assert flash_attn_func(*inputs, out=given) is given


def test_a_second_derivative_is_refused_when_it_is_asked_for(place):
    inputs = place.inputs()
    plain = torch.autograd.grad(flash_attn_func(*inputs, deterministic=True).square().sum(), inputs)
    first = torch.autograd.grad(flash_attn_func(*inputs, deterministic=True).square().sum(), inputs, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))
    with pytest.raises(flash_hopper.UnsupportedError, match="second derivatives"):
        torch.autograd.grad(first[0].sum(), inputs)


def test_a_call_that_the_backward_could_not_follow_is_refused_at_once(place, monkeypatch):
    lacking = backward_support.SUPPORTED - {Feature.CAUSAL}
    monkeypatch.setattr(backward_support, "SUPPORTED", lacking)
    monkeypatch.setattr(tiled, "SUPPORTED", tiled.SUPPORTED if place.device.type == "cuda" else lacking)
    inputs = place.inputs(seqlen_q=41)  # a signature of its own
    flash_attn_func(*inputs)
    with pytest.raises(flash_hopper.UnsupportedError, match="causal=True"):
        flash_attn_func(*inputs, causal=True)
