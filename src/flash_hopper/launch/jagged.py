"""Jagged tensors (torch.nested with layout torch.jagged) as what they are made of: packed rows and offsets.

    q: (batch, j, heads, head_dim)  ->  values (total_q, heads, head_dim), offsets (batch + 1,) as cu_seqlens_q,
                                        lengths (batch,), if there are holes, as seqused_q

`autograd.py` unwraps a call with them and wraps its result. Nothing is read: offsets are converted to int32 on their device.
"""

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flash_hopper.launch.sequences import Sequences
from flash_hopper.problem.errors import ArgumentError

_HOW = "torch.nested.nested_tensor_from_jagged(values, offsets) makes one of packed rows"


def is_jagged(*tensors: Any) -> bool:
    """True if one of these is a nested tensor, so that all must be jagged ones."""
    return any(isinstance(t, torch.Tensor) and t.is_nested for t in tensors)


class JaggedCall:
    """A call of attention on jagged q, k and v: `tensors` (q, k, v, out) and `sequences` are those of a ragged one.

    q and k may have different offsets, k and v have the same. Raises ArgumentError for anything else, in particular if only
    some of the tensors are jagged.
    """

    def __init__(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        sequences: Sequences | None,
    ) -> None:
        if sequences is not None:
            raise ArgumentError("jagged tensors have offsets of their own: pass them to flash_attn_func")
        given = {"q": q, "k": k, "v": v} if out is None else {"q": q, "k": k, "v": v, "out": out}
        _check_layouts(given)
        _check_same_structure("v", v, "k", k)
        if out is not None:
            _check_same_structure("out", out, "q", q)
        self.like: Any = q
        self.out: torch.Tensor | None = out
        cu_seqlens_q = _as_index(q.offsets())
        cu_seqlens_k = cu_seqlens_q if k.offsets() is q.offsets() else _as_index(k.offsets())
        used_q, used_k = _as_index(q.lengths()), _as_index(k.lengths())
        self.sequences = Sequences(cu_seqlens_q, cu_seqlens_k, used_q, used_k, _known_max(q), _known_max(k))
        self.tensors = q.values(), k.values(), v.values(), None if out is None else out.values()

    def wrapped(self, result: torch.Tensor) -> torch.Tensor:
        """(total_q, heads, head_dim_v) as a jagged tensor with the structure of q; the caller's out if that was given."""
        if self.out is not None:
            return self.out
        q = self.like
        made: torch.Tensor = torch.nested.nested_tensor_from_jagged(result, q.offsets(), q.lengths())
        return made


def _check_layouts(given: dict[str, Any]) -> None:
    for name, t in given.items():
        if not (isinstance(t, torch.Tensor) and t.is_nested):
            kinds = ", ".join(f"{n}: {'nested' if is_jagged(x) else 'not'}" for n, x in given.items())
            raise ArgumentError(f"{name} must be a jagged tensor like the others, got {kinds}; {_HOW}")
        if t.layout != torch.jagged:
            raise ArgumentError(f"{name} must have layout torch.jagged, got {t.layout}; {_HOW}")
        jagged_dim = getattr(t, "_ragged_idx")  # noqa: B009  torch has no public name for it
        if t.dim() != 4 or jagged_dim != 1:
            raise ArgumentError(
                f"{name} must be (batch, j, heads, head_dim) with the jagged dimension second, got {t.dim()} dimensions, "
                f"jagged in dimension {jagged_dim}"
            )


def _check_same_structure(name: str, t: Any, other_name: str, other: Any) -> None:
    if t.shape[1] != other.shape[1]:
        raise ArgumentError(
            f"{name} must have the very offsets of {other_name}, which cannot be compared without reading them: make it by "
            f"torch.nested.nested_tensor_from_jagged(values, {other_name}.offsets(), {other_name}.lengths())"
        )


def _as_index(offsets: torch.Tensor | None) -> torch.Tensor | None:
    return None if offsets is None else offsets.to(torch.int32)


def _known_max(t: Any) -> int | None:
    """The length of the longest sequence if torch has found it out before; it would wait for the device otherwise."""
    if is_dynamo_compiling():
        return None
    known: int | None = t._maybe_max_seqlen
    return known
