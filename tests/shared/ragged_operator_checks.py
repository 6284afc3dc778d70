"""Ragged batches through the torch operators, whatever computes them: both floors import these and bring a `place`.

What goes through the operators must give what the same call gives eagerly.
"""

import io
from functools import partial

import pytest
import torch
from operator_checks import BACKWARD, FORWARD, Calls, Graphs, Wrapper, saving
from ragged_calls import KEYS, KINDS, QUERIES, batch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import flash_hopper
from flash_hopper import flash_attn_varlen_func
from flash_hopper.kernels import backward_support
from flash_hopper.launch import ops
from flash_hopper.problem.features import Feature
from flash_hopper.reference import tiled

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
FLAGS = [{}, {"causal": True}, {"window_left": 9, "window_right": 2}, {"attention_chunk": 12, "softmax_scale": -0.2}]
ALL_FLAGS = {"softmax_scale": -0.2, "window_left": 9, "window_right": 2, "attention_chunk": 12, "sm_margin": 2}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def finite(given):
    """Inputs without NaN in rows of no sequence: the tests of torch compare with ==."""
    return tuple(x.detach().nan_to_num().requires_grad_(x.requires_grad) for x in given.inputs)


def function_of(**options):
    """The call as a function of tensors alone: q, k, v and the four length tensors."""

    def function(q, k, v, *lengths):
        named = dict(zip(LENGTHS, lengths, strict=True)) | {"max_seqlen_q": None, "max_seqlen_k": None}
        out, lse = flash_attn_varlen_func(q * 1.0, k, v + 0.0, **(named | options), return_lse=True)
        return out * 2.0, lse

    return function


def assert_same(place, function, eager, given):
    """Equal results and gradients of q, k and v; `function` and `eager` take them and the length tensors."""
    lengths = tuple(given.lengths.values())
    found = []
    for call in (function, eager):
        inputs = finite(given)
        out, lse = call(*inputs, *lengths)
        loss = out.float().square().sum() + lse.nan_to_num(0, 0, 0).sum()
        found.append((out, lse, *torch.autograd.grad(loss, inputs)))
    place.assert_all_close(*found)


# What the operators promise to torch


@pytest.mark.parametrize(
    ("kind", "flags"), [("packed", flags) for flags in FLAGS] + [(kind, ALL_FLAGS) for kind in KINDS], ids=str
)
def test_opcheck_passes_for_ragged_calls(place, kind, flags):
    given = batch(place, kind, (5, 0, 9), (7, 3, 0))
    flags = flags | given.lengths | {"deterministic": True}
    tolerance = {"rtol": place.tolerance, "atol": place.tolerance}
    inputs = finite(given)
    torch.library.opcheck(FORWARD, inputs, flags | {"max_seqlen_q": 9}, **tolerance)
    plain = [x.detach() for x in inputs]
    out, lse = FORWARD(*plain, **flags)
    torch.library.opcheck(BACKWARD, (out.cos(), lse.nan_to_num(0, 0, 0).sin(), *plain, out, lse), flags, **tolerance)


@every_kind
def test_tensors_without_data_give_the_shapes_strides_and_dtypes_of_real_ones(place, kind):
    given = batch(place, kind, requires_grad="")
    real = given.call(causal=True)
    real = (*real, *BACKWARD(real[0], real[1], *given.inputs, *real, None, True, **given.lengths))
    mode = FakeTensorMode()
    for device, wrap in ((place.device, mode.from_tensor), (torch.device("meta"), lambda x: x.to("meta"))):
        inputs = [wrap(x) for x in given.inputs]
        lengths = {name: None if x is None else wrap(x) for name, x in given.lengths.items()}
        hints = {"max_seqlen_q": torch.tensor(40), "max_seqlen_k": None}
        results = flash_attn_varlen_func(*inputs, **lengths, **hints, causal=True, return_lse=True)
        results = (*results, *BACKWARD(*results, *inputs, *results, None, True, **lengths))
        for got, want in zip(results, real, strict=True):
            assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)
            assert got.device == device
        with pytest.raises(flash_hopper.DTypeError, match="int32"):
            flash_attn_varlen_func(*inputs, **{n: x if x is None else x.long() for n, x in lengths.items()}, **hints)


@every_kind
def test_a_dispatch_mode_sees_the_operators(place, kind):
    given = batch(place, kind)
    function = function_of(causal=True, window_size=(11, -1), deterministic=True)
    with Calls() as calls:
        assert_same(place, function, function, given)
    assert calls.count() == (2, 2)


