"""What a ragged call must give: the rules of `compare` and `gradients`, applied to groups of sequences as padded batches.

Sequences of similar lengths are gathered, side by side, into one padded batch, so that thousands of tiny ones take a few
steps. Their results are put back where the sequences lie; everywhere else out and gradients must be exactly 0 and lse
-inf. `testing.run` calls this.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.problem.mask import Mask
from flash_hopper.testing.compare import SMALLEST, Expected, Target, expect
from flash_hopper.testing.gradients import expect_gradients
from flash_hopper.testing.lengths import Side
from flash_hopper.testing.pieces import Lengths

# scores, over all heads, of one padded batch; beyond it sequences are sorted by their lengths
_SCORES = {"cpu": 1 << 18, "cuda": 1 << 22}


class Call(NamedTuple):
    """Tensors of a ragged call as it takes and returns them, and how its sequences lie.

    q, k, v, out, dout: (rows, heads, dim) or (batch, rows, heads, dim); dlse: (heads, rows) or (batch, heads, rows).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    side_q: Side
    side_k: Side
    softmax_scale: float
    mask: Mask


def expect_ragged(call: Call, rule: Callable[..., Expected] = expect) -> dict[str, Target]:
    """The right out and lse, shaped like what the call returns, with the error allowed in each element by `rule`."""
    q, k, v = (_as_batch(x) for x in (call.q, call.k, call.v))
    out = _Result.of_zeros((*q.shape[:3], v.shape[3]), q.device)
    lse = _Result.of_zeros(q.shape[:3], q.device)
    lse.want.fill_(-torch.inf)
    for group in _groups(call, q.shape[2]):
        rows, keys = group.rows, group.keys
        of_group = rule(
            rows.gather(q), keys.gather(k), keys.gather(v), softmax_scale=call.softmax_scale, mask=call.mask,
            lengths=Lengths(rows.lengths, keys.lengths),
        )  # fmt: skip
        out.put(rows, of_group.out, of_group.out_allowed)
        lse.put(rows, of_group.lse.transpose(1, 2), of_group.lse_allowed.transpose(1, 2))
    is_packed = call.q.dim() == 3
    targets = out.target(is_packed), lse.target(is_packed)
    return {"out": targets[0], "lse": Target(*(x.transpose(-1, -2) for x in targets[1]))}


def expect_ragged_gradients(call: Call, out: Tensor, dout: Tensor | None, dlse: Tensor | None) -> dict[str, Target]:
    """The right dq, dk and dv, shaped like q, k and v, with the error allowed in each element.

    out: what the forward returned; dout, dlse: None stands for zeros. What they hold in unused rows is not looked at.
    """
    q, k, v, out = (_as_batch(x) for x in (call.q, call.k, call.v, out))
    dout = None if dout is None else _as_batch(dout)
    dlse = None if dlse is None else (dlse[None] if dlse.dim() == 2 else dlse).transpose(1, 2)
    results = {name: _Result.of_zeros(tuple(x.shape), q.device) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    for group in _groups(call, q.shape[2]):
        rows, keys = group.rows, group.keys
        found = expect_gradients(
            rows.gather(q),
            keys.gather(k),
            keys.gather(v),
            rows.gather(out),
            None if dout is None else rows.gather(dout),
            None if dlse is None else rows.gather(dlse).transpose(1, 2),
            softmax_scale=call.softmax_scale,
            mask=call.mask,
            lengths=Lengths(rows.lengths, keys.lengths),
        )
        for name, target in found.items():
            results[name].put(rows if name == "dq" else keys, *target)
    packed = {"dq": call.q.dim() == 3, "dk": call.k.dim() == 3, "dv": call.v.dim() == 3}
    return {name: result.target(packed[name]) for name, result in results.items()}


def _as_batch(x: Tensor) -> Tensor:
    """A packed tensor as a batch of one."""
    return x.detach()[None] if x.dim() == 3 else x.detach()


class _Gathered(NamedTuple):
    """Rows of some sequences as a padded batch: indices (sequences, longest), and (sequences,) lengths."""

    entry: Tensor
    row: Tensor
    lengths: Tensor

    @property
    def is_used(self) -> Tensor:
        """(sequences, longest): False in the padding."""
        return torch.arange(self.row.shape[1], device=self.row.device) < self.lengths[:, None]

    def gather(self, x: Tensor) -> Tensor:
        """x (batch, rows, ...) as (sequences, longest, ...), 0 in the padding."""
        found = x[self.entry, self.row]
        padding = ~self.is_used
        return found.masked_fill(padding.view(*padding.shape, *(1 for _ in found.shape[2:])), 0.0)


class _Group(NamedTuple):
    """Sequences that have rows and keys."""

    rows: _Gathered
    keys: _Gathered


def _groups(call: Call, heads: int) -> Iterator[_Group]:
    """All sequences with both rows and keys, in groups of similar lengths."""
    lengths_q, lengths_k = call.side_q.lengths, call.side_k.lengths
    chosen = [b for b in range(len(lengths_q)) if lengths_q[b] and lengths_k[b]]
    if not chosen:
        return
    scores = len(chosen) * heads * max(lengths_q[b] for b in chosen) * max(lengths_k[b] for b in chosen)
    groups: dict[tuple[int, int], list[int]] = {}
    for b in chosen:
        is_one = scores <= _SCORES[call.q.device.type]
        groups.setdefault((0, 0) if is_one else (_size(lengths_q[b]), _size(lengths_k[b])), []).append(b)
    for members in groups.values():
        rows, keys = (_gathered(side, members, call.q.device) for side in (call.side_q, call.side_k))
        yield _Group(rows, keys)


def _size(length: int) -> int:
    """The next power of four, as its exponent."""
    return ((length - 1).bit_length() + 1) // 2


def _gathered(side: Side, members: list[int], device: torch.device) -> _Gathered:
    lengths = torch.tensor([side.lengths[b] for b in members])
    starts = side.starts
    entry, first = torch.tensor([starts[b] for b in members]).unbind(1)
    place = torch.arange(int(lengths.max()))
    row = first[:, None] + torch.where(place < lengths[:, None], place, 0)
    return _Gathered(entry[:, None].expand_as(row).to(device), row.to(device), lengths.to(device))


class _Result(NamedTuple):
    """A result (batch, rows, ...) and the error allowed, float64, filled in group by group."""

    want: Tensor
    allowed: Tensor

    @classmethod
    def of_zeros(cls, shape: tuple[int, ...], device: torch.device) -> "_Result":
        """Nothing but zeros is right until something is put in."""
        want = torch.zeros(shape, dtype=torch.float64, device=device)
        return cls(want, torch.full_like(want, SMALLEST))

    def put(self, place: _Gathered, want: Tensor, allowed: Tensor) -> None:
        """Store a padded batch of `place` where its sequences lie."""
        used = place.is_used
        at = place.entry[used], place.row[used]
        self.want[at], self.allowed[at] = want[used], allowed.expand_as(want)[used]

    def target(self, is_packed: bool) -> Target:
        """As the call returns it."""
        return Target(self.want[0], self.allowed[0]) if is_packed else Target(self.want, self.allowed)
