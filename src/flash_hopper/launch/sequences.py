"""The tensors and hints that make a batch ragged, as one bundle from the public functions down to a launch.

`api.py` makes a bundle with `sequences_of`; `attention.py`, `ops.py` and the launchers take it apart. A ragged call is known
by the signature of its bundle, which says what the tensors look like and never what they hold.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from flash_hopper.launch.tensors import describe
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem, varlen_problem
from flash_hopper.problem.checks import checked_int
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DTypeError

TENSORS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
HINTS = ("max_seqlen_q", "max_seqlen_k")

SAME = "as for q"  # in a signature
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


class Sequences(NamedTuple):
    """Where the sequences of a batch lie and how long they are.

    cu_seqlens_*: (batch + 1,) int32, offsets of packed sequences, None for a padded batch. seqused_*: (batch,) int32, used
    lengths, or None. All on the device of q and contiguous. max_seqlen_*: the caller's hint, None where it is not known to
    the host.
    """

    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    seqused_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The four tensors in order, None where absent."""
        return self[:4]

    @property
    def present(self) -> dict[str, torch.Tensor]:
        """Those that are there, by name."""
        return {name: tensor for name, tensor in zip(TENSORS, self[:4], strict=True) if tensor is not None}

    def replaced_by(self, tensors: Mapping[str, torch.Tensor]) -> "Sequences":
        """The same bundle with the tensors of these names."""
        lengths = (tensors.get(name) for name in TENSORS)
        return Sequences(*lengths, self.max_seqlen_q, self.max_seqlen_k)  # type: ignore[arg-type, call-arg]

    @property
    def are_plain(self) -> bool:
        """True if no tensor is of a subclass."""
        cu_q, cu_k, used_q, used_k, _, _ = self
        return (
            (cu_q is None or type(cu_q) is torch.Tensor)
            and (cu_k is cu_q or cu_k is None or type(cu_k) is torch.Tensor)
            and (used_q is None or type(used_q) is torch.Tensor)
            and (used_k is None or type(used_k) is torch.Tensor)
        )


def sequences_of(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    seqused_q: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
) -> Sequences:
    """The bundle of a call, its hints read where that needs no wait.

    max_seqlen_*: an int, a numpy integer, a tensor of one integer, or None. A tensor on a GPU, one without data and one
    in a traced call are not read: there is no hint then. Raises DTypeError or ArgumentError for a hint that is none.
    """
    if not (max_seqlen_q is None or type(max_seqlen_q) is int) or not (
        max_seqlen_k is None or type(max_seqlen_k) is int
    ):
        max_seqlen_q, max_seqlen_k = _hint("max_seqlen_q", max_seqlen_q), _hint("max_seqlen_k", max_seqlen_k)
    fields = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, max_seqlen_q, max_seqlen_k
    return tuple.__new__(Sequences, fields)  # half the time of its constructor, which is written in Python


def _hint(name: str, given: Any) -> int | None:
    if given is None or isinstance(given, torch.SymInt):
        return given  # type: ignore[return-value]
    if not isinstance(given, torch.Tensor):
        return checked_int(name, given, 0)
    if given.dtype not in _INTEGERS:
        raise DTypeError(f"{name} must be an int or a tensor of one integer, got a tensor of {given.dtype}")
    if given.numel() != 1:
        raise ArgumentError(f"{name} must be an int or a tensor of one integer, got one of shape {tuple(given.shape)}")
    if is_dynamo_compiling() or type(given) is not torch.Tensor or given.device.type != "cpu":
        return None
    if torch._C._len_torch_dispatch_stack():  # a mode may pretend that tensors hold no data
        return None
    return checked_int(name, given.item(), 0)


def signature(sequences: Sequences) -> tuple[Any, ...]:
    """What distinguishes calls that need another check or another plan; hints only by their bucket.

    In self-attention both sides have the same offsets and hint, which are looked at, and hashed, once.
    """
    cu_q, cu_k, used_q, used_k, hint_q, hint_k = sequences
    bucket_q = None if hint_q is None else hint_bucket(hint_q)
    return (
        None if cu_q is None else _described(cu_q),
        SAME if cu_k is cu_q else None if cu_k is None else _described(cu_k),
        None if used_q is None else _described(used_q),
        None if used_k is None else _described(used_k),
        bucket_q,
        bucket_q if hint_k is hint_q else None if hint_k is None else hint_bucket(hint_k),
    )


def _described(lengths: torch.Tensor) -> tuple[Any, ...]:
    """What a tensor of lengths looks like; in few words, which are quickly hashed, where it is as it should be."""
    if lengths.dtype is torch.int32 and lengths.dim() == 1 and lengths.is_contiguous():
        return lengths.numel(), lengths.device
    return lengths.shape, lengths.stride(), lengths.dtype, lengths.device


def hint_bucket(hint: int) -> int:
    """The next power of two, which is all that plans may depend on: so few hints are told apart.

    A negative one stays what it is, for the checks to refuse.
    """
    return 1 << (hint - 1).bit_length() if hint > 0 else hint


def described_problem(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    out: torch.Tensor | None,
    sequences: Sequences | None,
    *,
    dtypes: Sequence[DType],
    has_hints: bool = True,
) -> AttentionProblem:
    """The checked problem of a call, dense or ragged; `has_hints` False leaves max_seqlen out."""
    described = (describe("q", q), describe("k", k), describe("v", v), options)
    given = None if out is None else describe("out", out)
    if sequences is None:
        return attention_problem(*described, dtypes=dtypes, out=given)
    return varlen_problem(*described, dtypes=dtypes, out=given, **length_specs(sequences, has_hints=has_hints))


def length_specs(sequences: Sequences, *, has_hints: bool = True) -> dict[str, Any]:
    """The bundle as keyword arguments of `varlen_problem`: descriptions of tensors, and buckets of hints if wanted.

    Raises DTypeError for an argument that is no tensor.
    """
    described = {
        name: None if tensor is None else describe(name, tensor)
        for name, tensor in zip(TENSORS, sequences.tensors, strict=True)
    }
    hints = {
        name: hint_bucket(hint) if has_hints and hint is not None else None
        for name, hint in zip(HINTS, (sequences.max_seqlen_q, sequences.max_seqlen_k), strict=True)
    }
    return described | hints
