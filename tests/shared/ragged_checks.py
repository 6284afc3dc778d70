"""Ragged batches, windows and chunks by eager calls, whatever computes them: both floors import these and bring a `place`."""

from itertools import chain, combinations

import numpy as np
import pytest
import torch
from operator_checks import Calls
from ragged_calls import KEYS, KINDS, MASKS, QUERIES, SPARE, batch, mask_of, right

import flash_hopper
from flash_hopper import (
    autograd,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from flash_hopper.kernels import backward_support
from flash_hopper.launch import attention, sequences
from flash_hopper.problem.features import Feature
from flash_hopper.reference import naive, tiled

SUBSETS = ["".join(c) for c in chain.from_iterable(combinations("qkv", n) for n in (1, 2, 3))]

every_kind = pytest.mark.parametrize("kind", KINDS)
every_mask = pytest.mark.parametrize("mask", MASKS)


def calls_of(monkeypatch, owner, name):
    """A list that grows with every call of the function, which is still made."""
    calls, function = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: calls.append(args) or function(*args, **options))
    return calls


# Values and gradients


@every_kind
@every_mask
def test_results_and_gradients_are_right_and_rows_of_no_sequence_are_not_read(place, kind, mask):
    given, options = batch(place, kind), MASKS[mask]
    dout, dlse = given.output_gradients(place)
    results = given.call(**options)
    found = torch.autograd.grad(results, given.inputs, (dout, dlse))
    want, want_gradients = right(given, dout, dlse, **options)
    place.assert_all_close((*results, *found), (*want, *want_gradients))
    (out, lse), unused = results, ~given.queries.used(results[0])
    assert (out[unused] == 0).all()
    assert (lse.transpose(-1, -2)[unused[..., 0]] == -torch.inf).all()
    for gradient, own in zip(found, (given.queries, given.keys, given.keys), strict=True):
        assert (gradient[~own.used(gradient)] == 0).all()


@every_kind
def test_gradients_through_out_or_lse_alone_are_right(place, kind):
    for through in ("out", "lse"):
        given = batch(place, kind)
        dout, dlse = given.output_gradients(place)
        passed = (dout, None) if through == "out" else (None, dlse)
        results = given.call(causal=True, softmax_scale=-0.3)
        pairs = [(x, g) for x, g in zip(results, passed, strict=True) if g is not None]
        found = torch.autograd.grad([x for x, _ in pairs], given.inputs, [g for _, g in pairs])
        _, want = right(given, *passed, causal=True, softmax_scale=-0.3)
        place.assert_all_close(found, want)


@pytest.mark.parametrize("subset", SUBSETS)
def test_any_subset_of_the_inputs_may_require_grad(place, subset):
    for kind in KINDS:
        given, some = batch(place, kind), batch(place, kind, requires_grad=subset)
        dout, dlse = given.output_gradients(place)
        want = torch.autograd.grad(given.call(deterministic=True), given.inputs, (dout, dlse))
        results = some.call(deterministic=True)
        torch.autograd.backward(results, (dout, dlse))
        assert [x.grad is not None for x in some.inputs] == [name in subset for name in "qkv"]
        for x, g in zip(some.inputs, want, strict=True):
            if x.grad is not None:
                place.assert_close(x.grad, g)


@pytest.mark.parametrize(
    ("queries", "keys"),
    [((), ()), ((0,), (0,)), ((0, 0, 0), (5, 0, 3)), ((5, 0, 3), (0, 0, 0)), ((0, 4), (4, 0)), ((4, 0, 0), (0, 0, 9))],
    ids=str,
)
def test_any_sequences_may_be_empty(place, queries, keys):
    for kind in KINDS:
        given = batch(place, kind, queries, keys)
        results = given.call(causal=True)
        dout, dlse = given.output_gradients(place)
        found = torch.autograd.grad(results, given.inputs, (dout, dlse))
        want, want_gradients = right(given, dout, dlse, causal=True)
        place.assert_all_close((*results, *found), (*want, *want_gradients))


@every_mask
def test_a_dense_batch_has_the_same_masks(place, mask):
    scale = 64**-0.5
    for lengths in ((40, 70), (70, 40), (1, 50), (33, 33)):
        inputs = place.inputs(seqlen_q=lengths[0], seqlen_k=lengths[1])
        wide = [x.detach().double().requires_grad_() for x in inputs]
        results = flash_attn_func(*inputs, return_lse=True, **MASKS[mask])
        want = naive.attention(*wide, softmax_scale=scale, mask=mask_of(**MASKS[mask]))
        given = [place.normal(*x.shape, seed=i) for i, x in enumerate(results)]
        found = torch.autograd.grad(results, inputs, [g.to(x.dtype) for g, x in zip(given, results, strict=True)])
        want_gradients = torch.autograd.grad(want, wide, [g.double() for g in given])
        place.assert_all_close((*results, *found), (*want, *want_gradients))


