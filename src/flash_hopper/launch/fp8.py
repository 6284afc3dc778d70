"""From a call with e4m3 tensors to what runs it, with one look-up for a signature seen before.

The counterpart of `attention.py`, which holds 16-bit calls. `autograd.py` hands every call over whose q is e4m3; there is no
gradient, and no torch operator: torch.compile leaves such a call out of its graph, and tensors that somebody must see
as they go by (fake tensors, dispatch modes, torch.func) are refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from flash_hopper.launch.attention import MAX_SIGNATURES, are_values
from flash_hopper.launch.forward import Result
from flash_hopper.launch.forward_fp8 import Descales, PreparedFp8, prepare_fp8
from flash_hopper.launch.fp8_reference import PreparedFp8Reference, prepare_fp8_reference
from flash_hopper.launch.route import as_plain, check_tensors, must_be_seen
from flash_hopper.launch.sequences import Sequences, signature
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.errors import UnsupportedError
from flash_hopper.problem.fp8 import Fp8Values

CODES = torch.float8_e4m3fn
_FIRST_DESCALE = list(AttentionOptions.__dataclass_fields__).index("q_descale")

Prepared = PreparedFp8 | PreparedFp8Reference

_prepared: dict[tuple[Any, ...], Prepared] = {}


def is_fp8(q: Any) -> bool:
    """True if a call with this q is one of these."""
    return isinstance(q, Tensor) and q.dtype is CODES


def fp8_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor | Fp8Values,
    out: Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None,
) -> Result:
    """(out, lse or None) of a call with e4m3 tensors; `options` holds the fields of `AttentionOptions` in order."""
    if is_dynamo_compiling():
        return torch.compiler.disable(fp8_attention)(q, k, v, out, options, sequences)  # type: ignore[no-any-return]
    descales = Descales(*options[_FIRST_DESCALE : _FIRST_DESCALE + 3])
    codes = v.codes if isinstance(v, Fp8Values) else v
    if not _are_plain(q, k, codes, out, descales, sequences):
        q, k, v, out, descales, sequences = _as_plain(q, k, v, out, descales, sequences)
        codes = v.codes if isinstance(v, Fp8Values) else v
    # descales by what they look like, as they are other tensors in each call
    plain = (
        *options[:_FIRST_DESCALE],
        *(None if t is None else _look(t) for t in descales),
        *options[_FIRST_DESCALE + 3 :],
    )
    key = (
        _look(q), _look(k), _look(codes), v.seqlen if isinstance(v, Fp8Values) else None, plain,
        None if out is None else _look(out), None if sequences is None else signature(sequences),
    )  # fmt: skip
    try:
        prepared = _prepared.get(key)
    except TypeError:  # an option that cannot be hashed was never remembered; `_prepare` judges it
        prepared = None
    if prepared is None:
        prepared = _prepare(q, k, v, out, options, descales, sequences)
        if are_values(options[:_FIRST_DESCALE] + options[_FIRST_DESCALE + 3 :]):
            if len(_prepared) >= MAX_SIGNATURES:
                _prepared.clear()
            _prepared[key] = prepared
    return prepared.run(q, k, codes, out, descales, sequences)


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor | Fp8Values,
    out: Tensor | None,
    options: tuple[Any, ...],
    descales: Descales,
    sequences: Sequences | None,
) -> Prepared:
    prepare = prepare_fp8 if q.is_cuda else prepare_fp8_reference
    return prepare(q, k, v, AttentionOptions(*options), out, descales, sequences)


def _look(t: Tensor) -> tuple[Any, ...]:
    """What the preparation of a call depends on in a tensor."""
    return t.shape, t.stride(), t.dtype, t.device, t.requires_grad and torch.is_grad_enabled()


def _are_plain(q: Any, k: Any, codes: Any, out: Any, descales: Descales, sequences: Sequences | None) -> bool:
    """True if no argument is a subclass, and nobody looks on."""
    kinds = {type(q), type(k), type(codes)} | {type(t) for t in (out, *descales) if t is not None}
    return kinds == {Tensor} and (sequences is None or sequences.are_plain) and not must_be_seen(())


def _as_plain(q: Any, k: Any, v: Any, out: Any, descales: Descales, sequences: Sequences | None) -> tuple[Any, ...]:
    """Arguments without their subclasses; raises if one is no tensor, or one that must be seen."""
    given = {"q": q, "k": k, "v": v.codes if isinstance(v, Fp8Values) else v, "out": out}
    given |= {f"{name}_descale": t for name, t in zip("qkv", descales, strict=True)}
    given = {name: t for name, t in given.items() if t is not None}
    if sequences is not None:
        given |= sequences.present
    check_tensors(given)
    if must_be_seen(given.values()):
        raise UnsupportedError(
            "e4m3 attention is no torch operator: fake tensors, dispatch modes and torch.func cannot see it"
        )
    plain = as_plain(given)
    values = v._replace(codes=plain["v"]) if isinstance(v, Fp8Values) else plain["v"]
    return (
        plain["q"], plain["k"], values, plain.get("out"), Descales(*(plain.get(f"{name}_descale") for name in "qkv")),
        None if sequences is None else sequences.replaced_by(plain),
    )  # fmt: skip
