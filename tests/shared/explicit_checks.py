"""The backward as a call of its own, whatever computes it: both floors import these tests and bring a `place`."""

from itertools import product

import pytest
import torch
from operator_checks import BACKWARD, Calls
from ragged_calls import KINDS, MASKS, batch

import flash_hopper
from flash_hopper import flash_attn_backward_func, flash_attn_func
from flash_hopper.kernels import backward_support
from flash_hopper.launch import explicit
from flash_hopper.problem.features import Feature
from flash_hopper.reference import tiled

every_mask = pytest.mark.parametrize("mask", MASKS)


def forward(inputs, **options):
    """(out, lse) and what was given, without a graph."""
    with torch.no_grad():
        return flash_attn_func(*inputs, return_lse=True, **options)


def buffers(place, inputs, fill=0.0):
    """Float32 buffers for the gradients of q, k and v."""
    return tuple(torch.full(x.shape, fill, dtype=torch.float32, device=place.device) for x in inputs)


def gradients_of_lse(place, lse):
    return place.normal(*lse.shape, seed=5).to(lse.dtype)


@every_mask
def test_it_gives_the_gradients_of_autograd(place, mask):
    options = MASKS[mask] | {"deterministic": True}
    inputs = place.inputs(d=64, dv=32)
    results = flash_attn_func(*inputs, -0.2, return_lse=True, **options)
    dout, dlse = place.normal(*results[0].shape, seed=4), gradients_of_lse(place, results[1])
    for passed in ((dout, dlse), (dout, None)):
        pairs = [(x, g) for x, g in zip(results, passed, strict=True) if g is not None]
        want = torch.autograd.grad([x for x, _ in pairs], inputs, [g for _, g in pairs], retain_graph=True)
        got = flash_attn_backward_func(dout, *inputs, *results, -0.2, dlse=passed[1], **options)
        assert all(map(torch.equal, got, want))
        assert not any(g.requires_grad for g in got)


@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_the_gradients_of_ragged_calls(place, kind):
    options = {"causal": True, "window_size": (15, None), "deterministic": True}
    given = batch(place, kind)
    dout, dlse = given.output_gradients(place)
    results = given.call(**options)
    want = torch.autograd.grad(results, given.inputs, (dout, dlse))
    lengths = given.lengths | {"max_seqlen_q": 40, "max_seqlen_k": torch.tensor(65)}
    got = flash_attn_backward_func(dout, *given.inputs, *results, dlse=dlse, **lengths, **options)
    assert all(map(torch.equal, got, want))
    into = buffers(place, given.inputs)
    assert (
        flash_attn_backward_func(dout, *given.inputs, *results, dlse=dlse, **lengths, **options, grad_out=into) is into
    )
    place.assert_all_close(into, want)


@every_mask
def test_gradients_are_added_to_what_the_buffers_hold(place, mask):
    options = MASKS[mask]
    inputs = place.inputs(requires_grad="")
    out, lse = forward(inputs, **options)
    dout = place.normal(*out.shape, seed=4)
    want = flash_attn_backward_func(dout, *inputs, out, lse, **options)
    into = buffers(place, inputs, fill=3.0)
    got = flash_attn_backward_func(dout, *inputs, out, lse, **options, grad_out=into)
    assert all(a is b for a, b in zip(got, into, strict=True))
    place.assert_all_close(into, [g.float() + 3 for g in want])
    flash_attn_backward_func(dout, *inputs, out, lse, **options, grad_out=into)
    place.assert_all_close(into, [2 * g.float() + 3 for g in want])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_the_keys_add_up_to_the_whole_gradient(place, parts, causal):
    """As in ring attention: out and lse are those of all keys."""
    seqlen, size = 60, 60 // parts
    inputs = place.inputs(seqlen_q=seqlen, seqlen_k=seqlen)
    results = flash_attn_func(*inputs, causal=causal, return_lse=True)
    dout, dlse = place.normal(*results[0].shape, seed=4), gradients_of_lse(place, results[1])
    want = torch.autograd.grad(results, inputs, (dout, dlse))
    q, k, v = (x.detach() for x in inputs)
    into = dq, dk, dv = buffers(place, inputs)
    for start in range(0, seqlen, size):
        rows = slice(start, start + size)
        # masks are aligned by the part's own length: the bound is where the diagonal of all keys is
        window = (None, seqlen - start - size) if causal else (None, None)
        flash_attn_backward_func(
            dout, q, k[:, rows], v[:, rows], *results, dlse=dlse, window_size=window,
            grad_out=(dq, dk[:, rows], dv[:, rows]),
        )  # fmt: skip
    place.assert_all_close(into, want)


