"""e4m3 tensors with descales in every form, what they stand for in float64, and how far a result may be from it."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flash_hopper.geometry.fp8 import key_at, packed_block
from flash_hopper.problem.fp8 import FP8_BLOCK, Fp8Values, block_count, packed_block_count, packed_rows, padded_rows
from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.reference import naive

CODES = torch.float8_e4m3fn
LARGEST = 448.0
# A weight is rounded by at most 2^-4 of itself, or, below 2^-14 of the largest, by 2^-18 of that; the sum of weights likewise
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-18


@dataclass(frozen=True)
class Coded:
    """Codes with a descale, and the float64 values that they stand for. cu_seqlens: of packed rows, on the host."""

    codes: Tensor
    descale: Tensor | None
    real: Tensor
    cu_seqlens: Tensor | None = field(default=None)


def coded(x: Tensor, form: str, heads_k: int | None = None, cu_seqlens: Tensor | None = None) -> Coded:
    """x, (batch, rows, heads, d) or packed (rows, heads, d), in e4m3. form: none, one, head or block; heads_k: of the keys, whose
    query heads share a factor if the form is head."""
    if form == "none":
        codes = x.clamp(-LARGEST, LARGEST).to(CODES)
        return Coded(codes, None, codes.double(), cu_seqlens)
    if form == "one":
        factor = largest(x.abs().amax().reshape(1))
        descale, rows = factor, factor
    else:
        descale, rows = (
            _head_factors(x, heads_k or x.shape[-2], cu_seqlens) if form == "head" else _block_factors(x, cu_seqlens)
        )
    codes = (x / rows).clamp(-LARGEST, LARGEST).to(CODES)
    return Coded(codes, descale.float().contiguous(), codes.double() * rows.double(), cu_seqlens)


def largest(x: Tensor) -> Tensor:
    """A factor that brings amounts up to x into the range; 1 for zeros."""
    return torch.where(x == 0, 1.0, x.float() / LARGEST)


def _entries(x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    if cu_seqlens is None:
        return [(b, slice(None)) for b in range(x.shape[0])]
    starts = cu_seqlens.tolist()
    return [(b, slice(starts[b], starts[b + 1])) for b in range(len(starts) - 1)]


def _rows_of(x: Tensor, cu_seqlens: Tensor | None, b: int, rows: slice) -> Tensor:
    return x[b] if cu_seqlens is None else x[rows]


def _head_factors(x: Tensor, heads_k: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The descale (entries, heads_k), and the factor of each row and head, (..., rows, heads, 1)."""
    group = x.shape[-2] // heads_k
    entries = _entries(x, cu_seqlens)
    descale = torch.ones(len(entries), heads_k, device=x.device)
    factors = torch.ones(*x.shape[:-1], 1, device=x.device)
    for b, rows in entries:
        own = _rows_of(x, cu_seqlens, b, rows)
        if own.numel():
            descale[b] = largest(own.abs().amax((0, 2)).reshape(heads_k, group).amax(1))
        _rows_of(factors, cu_seqlens, b, rows)[:] = descale[b].repeat_interleave(group)[None, :, None]
    return descale, factors


def _block_factors(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The descale of blocks, unused ones NaN, and the factor of each row and head."""
    heads, entries = x.shape[-2], _entries(x, cu_seqlens)
    if cu_seqlens is None:
        descale = torch.full((x.shape[0], heads, block_count(x.shape[1])), torch.nan, device=x.device)
    else:
        descale = torch.full((heads, packed_block_count(x.shape[0], len(entries))), torch.nan, device=x.device)
    factors = torch.ones(*x.shape[:-1], 1, device=x.device)
    for b, rows in entries:
        own, of_own = _rows_of(x, cu_seqlens, b, rows), _rows_of(factors, cu_seqlens, b, rows)
        for i in range(block_count(own.shape[0])):
            block = slice(i * FP8_BLOCK, (i + 1) * FP8_BLOCK)
            factor = largest(own[block].abs().amax((0, 2)))
            if cu_seqlens is None:
                descale[b, :, i] = factor
            else:
                descale[:, packed_block(rows.start, b) + i] = factor
            of_own[block] = factor[None, :, None]
    return descale, factors


def values_of(v: Coded) -> Fp8Values:
    """The codes of v as `Fp8Values`."""
    codes = v.codes.view(torch.uint8)
    if v.cu_seqlens is None:
        batch, rows, heads, d = codes.shape
        spread = codes.new_zeros(batch, padded_rows(rows), heads, d)
        spread[:, :rows] = codes
    else:
        rows, heads, d = codes.shape
        entries = _entries(codes, v.cu_seqlens)
        spread = codes.new_zeros(packed_rows(rows, len(entries)), heads, d)
        for b, own in entries:
            first = packed_block(own.start, b) * FP8_BLOCK
            spread[first : first + own.stop - own.start] = codes[own]
    order = key_at(torch.arange(spread.shape[-3], device=codes.device))
    spread = spread.index_select(-3, order).movedim(-3, -1).contiguous()
    return Fp8Values(spread.view(CODES), rows)


@dataclass(frozen=True)
class Oracle:
    """The right answer, and what rounding of weights may change."""

    out: Tensor
    lse: Tensor
    allowance: Tensor


def oracle(q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, mask: Mask = FULL, **lengths: Any) -> Oracle:
    """For real q, k and v, float64; `lengths` are tensors as in `naive.varlen_attention`, none for a dense batch."""
    attend = naive.varlen_attention if lengths else naive.attention
    out, lse = attend(q, k, v, softmax_scale=softmax_scale, mask=mask, **lengths)
    amounts, _ = attend(q, k, v.abs(), softmax_scale=softmax_scale, mask=mask, **lengths)
    extra = ABSOLUTE * float(v.abs().sum(-3).amax())
    # rounding of weights twice (theirs and their sum's), truncated sums, and the output's own rounding
    return Oracle(out, lse, 2.2 * RELATIVE * amounts + extra + 2.0**-8 * out.abs() + 1e-30)


def check(out: Tensor, want: Oracle, norm: float) -> None:
    """Every element is within its allowance, and the whole within `norm` of the right answer in the mean square."""
    assert torch.isfinite(out).all(), f"{int((~torch.isfinite(out)).sum())} of {out.numel()} elements are not finite"
    error = (out.double() - want.out).abs()
    excess = error - want.allowance
    worst = int(excess.argmax())
    assert excess.flatten()[worst] <= 0, (
        f"element {worst} of {tuple(out.shape)}: {out.flatten()[worst]} instead of {want.out.flatten()[worst]}, "
        f"allowed {want.allowance.flatten()[worst]}"
    )
    relative = float(error.square().sum().sqrt() / want.out.square().sum().sqrt().clamp_min(1e-30))
    assert relative <= norm, f"relative error {relative:.5f}, allowed {norm}"


def check_lse(lse: Tensor, want: Oracle, most: float = 0.07) -> None:
    """The sum of weights is that of rounded ones."""
    assert torch.equal(lse == -torch.inf, want.lse == -torch.inf)
    seen = want.lse != -torch.inf
    error = (lse.double() - want.lse)[seen].abs()
    bound = most + 1e-5 * want.lse[seen].abs()
    assert (error <= bound).all(), f"lse off by {float((error - bound).max()) + most}"
