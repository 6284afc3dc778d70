"""Quantisation and Hadamard transform: from tensors to a kernel on a GPU, or to the reference on the CPU.

`flash_hopper/fp8.py` calls this. A call is checked and bound to its kernels once per signature (shapes, strides, dtypes, options);
later ones find it in a dictionary. Lengths, offsets and signs on a GPU are never read by the host.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_hopper.compile.store import get_kernel
from flash_hopper.geometry.strips import hadamard_block
from flash_hopper.launch.device import device_facts, kept
from flash_hopper.launch.tensors import addressable, describe
from flash_hopper.plan.quantize import Purpose, QuantizePlan, plan_quantize
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import DeviceError
from flash_hopper.problem.fp8 import Fp8Values
from flash_hopper.problem.quantize import QuantizeProblem, quantize_problem, transform_problem
from flash_hopper.reference import quantize as reference
from flash_hopper.reference.quantize import Inputs

CODES = torch.float8_e4m3fn
MAX_SIGNATURES = 4096


@dataclass(frozen=True, slots=True)
class PreparedQuantize:
    """A checked signature on a GPU. `kernels`: one, or two where scales are of more than a block; none if nothing is to be done."""

    problem: QuantizeProblem
    kernels: tuple[Callable[..., Any], ...]
    ctas: int

    def run(self, x: Tensor, given: Inputs, factor: float) -> tuple[Tensor, Tensor | None]:
        """(codes, descale), or (transform of x, None)."""
        if torch._C._cuda_getDevice() != x.device.index:
            with torch.cuda.device(x.device):
                return self.run(x, given, factor)
        p = self.problem
        out = torch.empty(p.codes_shape, dtype=CODES if p.granularity else x.dtype, device=x.device)
        descale = None
        if p.granularity is not None:
            descale = torch.empty(p.descale_shape, dtype=torch.float32, device=x.device)
        if not self.kernels:
            return out, None if descale is None else descale.fill_(1.0)
        x, rotary, lengths = addressable(x), _rotary_args(p, given), _length_args(given)
        if len(self.kernels) == 1:
            self.kernels[0](x, out, (descale, None, 1), given.signs, rotary, lengths, factor, self.ctas)
            return out, descale
        assert descale is not None, "two kernels make one scale for many blocks"
        absmax = torch.zeros_like(descale)
        groups = (p.batch, p.heads // p.group)
        scales = (descale.expand(groups), absmax.expand(groups), p.group)
        find, apply = self.kernels
        find(x, None, (None, *scales[1:]), given.signs, rotary, lengths, factor, self.ctas)
        apply(x, out, scales, given.signs, rotary, lengths, factor, self.ctas)
        return out, descale


_prepared: dict[tuple[Any, ...], PreparedQuantize] = {}


def quantize(
    x: Tensor,
    granularity: Any,
    cu_seqlens: Tensor | None,
    seqused: Tensor | None,
    qhead_per_kvhead: Any,
    hadamard: Any,
    signs: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    rotary_interleaved: Any,
    offsets: Tensor | int,
    values: Any,
) -> tuple[Tensor | Fp8Values, Tensor]:
    """`fp8.quantize_fp8`. Raises every error of `problem/quantize.py`, DeviceError, and on a GPU those of the compile layer."""
    if hadamard is True and signs is None and isinstance(x, Tensor) and x.dim():
        signs = default_signs(x.shape[-1], x.device)
    given = Inputs(cu_seqlens, seqused, signs, cos, sin, offsets)
    options = (granularity, qhead_per_kvhead, hadamard, rotary_interleaved, values)
    key = (_layout(x), *map(_layout, given), options)
    prepared = _prepared.get(key) if _is_hashable(options) else None
    if prepared is None:
        problem = _checked_quantize(x, given, *options)
        if on_cpu(x):
            codes, descale = reference.quantize(x, problem, given)
            return _as_values(codes, problem), descale
        prepared = _remember(key, _prepare(problem, x))
    codes, found = prepared.run(x, given, _factor(prepared.problem, None))
    assert found is not None, "codes come with a scale"
    return _as_values(codes, prepared.problem), found


def transform(x: Tensor, signs: Tensor | None, scale: float | None) -> Tensor:
    """`fp8.hadamard_transform` for x (batch, seqlen, heads, head_dim). Raises as `quantize`."""
    key = (_layout(x), _layout(signs), "transform")
    prepared = _prepared.get(key)
    if prepared is None:
        problem = transform_problem(describe("x", x), None if signs is None else describe("signs", signs))
        if on_cpu(x):
            return reference.transform(x, signs, scale)
        prepared = _remember(key, _prepare(problem, x))
    out, _ = prepared.run(x, Inputs(None, None, signs, None, None, 0), _factor(prepared.problem, scale))
    return out


def on_cpu(x: Tensor) -> bool:
    """Where the reference serves; DeviceError if it is no GPU either."""
    if x.device.type not in ("cpu", "cuda"):
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {x.device}")
    return x.device.type == "cpu"


def hadamard_signs(head_dim: int, seed: int, device: torch.device) -> Tensor:
    """(head_dim,) float32 of +1 and -1, the same for a seed on every device: bits of a mixed counter."""
    bits = torch.arange(head_dim, dtype=torch.int64, device=device) + seed * 0x10001
    for multiplier in (0x45D9F3B, 0x119DE1F3):
        bits = ((bits ^ (bits >> 16)) * multiplier) & 0xFFFFFFFF
    return 1.0 - 2.0 * ((bits >> 15) & 1).float()


def default_signs(head_dim: int, device: torch.device) -> Tensor:
    """Those of seed 0; a GPU's are kept (`device.kept`)."""
    if device.type != "cuda":
        return hadamard_signs(head_dim, 0, device)
    return kept(
        ("signs", head_dim), device.index, lambda index: hadamard_signs(head_dim, 0, torch.device("cuda", index))
    )


