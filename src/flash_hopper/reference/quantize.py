"""Quantisation to e4m3 and the Hadamard transform on the CPU: the same numbers as the kernel's, in torch.

`launch/quantize.py` calls it for tensors in host memory, the tests for comparison. Float32 throughout, in the kernel's order of
sums, so that codes and scales agree bit for bit (with a rotary embedding up to rounding: the GPU fuses a product with a sum).
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flash_hopper.geometry.fp8 import key_at, packed_block
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.fp8 import FP8_BLOCK, padded_rows
from flash_hopper.problem.quantize import QuantizeProblem

E4M3_MAX = 448.0
LARGEST = torch.finfo(torch.float32).max
SMALLEST_SCALE = 2.0**-120  # a scale's reciprocal stays finite
CODES = torch.float8_e4m3fn


class Inputs(NamedTuple):
    """What a call is given beside x; None where absent. offsets: (batch,) int32, or one int for all."""

    cu_seqlens: Tensor | None
    seqused: Tensor | None
    signs: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    offsets: Tensor | int


class _Rows(NamedTuple):
    """One sequence, computed: values (heads, rows, head_dim) float32, of which unused rows are zero, before `factor`."""

    entry: int
    start: int
    values: Tensor


def hadamard_size(head_dim: int) -> int:
    """The largest power of two that divides the head dim: so many neighbours are transformed together."""
    return head_dim & -head_dim


def hadamard(x: Tensor, size: int) -> Tensor:
    """H x / size for each `size` neighbours in the last dimension, H[i][j] = (-1)^popcount(i & j)."""
    y = x / size
    step = 1
    while step < size:
        a, b = torch.unflatten(y, -1, (-1, 2, step)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        step *= 2
    return y


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding of the first 2 * columns(cos) elements of x (.., rows, head_dim) by the angles of each row's position."""
    half = cos.shape[1]
    c, s = (table.float()[positions.clamp(max=table.shape[0] - 1)] for table in (cos, sin))
    head, rest = x[..., : 2 * half], x[..., 2 * half :]
    pairs = head.unflatten(-1, (half, 2)).transpose(-1, -2) if interleaved else head.unflatten(-1, (2, half))
    x0, x1 = pairs.unbind(-2)
    turned = torch.stack((x0 * c - x1 * s, x1 * c + x0 * s), -2)
    turned = turned.transpose(-1, -2) if interleaved else turned
    return torch.cat((turned.flatten(-2), rest), -1)


def transform(x: Tensor, signs: Tensor | None, scale: float | None) -> Tensor:
    """`hadamard_transform` for x (.., head_dim) in host memory."""
    size = hadamard_size(x.shape[-1])
    wide = x.float() if signs is None else x.float() * signs
    factor = math.sqrt(size) if scale is None else scale * size
    return (hadamard(wide, size) * torch.tensor(factor, dtype=torch.float32)).to(x.dtype)


def quantize(x: Tensor, p: QuantizeProblem, given: Inputs) -> tuple[Tensor, Tensor]:
    """Codes and descale in the shapes of the problem; what no sequence owns has code 0 and descale 1.

    Raises ArgumentError for cu_seqlens or seqused that do not fit the rows.
    """
    factor = torch.tensor(math.sqrt(hadamard_size(p.head_dim)) if p.hadamard else 1.0, dtype=torch.float32)
    codes = torch.zeros(p.codes_shape, dtype=torch.float32)
    descale = torch.ones(p.descale_shape, dtype=torch.float32)
    found = [_computed(x, p, given, *span) for span in _sequences(x, p, given)]
    if p.granularity == "tensor":
        tops = [_largest(rows.values.unsqueeze(0).flatten(1), factor) for rows in found]
        descale[:] = scale_of(torch.stack(tops).amax()) if tops else 1.0
    for sequence, rows in enumerate(found):
        if p.granularity == "tensor":
            scales = descale.expand(p.heads, 1)
        elif p.granularity == "head":
            descale[sequence] = scale_of(_largest(rows.values.unflatten(0, (-1, p.group)).flatten(1), factor))
            scales = descale[sequence].repeat_interleave(p.group)[:, None]
        else:
            scales = scale_of(_largest(_blocks(rows.values).flatten(2), factor))
            first = packed_block(rows.start, sequence) if p.is_ragged else 0
            of_entry = descale if p.is_ragged else descale[rows.entry]
            of_entry[:, first : first + scales.shape[1]] = scales
        _place(codes, p, sequence, rows, _codes(rows.values, scales, factor))
    return codes.to(CODES), descale