def test_every_way_to_leave_a_window_open_is_the_same(place):
    dense, ragged = place.inputs(requires_grad=""), batch(place, "packed", requires_grad="")
    for call in (lambda **o: flash_attn_func(*dense, **o), lambda **o: ragged.call(**o)[0]):
        plain, left = call(), call(window_size=(5, None))
        for ends in ((None, None), (-1, -1), (None, -1), [-1, None]):
            assert torch.equal(call(window_size=ends), plain)
        assert torch.equal(call(window_size=(5, -1)), left)
        assert torch.equal(call(window_size=(5, 9), causal=True), call(window_size=(5, 0)))
        assert torch.equal(call(window_size=(None, 0)), call(causal=True))
        assert torch.equal(call(window_size=(np.int64(5), None)), left)
        for wrong in ((-2, 0), (0, -3), (1,), (1, 2, 3), 4, (0.5, 0), (True, 0)):
            with pytest.raises((flash_hopper.ArgumentError, flash_hopper.DTypeError), match="window_size"):
                call(window_size=wrong)
        for wrong in (-1, 2.0, None):
            with pytest.raises((flash_hopper.ArgumentError, flash_hopper.DTypeError), match="attention_chunk"):
                call(attention_chunk=wrong)


@every_kind
def test_out_is_written_with_zeros_in_rows_of_no_sequence(place, kind):
    given = batch(place, kind, requires_grad="")
    want, _ = given.call(causal=True)
    out = torch.full_like(want, float("nan"))
    got, _ = given.call(causal=True, out=out)
    assert got is out
    assert torch.equal(out, want)
    assert torch.equal(given.call(causal=True, return_lse=False), want)
    for wrong in (out[1:], out.double()):
        with pytest.raises((flash_hopper.ArgumentError, flash_hopper.DTypeError), match="out"):
            given.call(out=wrong)
    with pytest.raises(flash_hopper.ArgumentError, match="out= cannot be combined"):
        batch(place, kind).call(out=out)


def test_packed_tensors_are_their_parts(place):
    rows, lengths = 30, torch.tensor([0, 12, 12, 27], dtype=torch.int32, device=place.device)
    qkv = place.normal(rows, 3, 4, 32).requires_grad_()
    dout = place.normal(rows, 4, 32, seed=2)
    options = {"causal": True, "softmax_scale": 0.2, "window_size": (7, None), "deterministic": True}
    leaves = [x.detach().requires_grad_() for x in qkv.unbind(1)]
    want = flash_attn_varlen_func(*leaves, lengths, lengths, 15, 15, **options)
    want_gradients = torch.autograd.grad(want, leaves, dout)
    out = flash_attn_varlen_qkvpacked_func(qkv, lengths, 15, **options)
    place.assert_all_close((out, torch.autograd.grad(out, qkv, dout)[0]), (want, torch.stack(want_gradients, dim=1)))
    q, kv = leaves[0], torch.stack(leaves[1:], dim=1).detach().requires_grad_()
    out = flash_attn_varlen_kvpacked_func(q, kv, lengths, lengths, 15, 15, **options)
    dq, dkv = torch.autograd.grad(out, (q, kv), dout)
    place.assert_all_close((out, dq, dkv), (want, want_gradients[0], torch.stack(want_gradients[1:], dim=1)))
    for call in (
        lambda: flash_attn_varlen_qkvpacked_func(qkv[:, :2], lengths, 15),
        lambda: flash_attn_varlen_qkvpacked_func(qkv[None], lengths, 15),
        lambda: flash_attn_varlen_kvpacked_func(q, qkv, lengths, lengths, 15, 15),
    ):
        with pytest.raises(flash_hopper.ArgumentError, match=r"must be \(total, [23], heads, head_dim\)"):
            call()


# Hints


def test_a_hint_changes_no_result_whatever_it_is_given_as(place):
    given = batch(place, "packed", requires_grad="")
    want = given.call(causal=True)
    hints = [0, 1, 40, 65, 10**6, np.int64(65), np.int32(65), np.uint8(65), torch.tensor(65), torch.tensor([65])]
    hints += [
        torch.tensor(65, dtype=torch.int32),
        torch.tensor(65, device=place.device),
        torch.tensor(65, device="meta"),
    ]
    for hint in hints:
        got = given.call(causal=True, max_seqlen_q=hint, max_seqlen_k=hint)
        place.assert_all_close(got, want)  # other tiles may round otherwise


