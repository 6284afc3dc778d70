"""The signatures of FlashAttention-2 and -3: arguments in their order, values of ours, refusals by name."""

import inspect

import pytest
import torch

from flash_hopper import api, flash_attn_func
from flash_hopper.compat import fa2, fa3
from flash_hopper.problem.errors import UnsupportedError

# name and default in order, after the tensors
FA2_OPTIONS = {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
}
FA3_OPTIONS = {
    "softmax_scale": None,
    "causal": False,
    "qv": None,
    "q_descale": None,
    "k_descale": None,
    "v_descale": None,
    "window_size": (-1, -1),
    "attention_chunk": 0,
    "softcap": 0.0,
    "num_splits": 1,
    "pack_gqa": None,
    "deterministic": False,
    "sm_margin": 0,
    "return_attn_probs": False,
}
TENSORS = {
    fa2.flash_attn_func: ("q", "k", "v"),
    fa2.flash_attn_qkvpacked_func: ("qkv",),
    fa2.flash_attn_kvpacked_func: ("q", "kv"),
    fa3.flash_attn_func: ("q", "k", "v"),
}
ONLY_THEIRS = {"dropout_p": 0.1, "alibi_slopes": torch.ones(4), "qv": torch.ones(1)}
NOT_YET = {
    "window_size": (16, 0),
    "softcap": 30.0,
    "attention_chunk": 8,
    "num_splits": 2,
    "q_descale": torch.ones(1),
    "k_descale": torch.ones(1),
    "v_descale": torch.ones(1),
}


def label(function):
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def options_of(function):
    return FA3_OPTIONS if function.__module__ == fa3.__name__ else FA2_OPTIONS


def tensors_for(function):
    """(the tensors of a call, the q, k and v in them); leaves that require grad."""
    generator = torch.Generator().manual_seed(7)
    shapes = {"q": (2, 9, 4, 16), "k": (2, 21, 4, 16), "v": (2, 21, 4, 16), "kv": (2, 21, 2, 4, 16)}
    shapes["qkv"] = (2, 9, 3, 4, 16)
    tensors = [torch.randn(shapes[n], generator=generator).requires_grad_() for n in TENSORS[function]]
    parts = [x for t in tensors for x in (t.unbind(2) if t.dim() == 5 else (t,))]
    return tensors, parts


every_function = pytest.mark.parametrize("function", TENSORS, ids=label)


@every_function
def test_arguments_have_their_names_order_and_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    options = [(p.name, p.default) for p in parameters if p.default is not inspect.Parameter.empty]
    assert options == list(options_of(function).items())
    assert tuple(p.name for p in parameters)[: -len(options)] == TENSORS[function]


@every_function
@pytest.mark.parametrize("causal", [False, True])
def test_positional_calls_give_the_values_and_gradients_of_the_public_function(function, causal):
    asked = {"softmax_scale": -0.3, "causal": causal, "deterministic": True, "return_attn_probs": True}
    arguments = ({**options_of(function), **asked}).values()
    tensors, parts = tensors_for(function)
    out, lse, *rest = function(*tensors, *arguments)
    want, want_lse = flash_attn_func(*parts, -0.3, causal=causal, deterministic=True, return_lse=True)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(8))
    got_grads = torch.autograd.grad(out, tensors, dout)
    assert all(map(torch.equal, got_grads, torch.autograd.grad(want, tensors, dout)))
    if function is fa3.flash_attn_func:
        assert not rest
    else:
        (s_dmask,) = rest
        assert s_dmask.shape == (0,) and s_dmask.dtype == out.dtype and not s_dmask.requires_grad


@every_function
def test_a_call_with_tensors_alone_returns_out_alone(function):
    tensors, parts = tensors_for(function)
    assert torch.equal(function(*tensors), flash_attn_func(*parts))


@every_function
def test_every_option_reaches_the_public_function_under_its_name(function, monkeypatch):
    calls = []
    monkeypatch.setattr(api, "flash_attn_func", lambda *args, **options: calls.append((args, options)) or args[0])
    given = {name: default if name in ONLY_THEIRS else object() for name, default in options_of(function).items()}
    function(*tensors_for(function)[0], *given.values())
    ((args, options),) = calls
    received = {**options, "softmax_scale": args[3], "return_attn_probs": options["return_lse"]}
    del received["return_lse"]
    assert received == {name: value for name, value in given.items() if name not in ONLY_THEIRS}


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f in TENSORS for name in options_of(f) if name in ONLY_THEIRS | NOT_YET],
    ids=lambda x: x if isinstance(x, str) else label(x),
)
def test_what_is_not_there_is_refused_by_its_name(function, name):
    with pytest.raises(UnsupportedError, match=rf"\b{name}\b"):
        function(*tensors_for(function)[0], **{name: (ONLY_THEIRS | NOT_YET)[name]})
