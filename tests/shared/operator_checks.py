"""Attention as torch operators, whatever computes them: both floors import these tests and bring a `place`.

A call that goes through the operators (compiled, exported, checkpointed, ..) must give what the same call gives eagerly.
"""

import dataclasses
import inspect
import io
from functools import partial

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import flash_hopper
from flash_hopper import (
    autograd,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
)
from flash_hopper.kernels import backward_support
from flash_hopper.launch import ops
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.features import Feature
from flash_hopper.reference import tiled

FORWARD = torch.ops.flash_hopper.forward.default
BACKWARD = torch.ops.flash_hopper.backward.default

# Every flag of the operators away from its default, and the options that they stand for. pack_gqa is a hint that the kernels do not take yet.
FLAGS = [
    {},
    {"causal": True},
    {"softmax_scale": -0.25},
    {"deterministic": True, "sm_margin": 3},
    {"window_left": 9, "window_right": 2},
    {"causal": True, "attention_chunk": 24},
]

REFUSED = [
    ({"softcap": 20.0}, "softcap"),
    ({"sinks": torch.zeros(6)}, "sinks"),
    ({"score_mod": lambda *_: 0}, "score_mod"),
    ({"mask_mod": lambda *_: True}, "mask_mod"),
    ({"aux_tensors": [torch.zeros(1)]}, "aux_tensors"),
    ({"block_mask": 1}, "block_mask"),
    ({"q_descale": torch.ones(1)}, "q_descale"),
    ({"k_descale": torch.ones(1)}, "k_descale"),
    ({"v_descale": torch.ones(1)}, "v_descale"),
    ({"num_splits": 2}, "num_splits"),
    ({"batch_invariant": True}, "batch_invariant"),
    ({"fast_accum": True}, "fast_accum"),
]


