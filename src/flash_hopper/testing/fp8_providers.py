"""Providers of the fp8 suite: e4m3 attention of quantised inputs, ours and FA3's, and quantisation beside a copy.

Inputs are quantised here, outside of what is timed, and a result is compared with float64 attention of what the codes stand for.
`providers.py` lists the makers.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

import flash_hopper
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.fp8 import Fp8Values, Scaled, descale_places
from flash_hopper.reference.fp8 import decode
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.provider_base import Inputs, Prepared, ProviderAbsent, function_of

FA3 = "fa3_fwd_interface"
CHECKED_ROWS = 4


@dataclass(frozen=True, slots=True)
class Quantised:
    """Codes of q, k and v, v also transposed, the descales of all three, and what they stand for."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    values: Fp8Values
    descales: dict[str, Any]
    real: Inputs


@lru_cache(maxsize=2)  # the providers of a shape share them
def quantised(inputs: Inputs, granularity: str) -> Quantised:
    """The inputs of a shape in e4m3; granularity: "head" as FA3 has it, or "block"."""
    heads, heads_k = inputs.q.shape[2], inputs.k.shape[2]
    group = heads // heads_k if granularity == "head" else 1
    q, q_descale = flash_hopper.quantize_fp8(inputs.q, granularity, qhead_per_kvhead=group)
    k, k_descale = flash_hopper.quantize_fp8(inputs.k, granularity)
    v, v_descale = flash_hopper.quantize_fp8(inputs.v, granularity)
    values, _ = flash_hopper.quantize_fp8(inputs.v, granularity, values=True)
    descales: dict[str, Any] = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
    real = {}
    for name, codes in (("q", q), ("k", k), ("v", v)):
        descale, scaled = descales[f"{name}_descale"], Scaled(name, codes.shape[2], codes.shape[1], False, name == "q")
        places = descale_places(describe("descale", descale), scaled, codes.shape[0], heads_k)
        decoded = decode(codes, descale, places, heads_k)
        real[name] = decoded.codes * decoded.factors
    return Quantised(q, k, v, values, descales, replace(inputs, **real, rounds_weights=True))


def ours(shape: BenchShape, inputs: Inputs) -> Prepared:
    """Descales of sequences and key heads, V transposed."""
    given = quantised(inputs, "head")
    return _call(shape, given, given.values)


def ours_block(shape: BenchShape, inputs: Inputs) -> Prepared:
    """Descales of blocks of rows."""
    given = quantised(inputs, "block")
    return _call(shape, given, given.values)


def ours_rows(shape: BenchShape, inputs: Inputs) -> Prepared:
    """V in rows, which a launch in front of attention transposes."""
    given = quantised(inputs, "head")
    return _call(shape, given, given.v)


def ours_fast(shape: BenchShape, inputs: Inputs) -> Prepared:
    """Sums of PV in the tensor core."""
    given = quantised(inputs, "head")
    return _call(shape, given, given.values, fast_accum=True)


def _call(shape: BenchShape, given: Quantised, v: Any, **options: Any) -> Prepared:
    q, k, options = given.q, given.k, {"causal": shape.causal} | given.descales | options
    return Prepared(lambda: flash_hopper.flash_attn_func(q, k, v, **options), compared_with=given.real)


def fa3(shape: BenchShape, inputs: Inputs) -> Prepared:
    """FA3's C++ kernel, with a descale for each sequence and key head."""
    function = function_of(FA3, "flash_attn_func")
    given = quantised(inputs, "head")
    options: dict[str, Any] = {"softmax_scale": shape.problem.softmax_scale, "causal": shape.causal} | given.descales
    unknown = set(options) - set(inspect.signature(function).parameters)
    if unknown:
        raise ProviderAbsent(f"{FA3}.flash_attn_func does not take {', '.join(sorted(unknown))}")
    return Prepared(lambda: function(given.q, given.k, given.v, **options), compared_with=given.real)