def test_a_wrapping_subclass_among_the_lengths_sees_the_operator(place):
    given = batch(place, "packed and used", requires_grad="")
    want = given.call()
    for name, lengths in given.lengths.items():
        Wrapper.seen.clear()
        out, lse = given.call(**{name: Wrapper(lengths)})
        assert type(out) is type(lse) is Wrapper
        assert Wrapper.seen == [FORWARD]
        place.assert_all_close((out.data_tensor, lse.data_tensor), want)


def test_harmless_subclasses_among_the_lengths_are_ordinary_tensors(place):
    class Renamed(torch.Tensor):
        pass

    given = batch(place, "packed and used")
    want = given.call()
    got = given.call(**{name: x.as_subclass(Renamed) for name, x in given.lengths.items()})
    assert all(type(x) is torch.Tensor for x in got)
    place.assert_all_close(got, want)


# torch.compile


@pytest.mark.parametrize(
    ("kind", "dynamic"), [("packed and used", None), ("padded", None), *((k, k.startswith("pad")) for k in KINDS)]
)
def test_a_compiled_ragged_call_is_one_graph(place, compiler, dynamic, kind):
    function = function_of(window_size=(10, 3))
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=compiler)
    for queries, keys in ((QUERIES, KEYS), ((3, 4), (0, 5))):
        assert_same(place, compiled, function, batch(place, kind, queries, keys))


def test_a_dynamic_graph_serves_every_batch_and_length(place, compiler):
    for kind in ("packed", "packed and used", "padded", "packed q"):
        torch._dynamo.reset()
        function = function_of(causal=True)
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)
        assert_same(place, compiled, function, batch(place, kind))
        with torch.compiler.set_stance("fail_on_recompile"):
            for queries, keys in (((3, 4, 0), (2, 40, 5)), ((50, 0), (90, 3)), (QUERIES[::-1], KEYS)):
                assert_same(place, compiled, function, batch(place, kind, queries, keys))


def test_new_hints_do_not_make_a_dynamic_graph_anew(place, compiler):
    given = batch(place, "packed")
    lengths = tuple(given.lengths.values())

    def function(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k):
        return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, longest_q, longest_k, return_lse=True)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=compiler)
    for first, hints in enumerate(((40, 65), (41, 66), (64, 1000))):
        call, eager = (lambda *x, f=f, hints=hints: f(*x, *lengths[:2], *hints) for f in (compiled, function))
        with torch.compiler.set_stance("fail_on_recompile" if first else "default"):
            place.assert_all_close(call(*finite(given)), eager(*finite(given)))
    for hint in (torch.tensor(65), torch.tensor([65], dtype=torch.int32, device=place.device)):
        torch._dynamo.reset()
        got = torch.compile(function, fullgraph=True, backend=compiler)(*finite(given), *lengths[:2], hint, hint)
        place.assert_all_close(got, function(*finite(given), *lengths[:2], hint, hint))


def test_a_compiled_ragged_call_writes_out_and_runs_without_gradients(place, compiler):
    given = batch(place, "packed and used", requires_grad="")
    arguments = (*finite(given), *given.lengths.values())
    want = function_of()(*arguments)
    compiled = torch.compile(function_of(), fullgraph=True, backend=compiler)
    place.assert_all_close(compiled(*arguments), want)
    with torch.inference_mode():
        place.assert_all_close(compiled(*arguments), want)
    out = torch.full_like(want[0], float("nan"))

    def writing(q, k, v, *lengths, out):
        return given.call((q, k, v), **dict(zip(LENGTHS, lengths, strict=True)), out=out, return_lse=False)

    assert torch.compile(writing, fullgraph=True, backend=compiler)(*arguments, out=out) is out
    place.assert_close(out, want[0] / 2)


def test_the_graph_of_a_ragged_call_computes_what_is_asked_and_no_more(place):
    graphs, given = Graphs(), batch(place, "packed")
    compiled = torch.compile(lambda *x: function_of()(*x)[0], fullgraph=True, backend=graphs.backend)
    compiled(*finite(given), *given.lengths.values()).sum().backward()
    assert graphs.count() == (1, 1)


