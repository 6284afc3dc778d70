"""e4m3 codes, descales and transposed values for a case, out of the float32 values that `inputs.draw` gives.

A simple quantiser of its own, one formula for every form of descale: which element of a descale belongs to a row and head is
written here once more, so that a kernel, or `quantize_fp8`, that means another one is found. `inputs.make_inputs` calls it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.geometry.fp8 import packed_block, position_of
from flash_hopper.problem.fp8 import FP8_BLOCK, block_count, packed_block_count, packed_rows, padded_rows
from flash_hopper.testing.cases import Case

LARGEST = 448.0


class Rows(NamedTuple):
    """For each row of a tensor of `Case.grid`'s sizes, (batch, rows): its sequence, its place there, whether it is used, and the block
    that starts a packed sequence (0 if it is not packed)."""

    sequence: Tensor
    place: Tensor
    is_used: Tensor
    first_block: Tensor


class Coded(NamedTuple):
    """codes: float32 of e4m3's values, like the values; descale: float32 as the call takes it, or None."""

    codes: Tensor
    descale: Tensor | None


def coded(case: Case, operand: str, values: Tensor, rows: Rows) -> Coded:
    """Codes of values (batch, rows, heads, dim) of operand "q", "k" or "v", in the form that the case says.

    The largest magnitude of a group becomes 448; unused columns of a descale of blocks are NaN.
    """
    form = case.descales["qkv".index(operand)]
    if form == "n":
        return Coded(rounded(values), None)
    used = torch.where(rows.is_used[..., None], values.abs().amax(-1) if values.shape[-1] else 0.0, 0.0)
    if form in "01":
        factor = _factor_of(used.amax() if used.numel() else torch.tensor(0.0))
        return Coded(rounded(values / factor), factor if form == "0" else factor.view(1))
    shape, index = _places(case, operand, rows)
    tops = torch.zeros(max(shape.numel(), 1)).scatter_reduce_(0, index.flatten(), used.flatten(), "amax")
    factors = _factor_of(tops)
    codes = rounded(values / factors[index][..., None])
    if form == "b":
        counts = torch.zeros_like(tops).scatter_reduce_(
            0, index.flatten(), rows.is_used[..., None].expand_as(index).float().flatten(), "amax"
        )
        factors = torch.where(counts > 0, factors, torch.nan)
    return Coded(codes, factors[: shape.numel()].view(shape))


def rounded(x: Tensor) -> Tensor:
    """The nearest values of e4m3, the largest for what is larger."""
    return x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float()


def _factor_of(top: Tensor) -> Tensor:
    return torch.where(top == 0, 1.0, top / LARGEST)


def _places(case: Case, operand: str, rows: Rows) -> tuple[torch.Size, Tensor]:
    """The shape of a descale of heads or blocks, and which of its elements, flat, each row and head (batch, rows, heads) has."""
    form = case.descales["qkv".index(operand)]
    heads = torch.arange(case.grid(operand)[2])
    sequence, place = rows.sequence[..., None], rows.place[..., None]
    if form == "h":
        group = case.heads // case.heads_k if operand == "q" and case.heads_k else 1
        return torch.Size((case.batch, case.heads_k)), sequence * case.heads_k + heads // group
    if case.is_packed(operand):
        columns = packed_block_count(case.grid(operand)[1], case.batch)
        found = rows.first_block[..., None] + place // FP8_BLOCK
        return torch.Size((len(heads), columns)), heads * columns + found.clamp(max=columns - 1)
    columns = block_count(case.grid(operand)[1])
    found = (sequence * len(heads) + heads) * columns + place // FP8_BLOCK
    return torch.Size((case.batch, len(heads), columns)), found


def rows_of(case: Case, operand: str, sequence: Tensor, place: Tensor, is_used: Tensor) -> Rows:
    """`Rows` of an operand from what `inputs` knows of each row."""
    first = torch.zeros_like(place)
    if case.is_packed(operand):
        starts = torch.tensor([row for _, row in case.side("q" if operand == "q" else "k").starts] or [0])
        first = packed_block(starts[sequence], sequence)
    return Rows(sequence, place, is_used, first)


def transposed_shape(case: Case) -> tuple[int, ...]:
    """Of the codes of `Fp8Values`."""
    batch, rows, heads, dim = case.grid("v")
    if case.is_packed("v"):
        return heads, dim, packed_rows(rows, case.batch)
    return batch, heads, dim, padded_rows(rows)


def transposed(case: Case, codes: Tensor, rows: Rows) -> Tensor:
    """Codes (batch, rows, heads, dim) as `Fp8Values` has them, float32; blocks without a key, which nobody reads, hold NaN."""
    shape = transposed_shape(case)
    whole = torch.zeros((codes.shape[0], shape[-1], *codes.shape[2:]))
    entry, row = rows.is_used.nonzero(as_tuple=True)
    position = rows.first_block[entry, row] * FP8_BLOCK + position_of(rows.place[entry, row])
    whole[entry, position] = codes[entry, row]
    if shape[-1]:
        has_keys = torch.zeros(codes.shape[0], shape[-1] // FP8_BLOCK, dtype=torch.bool)
        has_keys[entry, position // FP8_BLOCK] = True
        whole[~has_keys.repeat_interleave(FP8_BLOCK, 1)] = torch.nan
    return whole.permute(0, 2, 3, 1).reshape(shape)