@lru_cache(maxsize=2)
def angles(rows: int, dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of a rotary embedding, (rows, dim / 2), bf16."""
    steps = torch.arange(dim // 2, device=device, dtype=torch.float64) / (dim // 2)
    turned = torch.arange(rows, device=device, dtype=torch.float64)[:, None] / 10_000.0**steps
    return turned.cos().bfloat16(), turned.sin().bfloat16()


def quantise(shape: BenchShape, inputs: Inputs) -> Prepared:
    """Block scales and Hadamard transform of q."""
    return Prepared(lambda: flash_hopper.quantize_fp8(inputs.q, "block", hadamard=True))


def quantise_turned(shape: BenchShape, inputs: Inputs) -> Prepared:
    """The same behind a rotary embedding."""
    cos, sin = angles(shape.seqlen_q, shape.d, inputs.q.device)
    options: dict[str, Any] = {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": False}
    return Prepared(lambda: flash_hopper.quantize_fp8(inputs.q, "block", hadamard=True, **options))


def quantise_values(shape: BenchShape, inputs: Inputs) -> Prepared:
    """Block scales of a v, which comes out transposed."""
    return Prepared(lambda: flash_hopper.quantize_fp8(inputs.q, "block", values=True))


def copy(shape: BenchShape, inputs: Inputs) -> Prepared:
    """A copy on the device that moves as many bytes."""
    source = torch.zeros(shape.bytes_moved // 2, dtype=torch.uint8, device=inputs.q.device)
    target = torch.empty_like(source)
    return Prepared(lambda: target.copy_(source))


QUANTISE: dict[str, Callable[[BenchShape, Inputs], Prepared]] = {
    "ours": quantise, "ours-rotary": quantise_turned, "ours-values": quantise_values, "copy": copy
}  # fmt: skip


def check_quantised(name: str, result: Any, shape: BenchShape, inputs: Inputs) -> str | None:
    """What is wrong with the codes and scales of a quantisation, looked at in some rows of two heads; None if nothing."""
    if name == "copy":
        return None
    codes, descale = result
    places = torch.linspace(0, shape.seqlen_q - 1, CHECKED_ROWS).round().long().tolist()
    scaled = Scaled("x", shape.heads, shape.seqlen_q, False, True)
    decoded = decode(
        codes, descale, descale_places(describe("descale", descale), scaled, shape.batch, shape.heads), shape.heads
    )
    for entry, head in ((0, 0), (shape.batch - 1, shape.heads - 1)):
        got = decoded.real[entry, places, head]
        want = _transformed(name, shape, inputs.q[entry, places, head].double(), places)
        allowed = (
            want.abs() / 16 + decoded.factors[entry, places, head].double() / 512 + 2.0**-6 * (name == "ours-rotary")
        )
        excess = (got - want).abs() - allowed
        if not bool((excess <= 0).all()):
            at = int(torch.nan_to_num(excess, nan=torch.inf).argmax())
            return f"a code of head {head} stands for {float(got.flatten()[at]):.6g}, float64 gives {float(want.flatten()[at]):.6g}"
    return None


def _transformed(name: str, shape: BenchShape, x: torch.Tensor, places: list[int]) -> torch.Tensor:
    """Rows (rows, dim) as the provider quantises them, in float64."""
    if name == "ours-values":
        return x
    if name == "ours-rotary":
        cos, sin = (t[places].double() for t in angles(shape.seqlen_q, shape.d, x.device))
        low, high = x.chunk(2, dim=-1)
        x = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    x = x * flash_hopper.hadamard_signs(shape.d, device=x.device).double()
    size = shape.d & -shape.d
    index = torch.arange(size, device=x.device)
    bits = index[:, None] & index
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    block = (1.0 - 2.0 * (bits & 1)).double() / size**0.5
    transformed: torch.Tensor = (x.unflatten(-1, (-1, size)) @ block).flatten(-2)
    return transformed