def test_a_ragged_call_that_the_backward_could_not_follow_is_refused_when_traced(place, monkeypatch):
    lacking = backward_support.SUPPORTED - {Feature.VARLEN}
    monkeypatch.setattr(backward_support, "SUPPORTED", lacking)
    if place.device.type == "cpu":
        monkeypatch.setattr(tiled, "SUPPORTED", tiled.SUPPORTED - {Feature.VARLEN})
    given = batch(place, "packed", queries=(3, 5), keys=(4, 4))
    arguments = (*finite(given), *given.lengths.values())
    with pytest.raises(Exception, match="does not support: ragged batches"):
        torch.compile(function_of(), fullgraph=True, backend="aot_eager")(*arguments)
    with Calls(), pytest.raises(flash_hopper.UnsupportedError, match="ragged batches"):
        function_of()(*arguments)


def test_a_ragged_call_without_lengths_is_no_dense_call(place):
    inputs = place.inputs()

    def function(*x):
        return flash_attn_varlen_func(*x, None, None, 40, 70)

    with pytest.raises(Exception, match="call flash_attn_func"):
        torch.compile(function, fullgraph=True, backend="eager")(*inputs)
    with Calls(), pytest.raises(flash_hopper.ArgumentError, match="call flash_attn_func"):
        function(*inputs)


# Checkpointing


@pytest.mark.parametrize(
    ("saved", "forwards"), [((FORWARD,), 1), ((torch.ops.aten.mm.default,), 2)], ids=["ours", "other"]
)
def test_selective_checkpointing_saves_what_it_names(place, saved, forwards):
    for kind in ("packed", "padded", "packed and used"):
        given = batch(place, kind)
        lengths = given.lengths.values()

        def block(q, k, v, *lengths):
            return function_of(causal=True, deterministic=True)(q.sin(), k, v, *lengths)[0].sin()

        inputs = finite(given)
        want = torch.autograd.grad(block(*inputs, *lengths).sum(), inputs)
        with Calls() as calls:
            out = checkpoint(block, *inputs, *lengths, use_reentrant=False, context_fn=saving(*saved))
            got = torch.autograd.grad(out.sum(), inputs)
        assert calls.count() == (forwards, 1)
        place.assert_all_close(got, want)


# torch.export


class Layer(torch.nn.Module):
    """A projection and attention over packed sequences."""

    def __init__(self, place):
        super().__init__()
        self.proj = torch.nn.Linear(32, 32, device=place.device, dtype=place.dtype)

    def forward(self, q, k, v, cu_seqlens_q, cu_seqlens_k):
        return flash_attn_varlen_func(
            self.proj(q), k, v, cu_seqlens_q, cu_seqlens_k, None, 65, causal=True, return_lse=True
        )


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_module_can_be_exported_stored_and_loaded(place, dynamic, strict):
    given = batch(place, "packed", requires_grad="")
    layer = Layer(place).requires_grad_(False)
    inputs = (*finite(given), *list(given.lengths.values())[:2])
    rows, keys, ends = (torch.export.Dim(name, min=2, max=4096) for name in ("rows", "keys", "ends"))
    shapes = ({0: rows}, {0: keys}, {0: keys}, {0: ends}, {0: ends}) if dynamic else None
    exported = torch.export.export(layer, inputs, dynamic_shapes=shapes, strict=strict)
    assert FORWARD in {node.target for node in exported.graph.nodes}
    stored = io.BytesIO()
    torch.export.save(exported, stored)
    stored.seek(0)
    loaded = torch.export.load(stored).module()
    place.assert_all_close(loaded(*inputs), layer(*inputs))
    if dynamic:
        other = batch(place, "packed", (50, 2, 0), (7, 20, 44), requires_grad="")
        inputs = (*finite(other), *list(other.lengths.values())[:2])
        place.assert_all_close(loaded(*inputs), layer(*inputs))


@every_kind
def test_the_operator_itself_can_be_called_and_differentiated(place, kind):
    given = batch(place, kind)
    dout, dlse = given.output_gradients(place)
    found = []
    for call in (partial(FORWARD, **given.lengths), lambda *inputs: given.call(inputs)):
        inputs = tuple(x.detach().requires_grad_() for x in given.inputs)
        results = call(*inputs)
        found.append((*results, *torch.autograd.grad(results, inputs, (dout, dlse))))
    place.assert_all_close(*found)


def test_hints_are_whole_numbers_that_may_be_symbols():
    for operator in (FORWARD, BACKWARD):
        kinds = {argument.name: str(argument.type) for argument in operator._schema.arguments}
        assert {kinds[name] for name in LENGTHS} == {"Optional[Tensor]"}
        assert {kinds[name] for name in ops.HINTS} == {"Optional[int]"}
