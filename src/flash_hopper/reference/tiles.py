"""Tiles of the CPU backend: rows and keys as matrices, their products, and which blocks of keys a block of rows visits.

What `tiled` and `tiled_fp8` have in common. The query heads of a key head are rows of one matrix, so K and V are never repeated.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.blocks import key_blocks
from flash_hopper.geometry.masks import UNBOUNDED, Lengths, MaskBounds, visible_keys
from flash_hopper.problem.mask import Mask


def grouped(x: Tensor, heads_k: int) -> Tensor:
    """A view of x (b, seqlen_q, heads, d) as (b, heads_k, group, seqlen_q, d)."""
    return torch.unflatten(x.transpose(1, 2), 1, (heads_k, -1))


def query_rows(x: Tensor, heads_k: int, dtype: torch.dtype) -> Tensor:
    """A copy of x (b, seqlen_q, heads, d) as (b, heads_k, group, seqlen_q, d)."""
    return grouped(x, heads_k).to(dtype, memory_format=torch.contiguous_format)


def key_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (b, seqlen_k, heads_k, d) as (b, heads_k, seqlen_k, d)."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _block(index: int, size: int, length: int) -> slice:
    return slice(index * size, min((index + 1) * size, length))


def scores_of(rows: Tensor, keys: Tensor, sign: float) -> Tensor:
    """(b, hk, group, rows, d) x (b, hk, keys, d) -> (b, hk, group, rows, keys), all heads of a group in one product."""
    product = torch.unflatten(rows.flatten(2, 3) @ keys.transpose(2, 3), 2, rows.shape[2:4])
    return product if sign == 1.0 else product * sign


def times(weights: Tensor, keys: Tensor) -> Tensor:
    """(b, hk, group, rows, keys) x (b, hk, keys, d) -> (b, hk, group, rows, d)."""
    return torch.unflatten(weights.flatten(2, 3) @ keys, 2, weights.shape[2:4])


def transposed_times(weights: Tensor, rows: Tensor) -> Tensor:
    """(b, hk, group, rows, keys) x (b, hk, group, rows, d) -> (b, hk, keys, d), summed over the group's heads."""
    return weights.flatten(2, 3).transpose(2, 3) @ rows.flatten(2, 3)


class Step(NamedTuple):
    """Keys `cols` of one block; `hidden` (rows, cols) is True where a row does not see a key, None if all see all."""

    cols: slice
    hidden: Tensor | None


def steps(
    lengths: Lengths, mask: Mask, tile_m: int, tile_n: int, device: torch.device
) -> Iterator[tuple[slice, Iterator[Step]]]:
    """Each block of query rows with the key blocks that it visits, in their order; for lengths.k > 0."""
    bounds = _bounds(mask.simplified(lengths.q, lengths.k))
    for m_block in range(ceil_div(lengths.q, tile_m)):
        rows = _block(m_block, tile_m, lengths.q)
        yield rows, _key_steps(rows, lengths, tile_m, tile_n, bounds, device)


def _key_steps(
    rows: slice, lengths: Lengths, tile_m: int, tile_n: int, bounds: MaskBounds, device: torch.device
) -> Iterator[Step]:
    blocks = key_blocks(rows.start, tile_m, lengths, tile_n, bounds)
    limits = None if bounds.kind == "full" else _limits(rows, lengths, bounds, device)
    for n_block in reversed(range(blocks.start, blocks.end)):
        cols = _block(n_block, tile_n, lengths.k)
        hidden = None
        if limits is not None and not blocks.inner_start <= n_block < blocks.inner_end:
            keys = torch.arange(cols.start, cols.stop, device=device)
            hidden = (keys < limits[0]) | (keys >= limits[1])
        yield Step(cols, hidden)


def _limits(rows: slice, lengths: Lengths, bounds: MaskBounds, device: torch.device) -> tuple[Tensor, Tensor]:
    """The first key that each row sees, and the first behind those: (rows, 1) each."""
    first, end = zip(*(visible_keys(row, lengths, bounds) for row in range(rows.start, rows.stop)), strict=True)
    return torch.tensor(first, device=device)[:, None], torch.tensor(end, device=device)[:, None]


def _bounds(mask: Mask) -> MaskBounds:
    left, right = (UNBOUNDED if end is None else end for end in (mask.left, mask.right))
    return MaskBounds(mask.kind, left, right, mask.chunk)