def options_of(flags):
    """Flags of the operators as arguments of the public function."""
    options = {name: value for name, value in flags.items() if not name.startswith("window_")}
    return options | {"window_size": (flags.get("window_left"), flags.get("window_right"))}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Calls(TorchDispatchMode):
    """Counts the operators that pass by."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))

    def count(self):
        return self.seen.count(FORWARD), self.seen.count(BACKWARD)


class Graphs:
    """A backend of torch.compile that keeps the forward and the backward graph that it is given, and runs them as they are."""

    def __init__(self):
        self.made = []
        self.backend = aot_autograd(
            fw_compiler=self.keep, bw_compiler=self.keep, partition_fn=min_cut_rematerialization_partition
        )

    def keep(self, graph, _):
        self.made.append(graph)
        return make_boxed_func(graph.forward)

    def count(self):
        targets = [node.target for graph in self.made for node in graph.graph.nodes]
        return targets.count(FORWARD), targets.count(BACKWARD)


class Wrapper(torch.Tensor):
    """A tensor subclass whose data is another tensor's, and which notes what is done to it."""

    seen = []  # noqa: RUF012

    @staticmethod
    def __new__(cls, data):
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device, requires_grad=data.requires_grad
        )

    def __init__(self, data):
        self.data_tensor = data

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        args, kwargs = tree_map_only(cls, lambda x: x.data_tensor, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


class Renamed(torch.Tensor):
    """A tensor subclass that only changes what torch functions do: an ordinary tensor for our purposes."""


def loss_and_gradients(function, inputs):
    """The results of a function that returns (out, lse), and gradients of a sum over both."""
    out, lse = function(*inputs)
    loss = out.float().square().sum() + lse.sum()
    return (out, lse), torch.autograd.grad(loss, [x for x in inputs if x.requires_grad])


def assert_same_results(place, function, eager, inputs):
    got, got_gradients = loss_and_gradients(function, inputs)
    want, want_gradients = loss_and_gradients(eager, inputs)
    place.assert_all_close((*got, *got_gradients), (*want, *want_gradients))


# What the operators promise to torch


@pytest.mark.parametrize("requires_grad", ["", "qkv", "v"])
@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_opcheck_passes_for_the_forward(place, flags, requires_grad):
    inputs = place.inputs(requires_grad=requires_grad)
    torch.library.opcheck(FORWARD, inputs, flags | {"deterministic": True}, rtol=place.tolerance, atol=place.tolerance)


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("given", ["out", "lse", "both"])
def test_opcheck_passes_for_the_backward(place, given, needs):
    q, k, v = place.inputs(requires_grad="", d=192, dv=128)
    out, lse = FORWARD(q, k, v, None, True)
    dout = None if given == "lse" else torch.ones_like(out)
    dlse = None if given == "out" else torch.ones_like(lse)
    flags = {"causal": True, "deterministic": True, "needs_dq": needs[0], "needs_dkdv": needs[1]}
    arguments = (dout, dlse, q, k, v, out, lse)
    torch.library.opcheck(BACKWARD, arguments, flags, rtol=place.tolerance, atol=place.tolerance)


def test_results_share_no_memory_with_each_other_or_the_inputs(place):
    for subset in ("qkv", "q", "kv"):
        q, k, v = place.inputs(requires_grad="")
        out, lse = FORWARD(q, k, v)
        needs = {"needs_dq": "q" in subset, "needs_dkdv": "k" in subset}
        found = BACKWARD(torch.ones_like(out), None, q, k, v, out, lse, **needs)
        assert [x.numel() > 0 for x in found] == [name in subset for name in "qkv"]
        tensors = [q, k, v, out, lse, *(x for x in found if x.numel())]
        assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
        assert all(x.is_contiguous() for x in (out, lse, *found))


@pytest.mark.parametrize("sizes", [{}, {"seqlen_k": 0}, {"seqlen_q": 0}, {"d": 192, "dv": 128, "heads_k": 6}], ids=str)
def test_fake_and_meta_tensors_have_the_shapes_strides_and_dtypes_of_real_ones(place, sizes):
    q, k, v = place.inputs(requires_grad="", **sizes)
    q, k = q.transpose(1, 2).contiguous().transpose(1, 2), k.expand(k.shape)
    real = flash_attn_func(q, k, v, return_lse=True)
    real = (*real, *BACKWARD(real[0], real[1], q, k, v, *real))
    mode = FakeTensorMode()
    fakes = tuple(mode.from_tensor(x) for x in (q, k, v))
    metas = tuple(x.to("meta") for x in (q, k, v))
    for pretended, device in ((fakes, place.device), (metas, torch.device("meta"))):
        results = flash_attn_func(*pretended, return_lse=True)
        results = (*results, *BACKWARD(results[0], results[1], *pretended, *results))
        for got, want in zip(results, real, strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert got.device == device


@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_tensors_without_data_are_checked_like_others(place, kind):
    mode = FakeTensorMode()
    wrap = mode.from_tensor if kind == "fake" else (lambda x: x.to("meta"))
    q, k, v = (wrap(x) for x in place.inputs(requires_grad=""))
    with pytest.raises(flash_hopper.ArgumentError, match="k must have shape"):
        flash_attn_func(q, k[:, :3], v)
    with pytest.raises(flash_hopper.ArgumentError, match="head_dim of q and k"):
        flash_attn_func(q[..., :7], k[..., :7], v)
    with pytest.raises(flash_hopper.DTypeError, match="one dtype"):
        flash_attn_func(q, k, v.to(torch.float64))
    with pytest.raises(flash_hopper.DTypeError, match="dtype must be one of"):
        flash_attn_func(*(x.to(torch.int32) for x in (q, k, v)))
    with pytest.raises(flash_hopper.DTypeError, match="causal must be a bool"):
        flash_attn_func(q, k, v, causal=1.0)


def test_the_backward_operator_checks_what_it_is_given(place):
    q, k, v = place.inputs(requires_grad="")
    out, lse = FORWARD(q, k, v)
    for error, dout, dlse in (
        (flash_hopper.ArgumentError, out[:, 1:], None),
        (flash_hopper.ArgumentError, out, lse[:, :1]),
        (flash_hopper.DTypeError, out.double(), None),
        (flash_hopper.DTypeError, None, lse.half()),
        (flash_hopper.DeviceError, out.to("meta"), None),
    ):
        with pytest.raises(error):
            BACKWARD(dout, dlse, q, k, v, out, lse)
    with pytest.raises(flash_hopper.ArgumentError, match="out must have shape"):
        BACKWARD(out, None, q, k, v, out[:1], lse)


# Which calls go through the operators


def test_ordinary_eager_calls_do_not_go_through_the_operators(place, monkeypatch):
    def refuse(*_):
        raise AssertionError("an eager call went through the operator")

    monkeypatch.setattr(autograd, "_as_operator", refuse)
    inputs = place.inputs()
    flash_attn_func(*inputs, causal=True).sum().backward()
    with torch.no_grad():
        flash_attn_func(*inputs, return_lse=True)
    flash_attn_func(*(torch.nn.Parameter(x.detach()) for x in inputs)).sum().backward()
    flash_attn_func(*(x.detach().as_subclass(Renamed) for x in inputs))


def test_a_dispatch_mode_and_a_wrapping_subclass_see_the_operators(place):
    inputs = place.inputs()
    eager = partial(flash_attn_func, causal=True, deterministic=True, return_lse=True)
    with Calls() as calls:
        assert_same_results(place, eager, eager, inputs)
    assert calls.count() == (2, 2)
    for wrapped in range(3):
        Wrapper.seen.clear()
        mixed = [Wrapper(x.detach()) if i == wrapped else x.detach() for i, x in enumerate(inputs)]
        out, lse = eager(*mixed)
        assert type(out) is type(lse) is Wrapper
        assert Wrapper.seen == [FORWARD]
        place.assert_all_close((out.data_tensor, lse.data_tensor), eager(*inputs))


def test_parameters_and_harmless_subclasses_are_ordinary_tensors(place):
    inputs = place.inputs()
    want = torch.autograd.grad(flash_attn_func(*inputs, deterministic=True).sum(), inputs)
    for make in (lambda x: torch.nn.Parameter(x.detach()), lambda x: x.detach().as_subclass(Renamed).requires_grad_()):
        made = [make(x) for x in inputs]
        out = flash_attn_func(*made, deterministic=True)
        assert type(out) is torch.Tensor
        place.assert_all_close(torch.autograd.grad(out.sum(), made), want)


def test_the_operator_itself_can_be_called_and_differentiated(place):
    inputs = place.inputs(d=192, dv=128)
    for flags in FLAGS:
        eager = partial(flash_attn_func, return_lse=True, **options_of(flags))
        assert_same_results(place, partial(FORWARD, **flags), eager, inputs)


@pytest.mark.parametrize("subset", ["q", "k", "v", "qk", "kv", "qv"])
def test_the_operator_leaves_out_gradients_that_nobody_needs(place, subset):
    inputs = place.inputs(requires_grad=subset)
    with Calls() as calls:
        out = flash_attn_func(*inputs, causal=True)
        out.backward(torch.ones_like(out))
    assert calls.count() == (1, 1)
    assert [x.grad is not None for x in inputs] == [name in subset for name in "qkv"]
    want = torch.autograd.grad(flash_attn_func(*inputs, causal=True).sum(), [x for x in inputs if x.requires_grad])
    place.assert_all_close([x.grad for x in inputs if x.requires_grad], want)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_transforms_of_torch_func_are_refused_by_name(place, transform):
    q, k, v = place.inputs(requires_grad="")
    q = q.unsqueeze(0) if transform is torch.func.vmap else q
    with pytest.raises(flash_hopper.UnsupportedError, match=r"torch\.func"):
        transform(lambda x: flash_attn_func(x, k, v).sum())(q)


# torch.compile


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"causal": True, "softmax_scale": -0.25, "deterministic": True, "sm_margin": 3, "window_size": (-1, None)},
        {"window_size": (20, -1), "attention_chunk": 30},
    ],
    ids=["plain", "flags", "window and chunk"],
)
@pytest.mark.parametrize("dynamic", [None, False, True])
def test_a_compiled_call_is_one_graph(place, compiler, dynamic, flags):
    def function(q, k, v):
        out, lse = flash_attn_func(q * 1.0, k, v + 0.0, return_lse=True, **flags)
        return out * 2.0, lse

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    for lengths in ((40, 70), (33, 90), (70, 41)):
        inputs = place.inputs(seqlen_q=lengths[0], seqlen_k=lengths[1], d=192, dv=128)
        assert_same_results(place, compiled, function, inputs)