def test_a_hint_that_is_none_is_refused_by_name(place):
    given = batch(place, "packed")
    for side in "qk":
        name = f"max_seqlen_{side}"
        for wrong in (1.5, True, "65", torch.tensor(6.5), torch.tensor(True)):
            with pytest.raises(flash_hopper.DTypeError, match=name):
                given.call(**{name: wrong})
        for wrong in (-1, np.int64(-1), torch.tensor(-1), torch.tensor([1, 2])):
            with pytest.raises(flash_hopper.ArgumentError, match=name):
                given.call(**{name: wrong})


def test_the_number_of_signatures_does_not_grow_with_hints_and_lengths(place, monkeypatch):
    """Everything that changes from step to step in training: lengths within the same rows, and their maximum."""
    made = calls_of(monkeypatch, autograd, "prepare_call")
    narrow = torch.bfloat16 if place.dtype == torch.float32 else place.dtype
    q = place.normal(100, 2, 32).to(narrow)
    for longest in range(34, 65):
        lengths = torch.tensor([0, longest, longest, 100], dtype=torch.int32, device=place.device)
        got = flash_attn_varlen_func(q, q, q, lengths, lengths, longest, longest)
        want = [flash_attn_func(*(q[None, s],) * 3)[0] for s in (slice(0, longest), slice(longest, 100))]
        place._replace(tolerance=2e-2).assert_close(got, torch.cat(want))
    ragged = [args for args in made if args[5] is not None]
    assert len(ragged) == 1


# What a warm call costs, and what it must not do


def test_a_warm_call_is_one_look_up(place, monkeypatch):
    narrow = torch.bfloat16 if place.dtype == torch.float32 else place.dtype
    place = place._replace(dtype=narrow)

    class Counted(dict):
        looked_up = 0

        def get(self, key, default=None):
            self.looked_up += 1
            return super().get(key, default)

    counted = Counted()
    monkeypatch.setattr(attention, "_prepared", counted)
    for kind in KINDS:
        for grads in ("", "qkv"):
            given = batch(place, kind, requires_grad=grads)
            options = {"window_size": (5, None), "max_seqlen_q": 40, "max_seqlen_k": 65}
            want = given.call(**options)
            with monkeypatch.context() as patch:
                for owner, name in ((autograd, "prepare_call"), (sequences, "describe"), (autograd, "_as_operator")):
                    patch.setattr(owner, name, None)
                before = counted.looked_up
                got = given.call(**options)
                assert counted.looked_up == before + 1
            assert all(map(torch.equal, got, want))


def test_the_preparation_of_a_call_runs_no_operation_of_torch(place):
    """So that nothing is read and nothing is waited for: on a GPU the lengths are the kernels' business alone."""
    for kind in KINDS:
        given = batch(place, kind, requires_grad="")
        options = (None, True, (4, 2), 8, 0.0, *(None,) * 8, 0, None, False, False, 0, False, True)
        with Calls() as calls:
            bundle = sequences.sequences_of(**given.arguments)
            attention.prepare_call(*given.inputs, None, options, bundle)
            attention.prepared_call(*given.inputs, None, options, bundle)
        assert calls.seen == []


def test_what_is_saved_for_the_backward_is_what_it_needs(place):
    for kind in KINDS:
        given, kept = batch(place, kind), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: kept.append(x) or x, lambda x: x):
            given.call()
        assert len(kept) == 5 + sum(x is not None for x in given.lengths.values())


def test_lengths_that_were_changed_in_place_are_noticed(place):
    for kind in KINDS:
        for name, lengths in batch(place, kind).lengths.items():
            if lengths is None:
                continue
            given = batch(place, kind)
            out, _ = given.call()
            given.lengths[name].mul_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_a_graph_may_be_walked_twice_and_its_tensors_kept_elsewhere(place):
    for kind in KINDS:
        given = batch(place, kind)
        dout, dlse = given.output_gradients(place)
        with torch.autograd.graph.save_on_cpu():
            results = given.call(deterministic=True)
        first = torch.autograd.grad(results, given.inputs, (dout, dlse), retain_graph=True)
        second = torch.autograd.grad(results, given.inputs, (dout, dlse))
        assert all(map(torch.equal, first, second))


# Refusals


def test_wrong_lengths_are_refused_by_name(place):
    for kind in KINDS:
        given = batch(place, kind)
        present = [name for name, x in given.lengths.items() if x is not None]
        for name in present:
            good = given.lengths[name]
            doubled = torch.stack((good, good), dim=1)
            for error, wrong in (
                (flash_hopper.DTypeError, good.tolist()),
                (flash_hopper.DTypeError, good.long()),
                (flash_hopper.DTypeError, good.float()),
                (flash_hopper.ArgumentError, doubled),
                (flash_hopper.ArgumentError, doubled[:, 0]),
            ):
                with pytest.raises(error, match=name):
                    given.call(**{name: wrong})
            with pytest.raises(flash_hopper.DeviceError, match=name):
                given.call(**{name: good.to("meta" if place.device.type == "cpu" else "cpu")})
            if given.queries.cu_seqlens is None or given.keys.cu_seqlens is None or len(present) > 1:
                with pytest.raises(flash_hopper.ArgumentError, match=name):
                    given.call(**{name: good[:-1]})