def test_buffers_keep_what_16_bits_would_lose(place):
    """Many small contributions to a large number: a sum in the dtype of the inputs would not grow."""
    dtype = torch.float16 if place.dtype == torch.float16 else torch.bfloat16
    inputs = place._replace(dtype=dtype).inputs(requires_grad="", seqlen_q=8, seqlen_k=8)
    out, lse = forward(inputs)
    dout = torch.ones_like(out)
    total, once = buffers(place, inputs, fill=1000.0), buffers(place, inputs)
    flash_attn_backward_func(dout, *inputs, out, lse, grad_out=once)
    for _ in range(8):
        flash_attn_backward_func(dout, *inputs, out, lse, grad_out=total)
    assert max(float(x.abs().max()) for x in once) > 1e-2
    for x, y in zip(total, once, strict=True):
        assert ((x - 1000 - 8 * y).abs() <= 2e-3).all()


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qv", "qkv", ""])
def test_a_buffer_may_be_missing(place, wanted):
    inputs = place.inputs(requires_grad="")
    out, lse = forward(inputs, causal=True)
    dout = place.normal(*out.shape, seed=4)
    whole = buffers(place, inputs)
    flash_attn_backward_func(dout, *inputs, out, lse, causal=True, grad_out=whole)
    some = tuple(x if name in wanted else None for name, x in zip("qkv", buffers(place, inputs), strict=True))
    got = flash_attn_backward_func(dout, *inputs, out, lse, causal=True, grad_out=some)
    for name, given, result, want in zip("qkv", some, got, whole, strict=True):
        assert result is given
        if name in wanted:
            place.assert_close(result, want)


def test_buffers_may_be_parts_of_other_tensors(place):
    inputs = place.inputs(requires_grad="")
    out, lse = forward(inputs)
    dout = place.normal(*out.shape, seed=4)
    want = buffers(place, inputs)
    flash_attn_backward_func(dout, *inputs, out, lse, grad_out=want)
    wider = [torch.full((*x.shape[:3], x.shape[3] + 16), 7.0, device=place.device) for x in inputs]
    parts = tuple(w[..., 8:-8] for w in wider)
    for part in parts:
        part.zero_()
    flash_attn_backward_func(dout, *inputs, out, lse, grad_out=parts)
    place.assert_all_close(parts, want)
    assert all((w[..., :8] == 7).all() and (w[..., -8:] == 7).all() for w in wider)


def test_the_gradient_of_out_may_have_any_strides(place):
    inputs = place.inputs(requires_grad="")
    out, lse = forward(inputs)
    for strided in (
        torch.ones((), dtype=place.dtype, device=place.device).expand_as(out),
        place.normal(*out.shape).transpose(1, 2).contiguous().transpose(1, 2),
        place.normal(*out.shape).repeat_interleave(2, dim=3)[..., ::2],
    ):
        got = flash_attn_backward_func(strided, *inputs, out, lse, deterministic=True)
        want = flash_attn_backward_func(strided.contiguous(), *inputs, out, lse, deterministic=True)
        place.assert_all_close(got, want)


def test_what_does_not_fit_is_refused_by_name(place):
    inputs = q, k, v = place.inputs(requires_grad="")
    out, lse = forward(inputs)
    good = {
        "dout": out,
        "q": q,
        "k": k,
        "v": v,
        "out": out,
        "lse": lse,
        "dlse": lse,
        "grad_out": buffers(place, inputs),
    }
    argument, dtype, device = flash_hopper.ArgumentError, flash_hopper.DTypeError, flash_hopper.DeviceError
    elsewhere = "meta" if place.device.type == "cpu" else "cpu"
    wrong = [
        (dtype, "q", q.int()), (argument, "k", k[:, 1:]), (dtype, "v", v.to(torch.float8_e4m3fn)), (dtype, "q", None),
        (argument, "dout", out[:, 1:]), (dtype, "dout", out.double()), (dtype, "dout", None),
        (argument, "out", out[..., 8:]), (dtype, "out", out.double()), (dtype, "out", 3),
        (argument, "lse", lse[:, 1:]), (dtype, "lse", lse.half()), (argument, "dlse", lse[:1]), (dtype, "dlse", lse.half()),
        (argument, "grad_out", good["grad_out"][:2]), (argument, "grad_out", q),
    ]  # fmt: skip
    if place.device.type == "cuda":  # on the CPU meta tensors are a call without data
        wrong += [(device, name, good[name].to(elsewhere)) for name in ("dout", "out", "lse", "dlse")]
    for error, name, value in wrong:
        with pytest.raises(error, match=rf"\b{name}\b"):
            flash_attn_backward_func(**(good | {name: value}))
    for i, (x, own) in enumerate(zip(good["grad_out"], inputs, strict=True)):
        name = ("dq", "dk", "dv")[i]
        for error, value in (
            (argument, x[:, 1:]),
            (dtype, x.double()),
            (dtype, x.half()),
            (dtype, "dq"),
            (argument, x.transpose(1, 3).contiguous().transpose(1, 3)),
            (argument, x[:, :1].expand(x.shape)),
        ):
            targets = tuple(value if j == i else y for j, y in enumerate(good["grad_out"]))
            with pytest.raises(error, match=rf"{name} of grad_out"):
                flash_attn_backward_func(**(good | {"grad_out": targets}))
        assert x.shape == own.shape


