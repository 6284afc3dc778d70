"""A batch of attention problems cut into pieces that fit memory, each with a table of the keys that its rows do not see.

The float64 side of `compare` and `gradients`: what the masks of `problem.mask` mean is written here once more, as a
comparison of positions, and shares no index code with the kernels. The entries of a batch may have lengths of their own
(`Lengths`); what lies behind them is padding, which nobody sees and which sees nothing. CPU tests compare all of it with
`reference.naive`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.problem.mask import Mask

FULL = Mask()

MAX_MATRICES = 32_768  # in a batched product; cuBLAS has refused more than 65535


class Lengths(NamedTuple):
    """Rows and keys of each batch entry: (batch,) int64 on the device of the tensors."""

    q: Tensor
    k: Tensor


class Piece(NamedTuple):
    """A part of the work: some batch entries, key heads with all their query heads, rows, and all keys that these see."""

    batch: slice
    heads_k: slice
    heads: slice
    rows: slice
    keys: slice

    def of(self, gradient: str) -> tuple[slice, slice, slice]:
        """Its batch entries, positions and heads in dq (also out), dk or dv."""
        if gradient == "dq":
            return self.batch, self.rows, self.heads
        return self.batch, self.keys, self.heads_k


class Matrices(NamedTuple):
    """What belongs to a piece, in the dtypes given. The query heads of a key head are one matrix."""

    q: Tensor  # (matrices, heads * rows, d)
    k: Tensor  # (matrices, keys, d)
    v: Tensor  # (matrices, keys, dv)
    hidden: Tensor | None  # (matrices or 1, heads * rows, keys): True where a row does not see a key
    shape: tuple[int, int, int, int]  # batch, key heads, query heads of each, rows


class Batch:
    """q (batch, seqlen_q, heads, d), k (batch, seqlen_k, heads_k, d), v (batch, seqlen_k, heads_k, dv) and the mask."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, mask: Mask, lengths: Lengths | None = None
    ) -> None:
        self.q, self.k, self.v = q.detach(), k.detach(), v.detach()
        self.softmax_scale, self.mask, self.lengths = softmax_scale, mask, lengths
        self.batch, self.seqlen_q, self.heads, _ = q.shape
        self.seqlen_k, self.heads_k = k.shape[1:3]
        self.group = self.heads // self.heads_k if self.heads_k else 1

    def pieces(self, scores: int) -> Iterator[Piece]:
        """All pieces with a visible score in them, of at most about so many scores."""
        if 0 in (self.batch, self.heads, self.seqlen_q, self.seqlen_k):
            return
        rows = max(1, min(self.seqlen_q, scores // (self.group * self.seqlen_k)))
        matrices = max(1, min(MAX_MATRICES, scores // (self.group * rows * self.seqlen_k)))
        heads_k, batch = min(matrices, self.heads_k), max(1, matrices // self.heads_k)
        for b in range(0, self.batch, batch):
            for h in range(0, self.heads_k, heads_k):
                last = min(h + heads_k, self.heads_k)
                heads = slice(h * self.group, last * self.group)
                for r in range(0, self.seqlen_q, rows):
                    of_rows = slice(r, min(r + rows, self.seqlen_q))
                    keys = self._keys(of_rows)
                    if keys.start < keys.stop:
                        yield Piece(slice(b, min(b + batch, self.batch)), slice(h, last), heads, of_rows, keys)

    def _keys(self, rows: slice) -> slice:
        """Keys that may be seen from these rows; with lengths of their own all."""
        first, end = 0, self.seqlen_k
        if self.lengths is None:
            shift = self.seqlen_k - self.seqlen_q
            if self.mask.left is not None:
                first = max(0, rows.start + shift - self.mask.left)
            if self.mask.right is not None:
                end = min(end, rows.stop + shift + self.mask.right)
        return slice(first, end)

    def cut(self, piece: Piece) -> Matrices:
        """The piece's part of q, k and v, and its table."""
        q = self.q[piece.batch, piece.rows, piece.heads]
        shape = q.shape[0], piece.heads_k.stop - piece.heads_k.start, self.group, q.shape[1]
        k, v = (_heads_first(x[piece.batch, piece.keys, piece.heads_k]).flatten(0, 1) for x in (self.k, self.v))
        return Matrices(stacked(q, shape), k, v, self._hidden(piece, shape), shape)

    def _hidden(self, piece: Piece, shape: tuple[int, int, int, int]) -> Tensor | None:
        table = self._table(piece)
        if table is None:
            return None
        _, heads_k, group, rows = shape
        if table.shape[0] == 1:
            return table.repeat(1, group, 1)
        wide = table[:, None, None].expand(-1, heads_k, group, rows, -1)
        return wide.reshape(-1, group * rows, table.shape[2])

    def _table(self, piece: Piece) -> Tensor | None:
        """(batch entries or 1, rows, keys): True where a row does not see a key; None if all see all."""
        rows = torch.arange(piece.rows.start, piece.rows.stop, device=self.q.device)[:, None]
        keys = torch.arange(piece.keys.start, piece.keys.stop, device=self.q.device)
        if self.lengths is None:
            return _masked(self.mask, rows + (self.seqlen_k - self.seqlen_q), keys[None, None])
        length_q, length_k = (x[piece.batch, None, None] for x in self.lengths)
        padding = (rows >= length_q) | (keys >= length_k)
        masked = _masked(self.mask, rows + (length_k - length_q), keys)
        return padding if masked is None else padding | masked


def _masked(mask: Mask, p: Tensor, keys: Tensor) -> Tensor | None:
    """True where the row with diagonal p, its position plus seqlen_k - seqlen_q, does not see a key."""
    tables = []
    if mask.left is not None:
        tables.append(keys < p - mask.left)
    if mask.right is not None:
        tables.append(keys > p + mask.right)
    if mask.chunk:
        chunk_of_row, chunk_of_key = (torch.div(x, mask.chunk, rounding_mode="floor") for x in (p, keys))
        tables.append(chunk_of_key != chunk_of_row)
    return torch.stack(torch.broadcast_tensors(*tables)).any(dim=0) if tables else None


def stacked(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """(batch, rows, heads, dim) as (batch * key heads, query heads of each * rows, dim), contiguous."""
    batch, heads_k, group, rows = shape
    return _heads_first(x).view(batch * heads_k, group * rows, x.shape[3])


def _heads_first(x: Tensor) -> Tensor:
    """A copy (batch, heads, rows, dim) of (batch, rows, heads, dim), contiguous: cuBLAS takes no row stride from 2^31 on, not
    even of a single row."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def by_head(x: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
    """What `stacked` made, as (batch, rows, heads, dim) again."""
    batch, heads_k, group, rows = shape
    return x.view(batch, heads_k * group, rows, x.shape[2]).transpose(1, 2)


def probabilities(q: Tensor, k: Tensor, hidden: Tensor | None, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Softmax of the scaled scores of matrices and its logarithm of sums, (matrices, rows, keys) and (matrices, rows).

    In the dtype given; differentiable. A row that sees no key has probabilities of 0, lse = -inf and no gradient.
    """
    scores = (q * softmax_scale) @ k.transpose(1, 2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    top = scores.amax(dim=-1, keepdim=True).detach()
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True)
    blind = total == 0
    total = total.masked_fill(blind, 1.0)
    lse = (total.log() + top).masked_fill(blind, -torch.inf)
    return weights / total, lse.squeeze(-1)


def plain_scores(q: Tensor, k: Tensor, hidden: Tensor | None, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """Scores and probabilities as one writes them in PyTorch, every step in the dtype given; differentiable.

    The scale goes into q first, so that float16 scores overflow late. Rows without keys have probabilities of 0.
    """
    scores = (q * softmax_scale) @ k.transpose(1, 2)
    if hidden is None:
        return scores, scores.softmax(dim=-1)
    blind = hidden.all(dim=-1, keepdim=True)
    scores = scores.masked_fill(hidden & ~blind, -torch.inf)
    return scores, scores.softmax(dim=-1).masked_fill(blind, 0.0)
