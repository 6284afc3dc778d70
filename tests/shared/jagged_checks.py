"""Jagged tensors (torch.nested) in the public functions, whatever computes them: both floors import these and bring a `place`.

They must give what the ragged call gives on their values and offsets.
"""

import pytest
import torch
from operator_checks import FORWARD, Calls, saving
from torch.utils.checkpoint import checkpoint

import flash_hopper
from flash_hopper import (
    autograd,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flash_hopper.launch import attention as launch_attention

QUERIES, KEYS = (0, 4, 4, 37, 38), (0, 9, 40, 41, 90)
OPTIONS = {
    "full": {},
    "causal": {"causal": True, "softmax_scale": -0.3},
    "window": {"window_size": (9, 2)},
    "chunk": {"attention_chunk": 8, "causal": True},
}


def offsets(place, ends, dtype=torch.int64):
    return torch.tensor(ends, dtype=dtype, device=place.device)


def jagged(place, *, own_offsets=True, holes=False, dv=16, requires_grad="qkv"):
    """q, k and v as jagged leaves; with the same offsets or not, with room behind each sequence or none."""
    ends = offsets(place, QUERIES)
    other = offsets(place, KEYS) if own_offsets else ends
    made = []
    used = {id(e): (e.diff() - 3).clamp_min(0) if holes else None for e in (ends, other)}
    for name, e, heads, dim in (("q", ends, 4, 32), ("k", other, 2, 32), ("v", other, 2, dv)):
        values = place.normal(int(e[-1]), heads, dim, seed=ord(name))
        made.append(
            torch.nested.nested_tensor_from_jagged(values, e, used[id(e)]).requires_grad_(name in requires_grad)
        )
    return tuple(made)


def as_ragged(q, k, v):
    """The same call without nested tensors: leaves with the values, and the arguments of the ragged function."""
    leaves = tuple(x.values().detach().requires_grad_(x.requires_grad) for x in (q, k, v))
    index = {
        "cu_seqlens_q": q.offsets().int(),
        "cu_seqlens_k": k.offsets().int(),
        "seqused_q": None if q.lengths() is None else q.lengths().int(),
        "seqused_k": None if k.lengths() is None else k.lengths().int(),
    }
    return leaves, {**index, "max_seqlen_q": None, "max_seqlen_k": None}


def structure(x):
    return x.offsets(), x.lengths()


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("holes", [False, True], ids=["dense rows", "holes"])
@pytest.mark.parametrize("own_offsets", [False, True], ids=["one structure", "two structures"])
def test_a_jagged_call_is_the_ragged_call_on_its_values(place, own_offsets, holes, options):
    inputs = jagged(place, own_offsets=own_offsets, holes=holes)
    leaves, lengths = as_ragged(*inputs)
    options = OPTIONS[options] | {"deterministic": True, "return_lse": True}
    out, lse = flash_attn_func(*inputs, **options)
    want, want_lse = flash_attn_varlen_func(*leaves, **lengths, **options)
    assert out.is_nested
    assert out.layout == torch.jagged
    assert all(a is b for a, b in zip(structure(out), structure(inputs[0]), strict=True))
    assert tuple(out.shape) == (*inputs[0].shape[:3], 16)
    assert not lse.is_nested
    assert torch.equal(out.values(), want)
    assert torch.equal(lse, want_lse)
    dout, dlse = place.normal(*want.shape, seed=4), place.normal(*lse.shape, seed=5).to(lse.dtype)
    found = torch.autograd.grad((out.values(), lse), inputs, (dout, dlse))
    wanted = torch.autograd.grad((want, want_lse), leaves, (dout, dlse))
    for x, got, g in zip(inputs, found, wanted, strict=True):
        assert got.is_nested
        assert got.offsets() is x.offsets()
        assert torch.equal(got.values(), g)


def test_gradients_flow_through_operations_on_jagged_tensors(place):
    inputs = jagged(place, requires_grad="q")
    leaves, lengths = as_ragged(*inputs)
    out = flash_attn_func(inputs[0] * 2, *inputs[1:], causal=True).sin()
    out.values().sum().backward()
    want = flash_attn_varlen_func(leaves[0] * 2, *leaves[1:], **lengths, causal=True).sin()
    want.sum().backward()
    place.assert_close(inputs[0].grad.values(), leaves[0].grad)
    assert inputs[1].grad is None


def test_sequences_made_of_lists_of_tensors(place):
    lists = [[place.normal(n, heads, 32, seed=heads) for n in (5, 1, 30)] for heads in (4, 2)]
    q, k = (torch.nested.as_nested_tensor(x, layout=torch.jagged) for x in lists)
    v = torch.nested.nested_tensor_from_jagged(k.values() * 0.5, k.offsets())
    out = flash_attn_func(q, k, v, causal=True)
    for got, rows, keys in zip(out.unbind(), *lists, strict=True):
        place.assert_close(got, flash_attn_func(rows[None], keys[None], keys[None] * 0.5, causal=True)[0])


def test_out_is_a_jagged_tensor_too(place):
    inputs = jagged(place, requires_grad="")
    want = flash_attn_func(*inputs).values()
    values = torch.full_like(want, float("nan"))
    out = torch.nested.nested_tensor_from_jagged(values, inputs[0].offsets())
    assert flash_attn_func(*inputs, out=out) is out
    assert torch.equal(values, want)
    stranger = torch.nested.nested_tensor_from_jagged(values, inputs[0].offsets().clone())
    for wrong in (stranger, values):
        with pytest.raises(flash_hopper.ArgumentError, match=r"^out must"):
            flash_attn_func(*inputs, out=wrong)


def test_a_mix_of_jagged_and_other_tensors_is_refused_by_name(place):
    inputs, others = jagged(place), place.inputs(d=32, dv=16, heads=4)
    for i, name in enumerate("qkv"):
        mixed = list(inputs)
        mixed[i] = others[i]
        with pytest.raises(flash_hopper.ArgumentError, match=rf"^{name} must be a jagged tensor"):
            flash_attn_func(*mixed)
    with pytest.raises(flash_hopper.ArgumentError, match=r"^q must be a jagged tensor.*out: nested"):
        flash_attn_func(*others, out=inputs[0])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_jagged_tensors_of_another_form_are_refused_by_name(place):
    q, k, v = jagged(place)
    copied = torch.nested.nested_tensor_from_jagged(v.values().detach(), v.offsets().clone())
    with pytest.raises(flash_hopper.ArgumentError, match=r"^v must have the very offsets of k"):
        flash_attn_func(q, k, copied)
    strided = torch.nested.nested_tensor([place.normal(3, 2, 32)] * 4)
    with pytest.raises(flash_hopper.ArgumentError, match=r"^k must have layout torch\.jagged"):
        flash_attn_func(q, strided, v)
    flat = torch.nested.nested_tensor_from_jagged(q.values().flatten(1).detach(), q.offsets())
    with pytest.raises(flash_hopper.ArgumentError, match=r"^q must be .batch, j, heads, head_dim."):
        flash_attn_func(flat, k, v)
    with pytest.raises(flash_hopper.ArgumentError, match="jagged in dimension 2"):
        flash_attn_func(q.transpose(1, 2), k, v)
    packed = torch.nested.nested_tensor_from_jagged(place.normal(38, 3, 4, 32), q.offsets())
    for function, arguments in ((flash_attn_qkvpacked_func, (packed,)), (flash_attn_kvpacked_func, (q, packed))):
        with pytest.raises(flash_hopper.ArgumentError, match="not nested"):
            function(*arguments)
    out, lse = (x.detach() for x in flash_attn_func(q, k, v, return_lse=True))
    with pytest.raises(flash_hopper.ArgumentError, match="no jagged tensors"):
        flash_hopper.flash_attn_backward_func(out, q, k, v, out, lse)
    lengths = as_ragged(q, k, v)[1]
    with pytest.raises(flash_hopper.ArgumentError, match="flash_attn_func"):
        flash_attn_varlen_func(q, k, v, **lengths)
    fewer = torch.nested.nested_tensor_from_jagged(q.values().detach(), offsets(place, (0, 4, 38)))
    with pytest.raises(flash_hopper.ArgumentError, match="number of sequences"):
        flash_attn_func(fewer, k, v)


def test_offsets_are_converted_once_and_nothing_is_read(place):
    for own_offsets in (False, True):
        inputs = jagged(place, own_offsets=own_offsets, requires_grad="")
        flash_attn_func(*inputs)
        with Calls() as calls:
            flash_attn_func(*inputs)
        assert calls.seen.count(torch.ops.aten._to_copy.default) == 1 + own_offsets
        assert torch.ops.aten._local_scalar_dense.default not in calls.seen
        assert calls.count() == (1, 0)


def test_a_length_that_torch_knows_is_taken_as_a_hint(place, monkeypatch):
    seen = []
    monkeypatch.setattr(launch_attention, "_prepared", {})  # as if nothing had been called before
    call = autograd.prepare_call
    monkeypatch.setattr(autograd, "prepare_call", lambda *args: seen.append(args[5]) or call(*args))
    q, k, v = jagged(place, requires_grad="")
    knowing = torch.nested.nested_tensor_from_jagged(q.values(), q.offsets(), max_seqlen=33)
    flash_attn_func(q, k, v)
    flash_attn_func(knowing, k, v)
    assert [(s.max_seqlen_q, s.max_seqlen_k) for s in seen] == [(None, None), (33, None)]


def test_autocast_casts_jagged_tensors(place):
    dtype = torch.float16 if place.dtype == torch.float16 else torch.bfloat16
    wide = jagged(place._replace(dtype=torch.float32), requires_grad="")
    cast = [torch.nested.nested_tensor_from_jagged(x.values().to(dtype), x.offsets()) for x in wide]
    cast[2] = torch.nested.nested_tensor_from_jagged(cast[2].values(), cast[1].offsets())
    with torch.autocast(place.device.type, dtype=dtype):
        out = flash_attn_func(*wide)
    assert torch.equal(out.values(), flash_attn_func(*cast).values())


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_jagged_call_compiles_to_one_graph(place, compiler, dynamic):
    def function(q, k, v):
        # torch itself cannot pass a jagged tensor with holes out of a graph
        return flash_attn_func(q * 1.0, k, v, causal=True, window_size=(20, None)).values()

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    for own_offsets, holes in ((True, False), (False, False), (True, True)):
        inputs = jagged(place, own_offsets=own_offsets, holes=holes)
        found = []
        for call in (compiled, function):
            values = call(*inputs)
            gradients = torch.autograd.grad(values.square().sum(), inputs)
            found.append((values, *(g.values() for g in gradients)))
        place.assert_all_close(*found)


def test_a_compiled_call_returns_a_jagged_tensor(place, compiler):
    inputs = jagged(place)
    compiled = torch.compile(lambda *x: flash_attn_func(*x, causal=True), fullgraph=True, backend=compiler)
    out, want = compiled(*inputs), flash_attn_func(*inputs, causal=True)
    assert out.is_nested
    assert out.offsets() is inputs[0].offsets()
    place.assert_close(out.values(), want.values())
    found = [torch.autograd.grad(x.values().sum(), inputs) for x in (out, want)]
    place.assert_all_close(*([g.values() for g in f] for f in found))


def test_jagged_calls_can_be_checkpointed(place):
    inputs = jagged(place)

    def block(q, k, v):
        return flash_attn_func(q.sin(), k, v, causal=True, deterministic=True).sin()

    want = torch.autograd.grad(block(*inputs).values().sum(), inputs)
    for context in ({}, {"context_fn": saving(FORWARD)}):
        out = checkpoint(block, *inputs, use_reentrant=False, **context)
        got = torch.autograd.grad(out.values().sum(), inputs)
        place.assert_all_close([x.values() for x in got], [x.values() for x in want])
