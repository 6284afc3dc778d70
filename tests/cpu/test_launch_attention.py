"""What the launcher asks of the backward on a GPU, seen from a machine without one, and what a signature holds."""

from itertools import product

import pytest
import torch
from places import Place
from ragged_calls import KINDS, batch

from flash_hopper import flash_attn_backward_func
from flash_hopper.launch import attention
from flash_hopper.launch.sequences import Sequences, hint_bucket, sequences_of, signature


@pytest.fixture
def place() -> Place:
    return Place(torch.device("cpu"), torch.bfloat16, 2e-2)


class Recorder:
    """Stands where the backward on a GPU is prepared and run."""

    def __init__(self, monkeypatch):
        monkeypatch.setattr(attention, "_is_on_gpu", lambda q: True)
        monkeypatch.setattr(attention, "prepare_backward", self.prepare)
        monkeypatch.setattr(attention, "check_differentiable", lambda *_: None)

    def prepare(self, problem, request, index):
        self.problem, self.request = problem, request
        return self

    def run(self, *tensors, sequences, into):
        self.tensors, self.sequences, self.into = tensors, sequences, into
        return into or tuple(map(torch.zeros_like, tensors[:3]))


@pytest.mark.parametrize("kind", KINDS)
def test_the_backward_is_asked_for_what_is_needed(place, monkeypatch, kind):
    given = batch(place, kind, requires_grad="")
    out, lse = given.call()
    launched = Recorder(monkeypatch)
    for wanted, has_dlse, deterministic in product(
        ("", "q", "k", "v", "kv", "qkv", None), (False, True), (False, True)
    ):
        into = None
        if wanted is not None:
            into = tuple(
                torch.zeros(x.shape) if name in wanted else None for name, x in zip("qkv", given.inputs, strict=True)
            )
        options = {"dlse": lse if has_dlse else None, "deterministic": deterministic, "grad_out": into}
        launched.request = None
        flash_attn_backward_func(out, *given.inputs, out, lse, **given.lengths, **options)
        if wanted == "":
            assert launched.request is None, "nothing is to be computed"
            continue
        request = launched.request
        wanted = wanted or "qkv"
        assert request.needs_dq == ("q" in wanted)
        assert request.needs_dkdv == ("k" in wanted or "v" in wanted)
        assert (request.has_dlse, request.is_deterministic) == (has_dlse, deterministic)
        assert request.accumulates == (into is not None)
        assert (launched.into is None) == (into is None)
        assert all(a is b for a, b in zip(launched.into or (), into or (), strict=True))
        assert launched.sequences.tensors == tuple(given.lengths.values())
        assert all(a is b for a, b in zip(launched.tensors, (*given.inputs, out, lse, out), strict=False))


def test_a_signature_holds_what_tensors_look_like_and_not_what_they_hold(place):
    given = batch(place, "packed and used", requires_grad="")
    bundle = sequences_of(**given.arguments)
    other = Sequences(*(x.clone().zero_() for x in bundle.tensors), None, None)
    assert signature(bundle) == signature(other)
    seen = {signature(bundle)}
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        x = getattr(bundle, name)
        for changed in (None, x[:-1], x.long(), x.to("meta"), torch.stack((x, x), dim=1)[:, 0]):
            seen.add(signature(bundle._replace(**{name: changed})))
    for name in ("max_seqlen_q", "max_seqlen_k"):
        seen.update(signature(bundle._replace(**{name: hint})) for hint in (0, 1, 2, 100, 100_000))
    assert len(seen) == 1 + 4 * 5 + 2 * 5


def test_buckets_of_hints_are_the_next_powers_of_two():
    for hint in range(1, 3000):
        bucket = hint_bucket(hint)
        assert bucket >= hint > bucket // 2
        assert bucket & (bucket - 1) == 0
    assert hint_bucket(0) == 0
    assert hint_bucket(-3) == -3
