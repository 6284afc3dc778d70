"""The signatures of FlashAttention-2 and -3: arguments in their order, values of ours, refusals by name."""

import inspect

import pytest
import torch

from flash_hopper import api, flash_attn_func, flash_attn_varlen_func
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
LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
TENSORS = {
    fa2.flash_attn_func: ("q", "k", "v"),
    fa2.flash_attn_qkvpacked_func: ("qkv",),
    fa2.flash_attn_kvpacked_func: ("q", "kv"),
    fa2.flash_attn_varlen_func: ("q", "k", "v", *LENGTHS),
    fa2.flash_attn_varlen_qkvpacked_func: ("qkv", "cu_seqlens", "max_seqlen"),
    fa2.flash_attn_varlen_kvpacked_func: ("q", "kv", *LENGTHS),
    fa3.flash_attn_func: ("q", "k", "v"),
    fa3.flash_attn_varlen_func: ("q", "k", "v", *LENGTHS),
}
OPTIONS = {function: FA3_OPTIONS if function.__module__ == fa3.__name__ else FA2_OPTIONS for function in TENSORS}
OPTIONS[fa2.flash_attn_varlen_func] = FA2_OPTIONS | {"block_table": None}
OPTIONS[fa3.flash_attn_varlen_func] = {"seqused_q": None, "seqused_k": None} | FA3_OPTIONS
ONLY_THEIRS = {"dropout_p": 0.1, "alibi_slopes": torch.ones(4), "qv": torch.ones(1), "block_table": torch.ones(1)}
NOT_YET = {
    "softcap": 30.0,
    "num_splits": 2,
    "q_descale": torch.ones(1),
    "k_descale": torch.ones(1),
    "v_descale": torch.ones(1),
}


def label(function):
    return f"{function.__module__.rpartition('.')[2]}.{function.__name__}"


def is_ragged(function):
    return "varlen" in function.__name__


def tensors_for(function):
    """(the arguments in front of the options, the leaves among them, which require grad, and the q, k and v in those)."""
    generator = torch.Generator().manual_seed(7)
    rows, keys = ((18,), (42,)) if is_ragged(function) else ((2, 9), (2, 21))
    shapes = {"q": (*rows, 4, 16), "k": (*keys, 4, 16), "v": (*keys, 4, 16)}
    shapes |= {"kv": (*keys, 2, 4, 16), "qkv": (*rows, 3, 4, 16)}
    q_ends, k_ends = (torch.tensor(ends, dtype=torch.int32) for ends in ((0, 5, 5, 18), (0, 20, 30, 42)))
    others = {"cu_seqlens_q": q_ends, "cu_seqlens_k": k_ends, "max_seqlen_q": 13, "max_seqlen_k": 20}
    others |= {"cu_seqlens": q_ends, "max_seqlen": 13}
    leaves = {
        name: torch.randn(shapes[name], generator=generator).requires_grad_()
        for name in TENSORS[function]
        if name in shapes
    }
    arguments = [leaves[name] if name in leaves else others[name] for name in TENSORS[function]]
    parts = [x for name, t in leaves.items() for x in (t.unbind(-3) if name in ("kv", "qkv") else (t,))]
    return arguments, list(leaves.values()), parts


def public(function, arguments, parts, **options):
    """The same call by the public function."""
    if not is_ragged(function):
        return flash_attn_func(*parts, **options)
    named = dict(zip(TENSORS[function], arguments, strict=True))
    one = named.get("cu_seqlens"), named.get("cu_seqlens"), named.get("max_seqlen"), named.get("max_seqlen")
    lengths = [named.get(name, shared) for name, shared in zip(LENGTHS, one, strict=True)]
    return flash_attn_varlen_func(*parts, *lengths, **options)


every_function = pytest.mark.parametrize("function", TENSORS, ids=label)


@every_function
def test_arguments_have_their_names_order_and_defaults(function):
    parameters = inspect.signature(function).parameters.values()
    assert {p.kind for p in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
    options = [(p.name, p.default) for p in parameters if p.default is not inspect.Parameter.empty]
    assert options == list(OPTIONS[function].items())
    assert tuple(p.name for p in parameters)[: -len(options)] == TENSORS[function]


@every_function
@pytest.mark.parametrize(
    "mask",
    [{}, {"causal": True}, {"window_size": (4, 2)}, {"window_size": (-1, 3)}, {"causal": True, "attention_chunk": 4}],
)
def test_positional_calls_give_the_values_and_gradients_of_the_public_function(function, mask):
    asked = {"softmax_scale": -0.3, "deterministic": True, "return_attn_probs": True} | mask
    if not asked.keys() <= OPTIONS[function].keys():
        del asked["attention_chunk"]
    arguments, leaves, parts = tensors_for(function)
    out, lse, *rest = function(*arguments, *(OPTIONS[function] | asked).values())
    del asked["return_attn_probs"]
    want, want_lse = public(function, arguments, parts, return_lse=True, **asked)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(8))
    got_grads = torch.autograd.grad(out, leaves, dout)
    assert all(map(torch.equal, got_grads, torch.autograd.grad(want, leaves, dout)))
    if function.__module__ == fa3.__name__:
        assert not rest
    else:
        (s_dmask,) = rest
        assert s_dmask.shape == (0,) and s_dmask.dtype == out.dtype and not s_dmask.requires_grad


@every_function
def test_a_call_with_tensors_alone_returns_out_alone(function):
    arguments, _, parts = tensors_for(function)
    assert torch.equal(function(*arguments), public(function, arguments, parts))


@every_function
def test_every_option_reaches_the_public_function_under_its_name(function, monkeypatch):
    calls = []
    target = "flash_attn_varlen_func" if is_ragged(function) else "flash_attn_func"
    monkeypatch.setattr(api, target, lambda *args, **options: calls.append((args, options)) or args[0])
    given = {name: default if name in ONLY_THEIRS else object() for name, default in OPTIONS[function].items()}
    function(*tensors_for(function)[0], *given.values())
    ((args, options),) = calls
    received = {**options, "return_attn_probs": options["return_lse"]}
    if not is_ragged(function):
        received["softmax_scale"] = args[3]
    del received["return_lse"]
    assert received == {name: value for name, value in given.items() if name not in ONLY_THEIRS}


def test_used_lengths_of_flash_attention_3_shorten_the_sequences():
    arguments, leaves, parts = tensors_for(fa3.flash_attn_varlen_func)
    used = torch.tensor([3, 0, 12], dtype=torch.int32), torch.tensor([20, 0, 7], dtype=torch.int32)
    out = fa3.flash_attn_varlen_func(*arguments, *used)
    want = public(fa3.flash_attn_varlen_func, arguments, parts, seqused_q=used[0], seqused_k=used[1])
    assert torch.equal(out, want)
    assert not torch.equal(out, fa3.flash_attn_varlen_func(*arguments))
    assert all(map(torch.equal, *(torch.autograd.grad(x.sum(), leaves) for x in (out, want))))


@pytest.mark.parametrize(
    ("function", "name"),
    [(f, name) for f in TENSORS for name in OPTIONS[f] if name in ONLY_THEIRS | NOT_YET],
    ids=lambda x: x if isinstance(x, str) else label(x),
)
def test_what_is_not_there_is_refused_by_its_name(function, name):
    with pytest.raises(UnsupportedError, match=rf"\b{name}\b"):
        function(*tensors_for(function)[0], **{name: (ONLY_THEIRS | NOT_YET)[name]})