def test_a_dynamic_graph_serves_every_batch_and_length(place, compiler):
    function = partial(flash_attn_func, causal=True, return_lse=True)
    compiled = torch.compile(lambda *x: function(*x), fullgraph=True, dynamic=True, backend=compiler)
    # no two sizes alike but those that must be: torch takes equal sizes for equal symbols
    assert_same_results(place, compiled, function, place.inputs(batch=3, seqlen_q=40, seqlen_k=70))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, seqlen_q, seqlen_k in ((4, 41, 77), (5, 300, 20), (2, 65, 65), (7, 70, 40)):
            inputs = place.inputs(batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
            assert_same_results(place, compiled, function, inputs)


def test_scalars_of_a_compiled_call_may_change(place, compiler):
    def function(q, k, v, scale, margin):
        return flash_attn_func(q, k, v, scale, sm_margin=margin, return_lse=True)

    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    for scale, margin in ((0.1, 0), (0.2, 1), (0.3, 2), (-0.3, 2), (None, 0), (1, 0)):
        arguments = {"scale": scale, "margin": margin}
        assert_same_results(place, partial(compiled, **arguments), partial(function, **arguments), place.inputs())


def test_compiled_calls_without_gradients(place, compiler):
    inputs = place.inputs(requires_grad="")
    compiled = torch.compile(lambda *x: flash_attn_func(*x, causal=True), fullgraph=True, backend=compiler)
    want = flash_attn_func(*inputs, causal=True)
    place.assert_close(compiled(*inputs), want)
    with torch.no_grad():
        place.assert_close(compiled(*(x.clone().requires_grad_() for x in inputs)), want)
    with torch.inference_mode():
        place.assert_close(compiled(*inputs), want)


def test_a_compiled_call_writes_out(place, compiler):
    inputs = place.inputs(requires_grad="")
    compiled = torch.compile(lambda *x, out: flash_attn_func(*x, out=out), fullgraph=True, backend=compiler)
    given = torch.full_like(inputs[0], float("nan"))
    assert compiled(*inputs, out=given) is given
    place.assert_close(given, flash_attn_func(*inputs))
    for wrong in (given[:, :1], given.double()):
        with pytest.raises(Exception, match="out must be"):
            compiled(*inputs, out=wrong)


def test_packed_calls_compile(place, compiler):
    q, k, v = place.inputs(seqlen_q=50, seqlen_k=50, heads=4, heads_k=4)
    qkv, kv = (torch.stack(x, dim=2).detach().requires_grad_() for x in ((q, k, v), (k, v)))
    for function, arguments in ((flash_attn_qkvpacked_func, (qkv,)), (flash_attn_kvpacked_func, (q, kv))):
        eager = partial(function, causal=True, return_lse=True)
        compiled = torch.compile(lambda *x, eager=eager: eager(*x), fullgraph=True, backend=compiler)
        assert_same_results(place, compiled, eager, arguments)


def test_an_lse_that_nobody_uses_costs_no_gradient(place):
    """The backward of a compiled call that returns out alone is given no gradient of lse."""
    inputs, graphs = place.inputs(), Graphs()
    torch.compile(lambda *x: flash_attn_func(*x), fullgraph=True, backend=graphs.backend)(*inputs).sum().backward()
    (node,) = (node for node in graphs.made[1].graph.nodes if node.target is BACKWARD)
    assert node.args[0] is not None
    assert node.args[1] is None


@pytest.mark.parametrize(("options", "name"), REFUSED, ids=[name for _, name in REFUSED])
def test_what_the_operators_cannot_say_is_refused_by_name(place, options, name):
    inputs = place.inputs()
    options = {key: x.to(place.device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    compiled = torch.compile(lambda *x: flash_attn_func(*x, **options), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=name):
        compiled(*inputs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: flash_attn_func(*x, **options), backend="eager")
    for call in (compiled, partial(flash_attn_func, **options)):
        with pytest.raises(flash_hopper.UnsupportedError, match=name):
            call(*inputs)
    with Calls(), pytest.raises(flash_hopper.UnsupportedError, match=name):
        flash_attn_func(*inputs, **options)


def test_every_option_is_a_flag_of_the_operators_or_refused():
    """An option that is added later must not be lost on the way through a graph."""
    options = {field.name for field in dataclasses.fields(AttentionOptions)} - {"return_lse"}
    refused = {name for given, _ in REFUSED for name in given}
    assert options == refused | set(ops.FLAGS) - {"window_left", "window_right"} | {"window_size"}
    for operator in (FORWARD, BACKWARD):
        arguments = [argument.name for argument in operator._schema.arguments]
        first = arguments.index(ops.ARGUMENTS[0])
        assert tuple(arguments[first : first + len(ops.ARGUMENTS)]) == ops.ARGUMENTS


def test_every_argument_of_a_ragged_call_is_one_of_the_operators():
    tensors_and_options = set(inspect.signature(flash_attn_varlen_func).parameters)
    of_all = {"q", "k", "v", "out", "page_table", *(field.name for field in dataclasses.fields(AttentionOptions))}
    assert tensors_and_options - of_all == set(ops.ARGUMENTS) - set(ops.FLAGS)


def test_a_wrong_shape_is_named_when_compiled(place):
    q, k, v = place.inputs()
    compiled = torch.compile(lambda *x: flash_attn_func(*x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="k must have shape"):
        compiled(q, k[:, :3], v)


def test_a_call_that_the_backward_could_not_follow_is_refused_when_traced(place, monkeypatch):
    lacking = backward_support.SUPPORTED - {Feature.CAUSAL}
    monkeypatch.setattr(backward_support, "SUPPORTED", lacking)
    if place.device.type == "cpu":
        monkeypatch.setattr(tiled, "SUPPORTED", lacking)
    inputs = place.inputs(seqlen_q=43)
    compiled = torch.compile(lambda *x: flash_attn_func(*x, causal=True), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="does not support: causal=True"):
        compiled(*inputs)
    with Calls(), pytest.raises(flash_hopper.UnsupportedError, match="causal=True"):
        flash_attn_func(*inputs, causal=True)
    with pytest.raises(flash_hopper.UnsupportedError, match="causal=True"):
        FORWARD(*inputs, None, True)


# Second derivatives


def test_the_operator_refuses_a_second_derivative(place):
    inputs = place.inputs()
    out, _ = FORWARD(*inputs)
    first = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(flash_hopper.UnsupportedError, match="second derivatives"):
        torch.autograd.grad(first[0].sum(), inputs)


# Checkpointing


def block(q, k, v):
    return flash_attn_func(q.sin(), k.cos(), v, causal=True, deterministic=True).sin()


def saving(*operators):
    return partial(create_selective_checkpoint_contexts, list(operators))


@pytest.mark.parametrize(
    ("saved", "forwards"), [((FORWARD,), 1), ((torch.ops.aten.mm.default,), 2)], ids=["ours", "other"]
)
def test_selective_checkpointing_saves_what_it_names(place, saved, forwards):
    inputs = place.inputs()
    want = torch.autograd.grad(block(*inputs).sum(), inputs)
    with Calls() as calls:
        out = checkpoint(block, *inputs, use_reentrant=False, context_fn=saving(*saved))
        got = torch.autograd.grad(out.sum(), inputs)
    assert calls.count() == (forwards, 1)
    place.assert_all_close(got, want)
    out = checkpoint(block, *inputs, use_reentrant=False, context_fn=saving(*saved))
    place.assert_all_close(torch.autograd.grad(out.sum(), inputs), want)


@pytest.mark.parametrize(
    ("saved", "forwards"), [((FORWARD,), 1), ((torch.ops.aten.mm.default,), 2)], ids=["ours", "other"]
)
def test_selective_checkpointing_works_compiled(place, compiler, saved, forwards):
    def checkpointed(*x):
        return checkpoint(block, *x, use_reentrant=False, context_fn=saving(*saved))

    inputs, graphs = place.inputs(), Graphs()
    want = torch.autograd.grad(block(*inputs).sum(), inputs)
    out = torch.compile(checkpointed, fullgraph=True, backend=graphs.backend)(*inputs)
    place.assert_all_close(torch.autograd.grad(out.sum(), inputs), want)
    assert graphs.count() == (forwards, 1)
    torch._dynamo.reset()
    out = torch.compile(checkpointed, fullgraph=True, backend=compiler)(*inputs)
    place.assert_all_close(torch.autograd.grad(out.sum(), inputs), want)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_whole_blocks_may_be_checkpointed(place, use_reentrant):
    inputs = place.inputs()
    want = torch.autograd.grad(block(*inputs).sum(), inputs)
    checkpoint(block, *inputs, use_reentrant=use_reentrant).sum().backward()
    assert all(torch.equal(x.grad, g) for x, g in zip(inputs, want, strict=True))


# Autocast


def narrow(place):
    return torch.float16 if place.dtype == torch.float16 else torch.bfloat16


def test_autocast_casts_float32_and_gradients_come_back_in_float32(place, compiler):
    dtype = narrow(place)
    wide = [x.detach().float().requires_grad_() for x in place.inputs()]
    cast = [x.detach().to(dtype).requires_grad_() for x in wide]
    call = partial(flash_attn_func, causal=True, deterministic=True)
    want = call(*cast)
    want_gradients = torch.autograd.grad(want.float().sum(), cast)
    compiled = torch.compile(lambda *x: call(*x), fullgraph=True, backend=compiler)
    for function in (call, compiled):
        with torch.autocast(place.device.type, dtype=dtype):
            out = function(*wide)
            some_cast = function(cast[0], *wide[1:])
            with torch.no_grad():
                assert torch.equal(function(*wide), want)
        assert out.dtype == some_cast.dtype == dtype
        assert torch.equal(out, want)
        assert torch.equal(some_cast, want)
        for got, g in zip(torch.autograd.grad(out.float().sum(), wide), want_gradients, strict=True):
            assert got.dtype == torch.float32
            assert torch.equal(got, g.float())


def test_autocast_leaves_other_dtypes_alone(place):
    other = torch.float16 if narrow(place) == torch.bfloat16 else torch.bfloat16
    inputs = [x.detach().to(other) for x in place.inputs()]
    want = flash_attn_func(*inputs)
    with torch.autocast(place.device.type, dtype=narrow(place)):
        assert torch.equal(flash_attn_func(*inputs), want)
        for mixed in (other, torch.float64):
            with pytest.raises(flash_hopper.DTypeError, match="one dtype"):
                flash_attn_func(inputs[0].to(mixed), inputs[1].float(), inputs[2].float())


def test_autocast_of_the_same_call_may_be_on_or_off(place):
    """What is kept about a call made before must not outlive the autocast that it was made under."""
    inputs = [x.detach().float() for x in place.inputs()]
    for _ in range(2):
        with torch.autocast(place.device.type, dtype=narrow(place)):
            assert flash_attn_func(*inputs).dtype == narrow(place)
            with torch.autocast(place.device.type, enabled=False):
                uncast(place, inputs)
        uncast(place, inputs)


def uncast(place, inputs):
    if place.device.type == "cpu":
        assert flash_attn_func(*inputs).dtype == torch.float32
    else:
        with pytest.raises(flash_hopper.DTypeError, match="dtype must be one of"):
            flash_attn_func(*inputs)


# torch.export


class Layer(torch.nn.Module):
    """A projection and attention."""

    def __init__(self, place):
        super().__init__()
        self.proj = torch.nn.Linear(64, 64, device=place.device, dtype=place.dtype)

    def forward(self, q, k, v):
        return flash_attn_func(self.proj(q), k, v, causal=True, return_lse=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_module_can_be_exported_stored_and_loaded(place, dynamic, strict):
    inputs = place.inputs(requires_grad="")
    layer = Layer(place).requires_grad_(False)
    batch, rows, keys = (torch.export.Dim(name, min=2, max=4096) for name in ("batch", "rows", "keys"))
    shapes = ({0: batch, 1: rows}, {0: batch, 1: keys}, {0: batch, 1: keys}) if dynamic else None
    exported = torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=strict)
    assert FORWARD in {node.target for node in exported.graph.nodes}
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    place.assert_all_close(loaded(*inputs), layer(*inputs))
    if dynamic:
        inputs = place.inputs(batch=5, seqlen_q=91, seqlen_k=33, requires_grad="")
        place.assert_all_close(loaded(*inputs), layer(*inputs))


def test_a_module_exported_for_training_trains(place):
    inputs = place.inputs(requires_grad="")
    layer = Layer(place)
    exported = torch.export.export(layer, inputs, strict=False).module()
    found = []
    for module in (layer, exported):
        out, _ = module(*inputs)
        found.append(torch.autograd.grad(out.float().square().sum(), list(module.parameters())))
    place.assert_all_close(*found)