def test_a_call_without_lengths_and_tensors_of_the_wrong_rank_are_refused(place):
    q, k, v = place.inputs()
    with pytest.raises(flash_hopper.ArgumentError, match="flash_attn_func"):
        flash_attn_varlen_func(q, k, v, None, None, 40, 70)
    lengths = torch.tensor([0, 40, 80], dtype=torch.int32, device=place.device)
    for name in ("q", "k", "v"):
        tensors = {"q": q.flatten(0, 1), "k": k.flatten(0, 1), "v": v.flatten(0, 1)} | {
            name: {"q": q, "k": k, "v": v}[name]
        }
        with pytest.raises(flash_hopper.ArgumentError, match=rf"^{name} must be"):
            flash_attn_varlen_func(*tensors.values(), lengths, lengths, 40, 70)
    with pytest.raises(flash_hopper.UnsupportedError, match="page_table"):
        batch(place, "packed").call(page_table=torch.zeros(5, 1, dtype=torch.int32, device=place.device))


@pytest.mark.parametrize(
    ("name", "value"),
    [("softcap", 20.0), ("sinks", torch.zeros(4)), ("score_mod", lambda *_: 0), ("mask_mod", lambda *_: True),
     ("aux_tensors", [torch.zeros(1)]), ("block_mask", 1), ("q_descale", torch.ones(1)), ("k_descale", torch.ones(1)),
     ("v_descale", torch.ones(1)), ("num_splits", 2), ("batch_invariant", True)],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_an_option_that_is_not_there_yet_is_refused_by_name(place, name, value):
    for kind in ("packed", "padded"):
        with pytest.raises(flash_hopper.UnsupportedError, match=name):
            batch(place, kind).call(**{name: value})


@pytest.mark.parametrize(
    ("feature", "kind", "options", "message"),
    [
        (Feature.VARLEN, "packed", {}, "cu_seqlens"),
        (Feature.SEQUSED, "padded", {}, "seqused"),
        (Feature.WINDOW, "packed", {"window_size": (3, None)}, "window_size"),
        (Feature.CHUNK, "packed", {"attention_chunk": 3}, "attention_chunk"),
    ],
    ids=["varlen", "seqused", "window", "chunk"],
)
def test_a_call_that_the_backward_could_not_follow_is_refused_at_once(
    place, monkeypatch, feature, kind, options, message
):
    without = batch(place, kind, requires_grad="")
    without.call(**options)
    monkeypatch.setattr(backward_support, "SUPPORTED", backward_support.SUPPORTED - {feature})
    if place.device.type == "cpu":
        monkeypatch.setattr(tiled, "SUPPORTED", tiled.SUPPORTED - {feature})
    given = batch(place, kind)
    with pytest.raises(flash_hopper.UnsupportedError, match=message):
        given.call(**options)


def test_a_second_derivative_is_refused(place):
    given = batch(place, "packed", keys=QUERIES)
    out, _ = given.call()
    first = torch.autograd.grad(out.square().sum(), given.inputs, create_graph=True)
    with pytest.raises(flash_hopper.UnsupportedError, match="second derivatives"):
        torch.autograd.grad(first[0].nan_to_num().sum(), given.inputs)


def test_autocast_casts_the_tensors_and_leaves_the_lengths(place):
    dtype = torch.float16 if place.dtype == torch.float16 else torch.bfloat16
    for kind in KINDS:
        given = batch(place, kind)
        wide = [x.detach().float().requires_grad_() for x in given.inputs]
        cast = [x.detach().to(dtype).requires_grad_() for x in wide]
        want = given.call(cast, deterministic=True)[0]
        with torch.autocast(place.device.type, dtype=dtype):
            out = given.call(wide, deterministic=True)[0]
        assert torch.equal(out, want)
        dout = torch.ones_like(out)
        found, found_cast = torch.autograd.grad(out, wide, dout), torch.autograd.grad(want, cast, dout)
        assert all(torch.equal(a, b.float()) for a, b in zip(found, found_cast, strict=True))


def test_the_lengths_here_leave_no_kind_of_sequence_out():
    """No queries, no keys, one query, more queries than keys and fewer, and room behind sequences."""
    assert SPARE > 0
    pairs = list(zip(QUERIES, KEYS, strict=True))
    for claim in (
        lambda q, k: q == 0 and k > 0,
        lambda q, k: k == 0 and q > 0,
        lambda q, k: q == 1,
        lambda q, k: q > k > 0,
        lambda q, k: 0 < q < k,
    ):
        assert any(claim(q, k) for q, k in pairs)