def scale_of(largest: Tensor) -> Tensor:
    """What codes are multiplied by to give values up to `largest`; 1 where that is 0."""
    scale = (largest * torch.tensor(1.0 / E4M3_MAX, dtype=torch.float32)).clamp(min=SMALLEST_SCALE)
    return scale.masked_fill(largest == 0.0, 1.0)


def transposed(rows: Tensor) -> Tensor:
    """(.., rows, head_dim) as (.., head_dim, padded rows), keys in the order that the second product reads."""
    padded = padded_rows(rows.shape[-2])
    filled = torch.zeros((*rows.shape[:-2], padded, rows.shape[-1]), dtype=rows.dtype)
    filled[..., : rows.shape[-2], :] = rows
    keys: Tensor = key_at(torch.arange(padded))
    return filled[..., keys, :].transpose(-1, -2)


def _sequences(x: Tensor, p: QuantizeProblem, given: Inputs) -> Iterator[tuple[int, int, int, int, int]]:
    """(sequence, entry, first row, rows, rows that count) of each."""
    if given.cu_seqlens is None:
        spans = [(b, 0, p.rows) for b in range(p.batch)]
    else:
        offsets = given.cu_seqlens.tolist()
        if offsets[0] != 0 or any(b < a for a, b in pairwise(offsets)) or offsets[-1] > p.rows:
            raise ArgumentError(
                f"cu_seqlens must start at 0, not decrease and end within the {p.rows} rows, got {offsets}"
            )
        spans = [(0, start, end - start) for start, end in pairwise(offsets)]
    for b, (entry, start, length) in enumerate(spans):
        used = length if given.seqused is None else int(given.seqused[b])
        if not 0 <= used <= length:
            raise ArgumentError(f"seqused must be from 0 to the rows of each sequence, got {used} of {length} at {b}")
        yield b, entry, start, length, used


def _computed(
    x: Tensor, p: QuantizeProblem, given: Inputs, sequence: int, entry: int, start: int, length: int, used: int
) -> _Rows:
    rows = (x if p.is_ragged else x[entry]).narrow(0, start, length).transpose(0, 1).float()
    rows = torch.where(torch.arange(length)[:, None] < used, rows, 0.0)
    if given.cos is not None and given.sin is not None:
        offset = given.offsets if isinstance(given.offsets, int) else int(given.offsets[sequence])
        positions = torch.arange(length) + offset
        rows = rotated(rows, given.cos, given.sin, positions, p.rotary.kind == "interleaved")
    if given.signs is not None:
        rows = rows * given.signs
    if p.hadamard:
        rows = hadamard(rows, hadamard_size(p.head_dim))
    return _Rows(entry, start, rows)


def _blocks(values: Tensor) -> Tensor:
    """(heads, rows, head_dim) as (heads, blocks, 128, head_dim), rows that are missing zero."""
    padded = values.new_zeros((values.shape[0], padded_rows(values.shape[1]), values.shape[2]))
    padded[:, : values.shape[1]] = values
    return torch.unflatten(padded, 1, (-1, FP8_BLOCK))


def _largest(values: Tensor, factor: Tensor) -> Tensor:
    """The largest magnitude of the results over the last dimension, finite; NaNs do not count."""
    magnitudes = values.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    top = magnitudes.amax(-1) if magnitudes.shape[-1] else magnitudes.new_zeros(magnitudes.shape[:-1])
    return (top * factor).clamp(max=LARGEST)


def _codes(values: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Codes, as float32, of values (heads, rows, head_dim) with scales (heads, 1 or blocks)."""
    by_row = scales.repeat_interleave(FP8_BLOCK, 1)[:, : values.shape[1]] if scales.shape[1] > 1 else scales[:, :1]
    return (values * (factor / by_row)[..., None]).clamp(-E4M3_MAX, E4M3_MAX).to(CODES).float()


def _place(codes: Tensor, p: QuantizeProblem, sequence: int, rows: _Rows, found: Tensor) -> None:
    """Put the codes (heads, rows, head_dim) of a sequence where they belong."""
    of_entry = codes if p.is_ragged else codes[rows.entry]
    if p.values:
        first = packed_block(rows.start, sequence) * FP8_BLOCK if p.is_ragged else 0
        columns = transposed(found)
        of_entry[..., first : first + columns.shape[-1]] = columns
    else:
        of_entry[rows.start : rows.start + found.shape[1]] = found.transpose(0, 1)
