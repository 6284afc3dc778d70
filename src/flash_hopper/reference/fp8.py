"""What e4m3 tensors stand for: codes as rows, and the factor of each row and head.

Real q = codes * factor, likewise k and v; the forms of a descale and the order of keys in `Fp8Values` are those of
`problem/fp8.py`. `tiled_fp8` computes with both, tests and `verify` with their product in float64. Any device; nothing is read
back from it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.geometry.fp8 import packed_block, position_of
from flash_hopper.problem.fp8 import FP8_BLOCK, DescalePlaces, Fp8Values


class Decoded(NamedTuple):
    """codes: float32, (batch, rows, heads, dim) or packed (rows, heads, dim); factors: float32, (.., rows, heads, 1)."""

    codes: Tensor
    factors: Tensor

    @property
    def real(self) -> Tensor:
        """The values in float64."""
        return self.codes.double() * self.factors.double()


class _Rows(NamedTuple):
    """Of every row, flat: its batch entry or sequence, its place there, and the block at which a packed sequence starts."""

    entry: Tensor
    place: Tensor
    first_block: Tensor


def decode(
    x: Tensor | Fp8Values, descale: Tensor | None, places: DescalePlaces, heads_k: int, cu_seqlens: Tensor | None = None
) -> Decoded:
    """x: e4m3 codes with rows, or `Fp8Values`; descale with its `places` (None for 1); heads_k: of k, for q too.

    cu_seqlens: (sequences + 1,) if x is packed. Rows of no sequence come out as anything.
    """
    packed = cu_seqlens is not None
    if isinstance(x, Fp8Values):
        batch = 1 if packed else x.codes.shape[0]
        rows = _rows(batch, x.seqlen, cu_seqlens, x.codes.device)
        codes = _rows_of_values(x, rows, packed)
    else:
        batch, length = (1, x.shape[0]) if packed else (x.shape[0], x.shape[1])
        rows = _rows(batch, length, cu_seqlens, x.device)
        codes = x.to(torch.float32)
    shape = codes.shape[:-1]
    if descale is None or codes.numel() == 0:
        return Decoded(codes, codes.new_ones((*shape, 1)))
    return Decoded(codes, _factors(descale, places, rows, shape[-1], heads_k).view(*shape, 1))


def _rows(batch: int, length: int, cu_seqlens: Tensor | None, device: torch.device) -> _Rows:
    place = torch.arange(length, device=device)
    if cu_seqlens is None:
        entry = torch.arange(batch, device=device).repeat_interleave(length)
        return _Rows(entry, place.repeat(batch), torch.zeros_like(entry))
    if cu_seqlens.shape[0] < 2:
        return _Rows(*(torch.zeros_like(place) for _ in range(3)))
    starts = cu_seqlens.long()
    entry = torch.searchsorted(starts[1:].contiguous(), place, right=True).clamp(max=starts.shape[0] - 2)
    return _Rows(entry, place - starts[entry], packed_block(starts[entry], entry))


def _factors(descale: Tensor, places: DescalePlaces, rows: _Rows, heads: int, heads_k: int) -> Tensor:
    """(rows, heads) of a descale, addressed as the kernels do."""
    head = torch.arange(heads, device=descale.device)
    of_row = rows.entry * places.batch + rows.first_block * places.packed + rows.place // FP8_BLOCK * places.block
    of_head = head * places.head + head // max(heads // heads_k, 1) * places.key_head
    last = sum((size - 1) * stride for size, stride in zip(descale.shape, descale.stride(), strict=True))
    flat = descale.as_strided((last + 1,), (1,))
    found: Tensor = flat[(of_row[:, None] + of_head).clamp(max=last)]
    return found


def _rows_of_values(v: Fp8Values, rows: _Rows, packed: bool) -> Tensor:
    """float32 (batch, rows, heads, dim), or (rows, heads, dim), out of the transposed codes."""
    place = position_of(rows.place) + rows.first_block * FP8_BLOCK
    codes = v.codes.view(torch.uint8)
    if packed:
        found = codes[..., place.clamp(max=codes.shape[-1] - 1)].permute(2, 0, 1)
    else:
        found = codes[..., place[: v.seqlen]].permute(0, 3, 1, 2)
    rows_first: Tensor = found.contiguous().view(v.codes.dtype).to(torch.float32)
    return rows_first
