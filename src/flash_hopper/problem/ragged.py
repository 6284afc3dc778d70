"""Batches whose sequences have different lengths: how they lie in memory, and the checks of what describes them.

Each side, queries and keys, is either packed, (total rows, heads, head_dim) with the sequences one after another as
`cu_seqlens` says, or a padded batch, (batch, seqlen, heads, head_dim). The length of sequence b is seqused[b] if given,
else cu_seqlens[b + 1] - cu_seqlens[b], else the padded size; a packed one starts at row cu_seqlens[b]. Rows that belong
to no sequence are never read, and give out = 0, lse = -inf and zero gradients. `attention.py`
builds problems from this.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from flash_hopper.problem.checks import check_rank, checked_int
from flash_hopper.problem.errors import ArgumentError, DTypeError
from flash_hopper.problem.tensor import TensorSpec

INDEX_DTYPE = "torch.int32"


@dataclass(frozen=True, slots=True)
class Ragged:
    """What is known of a ragged batch without reading a tensor's values.

    `rows_*`: rows of all sequences with everything between them, total rows if packed, else batch * seqlen.
    `max_seqlen_*`: the caller's hint, for the choice of tiles and never for correctness; None where there is none.
    """

    packed_q: bool
    packed_k: bool
    has_seqused_q: bool
    has_seqused_k: bool
    rows_q: int
    rows_k: int
    max_seqlen_q: int | None
    max_seqlen_k: int | None

    @property
    def is_packed(self) -> bool:
        """True if a side is packed."""
        return self.packed_q or self.packed_k

    @property
    def has_seqused(self) -> bool:
        """True if a side has used lengths of its own."""
        return self.has_seqused_q or self.has_seqused_k


class SideLengths(NamedTuple):
    """Tensors that give one side's lengths, and the hint; `side` is "q" or "k", as in the arguments' names."""

    side: str
    cu_seqlens: TensorSpec | None
    seqused: TensorSpec | None
    max_seqlen: Any

    @property
    def tensors(self) -> list[TensorSpec]:
        """Those present."""
        return [t for t in (self.cu_seqlens, self.seqused) if t is not None]


def check_layout(t: TensorSpec, lengths: SideLengths) -> None:
    """`t` has the dimensions that its side asks for: packed with cu_seqlens, else a padded batch."""
    name = f"cu_seqlens_{lengths.side}"
    if lengths.cu_seqlens is not None:
        check_rank(t, "(total rows, heads, head_dim)", f" with {name}")
    else:
        check_rank(t, "(batch, seqlen, heads, head_dim)", f" without {name}")


def checked_ragged(q: TensorSpec, k: TensorSpec, lengths_q: SideLengths, lengths_k: SideLengths) -> tuple[Ragged, int]:
    """The ragged form and the number of sequences. `q` and `k` have passed `check_layout`.

    Raises ArgumentError or DTypeError; that everything is on one device is checked elsewhere.
    """
    given = lengths_q.tensors + lengths_k.tensors
    if not given:
        raise ArgumentError(
            "one of cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k must be given; "
            "call flash_attn_func for a batch without lengths"
        )
    for t in given:
        _check_index_tensor(t)
    batch = _number_of_sequences(q, k, lengths_q, lengths_k)
    sides = ((q, lengths_q), (k, lengths_k))
    rows_q, rows_k = (t.shape[0] if own.cu_seqlens is not None else t.shape[0] * t.shape[1] for t, own in sides)
    hint_q, hint_k = (_hint(own) for _, own in sides)
    ragged = Ragged(
        lengths_q.cu_seqlens is not None,
        lengths_k.cu_seqlens is not None,
        lengths_q.seqused is not None,
        lengths_k.seqused is not None,
        rows_q,
        rows_k,
        hint_q,
        hint_k,
    )
    return ragged, batch


def _check_index_tensor(t: TensorSpec) -> None:
    if t.dtype_name != INDEX_DTYPE:
        raise DTypeError(f"{t.name} must have dtype {INDEX_DTYPE}, got {t.dtype_name}; call {t.name}.int()")
    if t.rank != 1:
        raise ArgumentError(f"{t.name} must have one dimension, got {t.rank}: {t.shape}")
    if t.shape[0] > 1 and t.strides[0] != 1:
        raise ArgumentError(f"{t.name} must be contiguous, got stride {t.strides[0]}; call {t.name}.contiguous()")


def _number_of_sequences(q: TensorSpec, k: TensorSpec, lengths_q: SideLengths, lengths_k: SideLengths) -> int:
    """What every argument that knows it agrees on."""
    told: dict[str, int] = {}
    for t, own in ((q, lengths_q), (k, lengths_k)):
        if own.cu_seqlens is None:
            told[f"{t.name} of shape {t.shape}"] = t.shape[0]
        elif own.cu_seqlens.shape[0] == 0:
            raise ArgumentError(f"{own.cu_seqlens.name} must have batch + 1 entries, got none")
        else:
            told[f"{own.cu_seqlens.name} of shape {own.cu_seqlens.shape} (batch + 1)"] = own.cu_seqlens.shape[0] - 1
        if own.seqused is not None:
            told[f"{own.seqused.name} of shape {own.seqused.shape} (batch)"] = own.seqused.shape[0]
    batch, *others = told.values()
    if any(other != batch for other in others):  # not by a set: sizes in a traced call cannot be hashed
        numbers = ", ".join(f"{size} by {name}" for name, size in told.items())
        raise ArgumentError(f"arguments disagree on the number of sequences: {numbers}")
    return batch


def _hint(lengths: SideLengths) -> int | None:
    if lengths.max_seqlen is None:
        return None
    return checked_int(f"max_seqlen_{lengths.side}", lengths.max_seqlen, 0)
