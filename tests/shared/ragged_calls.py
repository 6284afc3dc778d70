"""Ragged batches of every kind for the shared tests: tensors, the call, and what is right by the oracle.

Rows that belong to no sequence hold NaN in q, k, v and in the gradients of out and lse: a test that finds none in its results
has shown that they were not read.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper import flash_attn_varlen_func
from flash_hopper.problem.mask import Mask
from flash_hopper.reference import naive

QUERIES = (13, 0, 40, 1, 22, 31)
KEYS = (20, 7, 0, 33, 65, 9)
SPARE = 3  # rows of room that a sequence does not use, where its kind has any

# kind: which sides are packed, which have used lengths of their own
KINDS = {
    "packed": ("qk", ""),
    "packed and used": ("qk", "qk"),
    "packed and used q": ("qk", "q"),
    "packed and used k": ("qk", "k"),
    "padded": ("", "qk"),
    "padded with all q": ("", "k"),
    "padded with all k": ("", "q"),
    "packed q": ("q", ""),
    "packed q and used k": ("q", "k"),
    "packed k": ("k", ""),
    "packed k and used q": ("k", "q"),
}
MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 4)},
    "left": {"window_size": (12, None)},
    "right": {"window_size": (-1, 7)},
    "causal window": {"causal": True, "window_size": (6, 5)},
    "chunk": {"attention_chunk": 16},
    "causal chunk": {"causal": True, "attention_chunk": 11},
    "all": {"window_size": (8, 3), "attention_chunk": 20},
}


class Side(NamedTuple):
    """Rows of q or of k and v: offsets and used lengths as lists, and where each sequence's rows are."""

    cu_seqlens: list[int] | None
    seqused: list[int] | None
    padded: int
    rows: list[slice]

    def shape(self, *rest: int) -> tuple[int, ...]:
        """The shape of a tensor of this side, with `rest` behind its rows."""
        if self.cu_seqlens is None:
            return len(self.rows), self.padded, *rest
        return self.cu_seqlens[-1] + SPARE, *rest

    def used(self, tensor: Tensor) -> Tensor:
        """A boolean like `tensor`: True in rows that belong to a sequence."""
        mask = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
        for b, rows in enumerate(self.rows):
            (mask if self.cu_seqlens is not None else mask[b])[rows] = True
        return mask


class Batch(NamedTuple):
    """A ragged call: its tensors, the tensors of its lengths, and the sides they describe."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: dict[str, Tensor | None]
    queries: Side
    keys: Side

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return self.q, self.k, self.v

    @property
    def arguments(self) -> dict[str, object]:
        """All arguments of `flash_attn_varlen_func` but q, k, v and options; no hints."""
        return {**self.lengths, "max_seqlen_q": None, "max_seqlen_k": None}

    def call(self, inputs=None, **options):
        """(out, lse)."""
        return flash_attn_varlen_func(*(inputs or self.inputs), **(self.arguments | {"return_lse": True} | options))

    def output_gradients(self, place) -> tuple[Tensor, Tensor]:
        """dout and dlse; NaN in rows of no sequence."""
        out, lse = (torch.empty_like(x) for x in self.call())
        dout = place.normal(*out.shape, seed=4)
        dlse = place.normal(*lse.shape, seed=5).to(lse.dtype)
        dlse_rows = dlse.transpose(-1, -2)
        dout[~self.queries.used(dout)] = float("nan")
        dlse_rows[~self.queries.used(dlse_rows)] = float("nan")
        return dout, dlse


def side(lengths, *, packed: bool, used: bool) -> Side:
    """Sequences of these lengths; with `used` in rooms that are larger."""
    rooms = [length + (SPARE if used else 0) for length in lengths]
    if packed:
        cu_seqlens = [sum(rooms[:b]) for b in range(len(rooms) + 1)]
        rows = [slice(start, start + n) for start, n in zip(cu_seqlens[:-1], lengths, strict=True)]
        return Side(cu_seqlens, list(lengths) if used else None, 0, rows)
    if used:
        padded = max(rooms, default=0)
        return Side(None, list(lengths), padded, [slice(0, n) for n in lengths])
    padded = max(lengths, default=0)
    return Side(None, None, padded, [slice(0, padded) for _ in lengths])


def batch(place, kind, queries=QUERIES, keys=KEYS, *, heads=4, heads_k=2, d=32, dv=16, requires_grad="qkv") -> Batch:
    """Sequences of a kind, with NaN in all rows that belong to none."""
    packed, used = KINDS[kind]
    q_side = side(queries, packed="q" in packed, used="q" in used)
    k_side = side(keys, packed="k" in packed, used="k" in used)
    tensors = []
    for name, own, number, dim in (("q", q_side, heads, d), ("k", k_side, heads_k, d), ("v", k_side, heads_k, dv)):
        x = place.normal(*own.shape(number, dim), seed=ord(name))
        x[~own.used(x)] = float("nan")
        tensors.append(x.requires_grad_(name in requires_grad))
    lengths = {
        "cu_seqlens_q": q_side.cu_seqlens,
        "cu_seqlens_k": k_side.cu_seqlens,
        "seqused_q": q_side.seqused,
        "seqused_k": k_side.seqused,
    }
    on_device = {
        name: None if values is None else torch.tensor(values, dtype=torch.int32, device=place.device)
        for name, values in lengths.items()
    }
    return Batch(*tensors, on_device, q_side, k_side)


def mask_of(causal=False, window_size=(None, None), attention_chunk=0, **_) -> Mask:
    """The mask of a call's options."""
    left, right = (None if end == -1 else end for end in window_size)
    return Mask(left, 0 if causal else right, attention_chunk)


def right(given: Batch, dout=None, dlse=None, **options):
    """(out, lse) and (dq, dk, dv) in float64 by the oracle, for gradients of out and lse."""
    wide = [x.detach().double().requires_grad_() for x in given.inputs]
    scale = options.get("softmax_scale")
    out, lse = naive.varlen_attention(
        *wide,
        softmax_scale=given.q.shape[-1] ** -0.5 if scale is None else scale,
        mask=mask_of(**options),
        **given.lengths,
    )
    # where no query sees a key the oracle's results depend on nothing
    passed = [(x, g.double()) for x, g in ((out, dout), (lse, dlse)) if g is not None and x.requires_grad]
    if not passed:
        return (out, lse), tuple(map(torch.zeros_like, wide))
    found = torch.autograd.grad([x for x, _ in passed], wide, [g for _, g in passed], allow_unused=True)
    return (out, lse), tuple(torch.zeros_like(x) if g is None else g for g, x in zip(found, wide, strict=True))