def plans_of(p: QuantizeProblem) -> tuple[QuantizePlan, ...]:
    """The kernels of a problem, in order."""
    purposes: tuple[Purpose, ...] = ("absmax", "scaled")
    if p.granularity is None:
        purposes = ("transform",)
    elif p.granularity == "block":
        purposes = ("block",)
    return tuple(
        plan_quantize(
            p.dtype,
            p.head_dim,
            purpose,
            is_transposed=p.values,
            hadamard=hadamard_block(p.head_dim) if p.hadamard else 0,
            has_signs=p.has_signs,
            rotary=p.rotary.kind,
            rotary_dim=p.rotary.dim,
            has_wide_table=p.rotary.table_dtype is DType.FP32 and p.dtype is not DType.FP32,
            has_offsets=p.rotary.has_offsets,
            is_ragged=p.is_ragged,
            has_seqused=p.has_seqused,
        )
        for purpose in purposes
    )


def _prepare(p: QuantizeProblem, x: Tensor) -> PreparedQuantize:
    facts = device_facts(x.device.index)
    plans = () if p.is_empty else plans_of(p)
    ctas = min(p.blocks, facts.sm_count * plans[0].ctas_per_sm) if plans else 0
    return PreparedQuantize(p, tuple(map(get_kernel, plans)), ctas)


def _checked_quantize(
    x: Tensor, given: Inputs, granularity: Any, group: Any, hadamard: Any, interleaved: Any, values: Any
) -> QuantizeProblem:
    def described(name: str, tensor: Tensor | None) -> Any:
        return None if tensor is None else describe(name, tensor)

    offsets = describe("seqlen_offsets", given.offsets) if isinstance(given.offsets, Tensor) else given.offsets
    return quantize_problem(
        describe("x", x),
        granularity,
        cu_seqlens=described("cu_seqlens", given.cu_seqlens),
        seqused=described("seqused", given.seqused),
        qhead_per_kvhead=group,
        hadamard=hadamard,
        signs=described("signs", given.signs),
        rotary=(described("rotary_cos", given.cos), described("rotary_sin", given.sin)),
        rotary_interleaved=interleaved,
        offsets=offsets,
        values=values,
    )


def _remember(key: tuple[Any, ...], prepared: PreparedQuantize) -> PreparedQuantize:
    if len(_prepared) >= MAX_SIGNATURES:
        _prepared.clear()
    _prepared[key] = prepared
    return prepared


def _layout(given: Any) -> Any:
    """What the preparation of a call depends on."""
    if not isinstance(given, Tensor):
        return given if given is None or isinstance(given, int) else repr(given)
    needs_grad = given.requires_grad and torch.is_grad_enabled()
    return given.shape, given.stride(), given.dtype, given.device, needs_grad


def _is_hashable(options: tuple[Any, ...]) -> bool:
    return all(isinstance(option, str | int | bool) for option in options)


def _factor(p: QuantizeProblem, scale: float | None) -> float:
    """What the kernel's sums, which are divided by their number, are multiplied by."""
    if not p.hadamard:
        return 1.0
    size = hadamard_block(p.head_dim)
    return math.sqrt(size) if scale is None else scale * size


def _as_values(codes: Tensor, p: QuantizeProblem) -> Tensor | Fp8Values:
    return Fp8Values(codes, p.rows) if p.values else codes


def _rotary_args(p: QuantizeProblem, given: Inputs) -> tuple[Any, ...] | None:
    """The kernel's `RotaryArgs`."""
    if given.cos is None or given.sin is None:
        return None
    tables = addressable(given.cos), addressable(given.sin)
    return (*tables, given.offsets, 0) if p.rotary.has_offsets else (*tables, None, given.offsets)


def _length_args(given: Inputs) -> tuple[Tensor | None, Tensor | None] | None:
    """The kernel's `LengthArgs`."""
    if given.cu_seqlens is None and given.seqused is None:
        return None
    return given.cu_seqlens, given.seqused