def test_options_are_checked_and_refused_like_those_of_the_forward(place, monkeypatch):
    inputs = place.inputs(requires_grad="")
    out, lse = forward(inputs)
    arguments = (out, *inputs, out, lse)
    for error, options in (
        (flash_hopper.ArgumentError, {"window_size": (-2, 0)}),
        (flash_hopper.DTypeError, {"window_size": ([], 0)}),
        (flash_hopper.ArgumentError, {"attention_chunk": -1}),
        (flash_hopper.DTypeError, {"deterministic": None}),
        (flash_hopper.ArgumentError, {"softmax_scale": float("nan")}),
        (
            flash_hopper.ArgumentError,
            {"max_seqlen_q": -1, "seqused_q": torch.ones(2, dtype=torch.int32, device=place.device)},
        ),
    ):
        with pytest.raises(error, match=next(iter(options))):
            flash_attn_backward_func(*arguments, **options)
    want = flash_attn_backward_func(*arguments, window_size=(3, 0), deterministic=True)
    got = flash_attn_backward_func(*arguments, window_size=[3, 0], deterministic=True)
    assert all(map(torch.equal, got, want))
    lacking = {Feature.WINDOW, Feature.CHUNK}
    monkeypatch.setattr(backward_support, "SUPPORTED", backward_support.SUPPORTED - lacking)
    if place.device.type == "cpu":
        monkeypatch.setattr(tiled, "SUPPORTED", tiled.SUPPORTED - lacking)
    with pytest.raises(flash_hopper.UnsupportedError, match="attention_chunk"):
        flash_attn_backward_func(*arguments, attention_chunk=19)


def test_a_warm_call_checks_nothing_again(place, monkeypatch):
    for kind, has_buffers in product(KINDS, (False, True)):
        given = batch(place, kind, requires_grad="")
        out, lse = given.call()
        into = buffers(place, given.inputs) if has_buffers else None
        call = lambda into, given=given, out=out, lse=lse: flash_attn_backward_func(  # noqa: E731
            out, *given.inputs, out, lse, **given.lengths, grad_out=into, deterministic=True
        )
        want = call(into)
        with monkeypatch.context() as patch:
            patch.setattr(explicit, "_checked", None)
            got = call(buffers(place, given.inputs) if has_buffers else None)
        assert all(map(torch.equal, got, want))


def test_whoever_must_see_an_operator_sees_the_backward(place, compiler):
    inputs = place.inputs()
    out, lse = forward(inputs, causal=True)
    dout = place.normal(*out.shape, seed=4)

    def function(*tensors):
        return flash_attn_backward_func(*tensors, causal=True, deterministic=True)

    want = function(dout, *inputs, out, lse)
    with Calls() as calls:
        got = function(dout, *inputs, out, lse)
    assert calls.seen == [BACKWARD]
    place.assert_all_close(got, want)
    torch._dynamo.reset()
    got = torch.compile(function, fullgraph=True, backend=compiler)(dout, *inputs, out, lse)
    place.assert_all_close(got, want)
    metas = [x.to("meta") for x in (dout, *inputs, out, lse)]
    assert [(x.shape, x.dtype) for x in function(*metas)] == [(x.shape, x.dtype) for x in want]
    with Calls(), pytest.raises(flash_hopper.UnsupportedError, match="grad_out"):
        flash_attn_backward_func(dout, *inputs, out, lse, grad_out=buffers(place, inputs))


def test_parameters_are_ordinary_tensors(place):
    inputs = place.inputs()
    out, lse = forward(inputs)
    want = flash_attn_backward_func(out, *inputs, out, lse, deterministic=True)
    got = flash_attn_backward_func(out, *map(torch.nn.Parameter, inputs), out, lse, deterministic=True)
    assert all(map(torch.equal, got, want))
    assert all(type(x) is torch.Tensor for x in got)


def test_empty_calls_leave_the_buffers_as_they_are(place):
    for sizes in ({"seqlen_q": 0}, {"seqlen_k": 0}, {"batch": 0}):
        inputs = place.inputs(requires_grad="", **sizes)
        out, lse = forward(inputs)
        into = buffers(place, inputs, fill=5.0)
        flash_attn_backward_func(out, *inputs, out, lse, grad_out=into)
        assert all((x == 5).all() for x in into)
        assert all((x == 0).all() for x in flash_attn_backward_func(out, *inputs, out, lse))
