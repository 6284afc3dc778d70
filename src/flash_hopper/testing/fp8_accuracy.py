"""How far e4m3 attention is from exact attention: the suite `bench --suite fp8-accuracy`.

Two experiments, against float64 attention of the values before they were quantised:

  outliers  q, k, v ~ N(0, 1), plus N(0, 100) at a rate of 1e-3 (the FlashAttention-3 paper, section 4.3): root of the mean square
            error, by form of scales and with and without the Hadamard transform, beside 16-bit attention. All rows of 16k tokens of
            hidden size 2048, as in the paper's measurements: few rows have most of the error, and two heads of some hundred rows
            differ by half. What is quantised comes in float16
  length    q, k ~ N(0, 1), v = |N(0, 1)| + 0.5, by number of keys: norm of the error over norm of out, and the mean of the relative
            error, which shows values that are lost. v is quantised first, so that it is the attention alone that errs

Rows are data; `cli/bench.py` shows, stores and draws them, `plots.plot_accuracy` makes the figure. Any device: tests run small ones
on the CPU.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import flash_hopper
from flash_hopper.compile.key import Plan
from flash_hopper.launch.quantize import plans_of as quantize_plans
from flash_hopper.plan.forward import plan_forward
from flash_hopper.plan.forward_fp8 import plan_forward_fp8
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.quantize import Granularity
from flash_hopper.reference import naive
from flash_hopper.testing.bench_plans import quantize_problem_of
from flash_hopper.testing.bench_suites import BenchShape, length_label
from flash_hopper.testing.fp8_providers import FA3
from flash_hopper.testing.provider_base import ProviderAbsent, first_line, function_of

SUITE = "fp8-accuracy"
EXPERIMENTS = ("outliers", "length")
_NAMES = {"ours": "flash-hopper", "fa3": "FA3 C++"}
OUTLIER_RATE, OUTLIER_SIZE = 1e-3, 10.0
OUTLIER_SEQLENS = (1024, 4096, 8192, 16_384)
OUTLIER_DIMS = (64, 128, 256)
TOKENS, HIDDEN = 16_384, 2048  # batch times length and heads times head dim, of the outliers
LENGTHS = tuple(1024 << i for i in range(8))  # to 128k
ROWS = 256  # queries, where the number of keys is what changes

# Label, granularity and Hadamard transform of the e4m3 rows
SCALES: tuple[tuple[str, Granularity, bool], ...] = (
    ("a scale a tensor", "tensor", False),
    ("a scale a head", "head", False),
    ("block scales", "block", False),
    ("a scale a tensor + Hadamard", "tensor", True),
    ("block scales + Hadamard", "block", True),
)


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """One measured error. `provider`: ours or fa3; `form`: of scales, or the dtype of 16-bit attention. `rmse`: root of the mean
    square error; `relative`: norm of the error over that of out; `bias`: mean of error over out (length only). `error`: why there
    are none."""

    experiment: str
    provider: str
    form: str
    d: int
    seqlen_k: int
    rmse: float | None = None
    relative: float | None = None
    bias: float | None = None
    error: str | None = None


def outlier_rows(
    d: int, seqlen: int, device: str, batch: int | None = None, heads: int | None = None
) -> Iterator[AccuracyRow]:
    """The table of the paper for one head dim and length. batch, heads: by default as many as `TOKENS` and `HIDDEN` have."""
    shape = (batch or TOKENS // seqlen, seqlen, heads or HIDDEN // d, d)
    q, k, v = (with_outliers(shape, seed, device) for seed in range(3))
    want, _ = naive.attention(q, k, v, softmax_scale=d**-0.5)
    for dtype in (torch.bfloat16, torch.float16):
        out = flash_hopper.flash_attn_func(q.to(dtype), k.to(dtype), v.to(dtype))
        yield _row("outliers", "ours", str(dtype).removeprefix("torch."), d, seqlen, out, want)
    for label, granularity, hadamard in SCALES:
        given = [x.half() for x in (q, k, v)]
        (q8, q_descale), (k8, k_descale) = (
            flash_hopper.quantize_fp8(x, granularity, hadamard=hadamard) for x in given[:2]
        )
        values, v_descale = flash_hopper.quantize_fp8(given[2], granularity, values=True)
        options = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        out = flash_hopper.flash_attn_func(q8, k8, values, **options)  # type: ignore[arg-type]
        yield _row("outliers", "ours", label, d, seqlen, out, want)
        if granularity == "head" and not hadamard:
            v8, _ = flash_hopper.quantize_fp8(given[2], granularity)
            yield _of_fa3("outliers", label, (q8, k8, v8), options, want)


def length_rows(d: int, seqlen_k: int, device: str, rows: int = ROWS) -> Iterator[AccuracyRow]:
    """Values of one sign, for one head dim and number of keys."""
    generator = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, d, generator=generator, device=device).bfloat16() for n in (rows, seqlen_k, seqlen_k)
    )
    v = v.abs() + 0.5
    codes, factors = {}, {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        codes[name], factors[name] = flash_hopper.quantize_fp8(x, "head")
    values, _ = flash_hopper.quantize_fp8(v, "head", values=True)
    real = [codes[name].double() * factors[name].double().view(1, 1, 1, 1) for name in "qkv"]
    want, _ = naive.attention(real[0], real[1], real[2], softmax_scale=d**-0.5)
    options = {f"{name}_descale": factor for name, factor in factors.items()}
    out = flash_hopper.flash_attn_func(codes["q"], codes["k"], values, **options)  # type: ignore[arg-type]
    yield _row("length", "ours", "a scale a head", d, seqlen_k, out, want)
    yield _of_fa3("length", "a scale a head", (codes["q"], codes["k"], codes["v"]), options, want)


def with_outliers(shape: tuple[int, ...], seed: int, device: str) -> Tensor:
    """N(0, 1) + N(0, 100) at a rate of 1e-3, float32."""
    generator = torch.Generator(device).manual_seed(seed)
    x, y = (torch.randn(shape, generator=generator, device=device) for _ in range(2))
    rare = torch.rand(shape, generator=generator, device=device) < OUTLIER_RATE
    return x + OUTLIER_SIZE * y * rare


def _of_fa3(
    experiment: str, form: str, codes: tuple[Tensor, Tensor, Tensor], descales: dict[str, Any], want: Tensor
) -> AccuracyRow:
    d, seqlen_k = codes[0].shape[3], codes[1].shape[1]
    try:
        out = function_of(FA3, "flash_attn_func")(*codes, softmax_scale=d**-0.5, **descales)
    except ProviderAbsent as absent:
        return AccuracyRow(experiment, "fa3", form, d, seqlen_k, error=f"absent: {absent}")
    except Exception as refusal:  # a peer refuses with any type
        return AccuracyRow(experiment, "fa3", form, d, seqlen_k, error=f"absent: refuses: {first_line(refusal)}")
    return _row(experiment, "fa3", form, d, seqlen_k, out, want)


def _row(experiment: str, provider: str, form: str, d: int, seqlen_k: int, out: Any, want: Tensor) -> AccuracyRow:
    found: Tensor = out[0] if isinstance(out, tuple | list) else out
    error = found.double() - want
    bias = float((error / want).mean()) if experiment == "length" else None
    relative = float(torch.linalg.vector_norm(error) / torch.linalg.vector_norm(want))
    return AccuracyRow(experiment, provider, form, d, seqlen_k, float(error.square().mean().sqrt()), relative, bias)


def measure(
    device: str, dims: Sequence[int] = OUTLIER_DIMS, lengths: Sequence[int] | None = None
) -> Iterator[AccuracyRow]:
    """All rows; `lengths` keeps those of both experiments that it names."""
    for d in dims:
        for seqlen in OUTLIER_SEQLENS:
            if lengths is None or seqlen in lengths:
                yield from outlier_rows(d, seqlen, device)
        for seqlen in LENGTHS:
            if lengths is None or seqlen in lengths:
                yield from length_rows(d, seqlen, device)


def plans_of(dims: Iterable[int] = OUTLIER_DIMS) -> list[Plan]:
    """The kernels that the suite calls."""
    found: list[Plan] = []
    for d in dims:
        for seqlen in OUTLIER_SEQLENS:
            shape = BenchShape(
                SUITE, DType.E4M3, d, d, False, seqlen, seqlen, TOKENS // seqlen, HIDDEN // d, HIDDEN // d
            )
            found += [plan_forward_fp8(shape.problem, DType.BF16, form) for form in ("scalar", "block")]
            found += [plan_forward(replace(shape, dtype=dtype).problem) for dtype in (DType.BF16, DType.FP16)]
        for seqlen_k in LENGTHS:
            shape = BenchShape(SUITE, DType.E4M3, d, d, False, ROWS, seqlen_k, 1, 1, 1)
            found.append(plan_forward_fp8(shape.problem, DType.BF16, "scalar"))
        for granularity in dict.fromkeys(granularity for _, granularity, _ in SCALES):
            for hadamard, values in ((False, False), (True, False), (False, True)):
                problem = quantize_problem_of(d, granularity, hadamard=hadamard, values=values)
                found += quantize_plans(replace(problem, dtype=DType.FP16))
        for values in (False, True):
            found += quantize_plans(quantize_problem_of(d, "head", values=values))
    return list(dict.fromkeys(found))


def render(rows: Sequence[AccuracyRow]) -> str:
    """Markdown tables, one an experiment: root mean square errors with outliers, relative errors by number of keys."""
    found = [row for row in rows if row.error is None]
    outliers, lengths = ([row for row in found if row.experiment == experiment] for experiment in EXPERIMENTS)
    parts = []
    if outliers:
        columns = [
            (d, n) for d in sorted({row.d for row in outliers}) for n in sorted({row.seqlen_k for row in outliers})
        ]
        lines = {
            f"{_NAMES[provider]}, {form}": {
                (r.d, r.seqlen_k): r for r in outliers if (r.provider, r.form) == (provider, form)
            }
            for provider, form in dict.fromkeys((row.provider, row.form) for row in outliers)
        }
        parts.append(_table("RMSE, outliers", {c: f"d {c[0]}, {length_label(c[1])}" for c in columns}, lines))
    if lengths:
        sizes = sorted({row.seqlen_k for row in lengths})
        of_dims = {
            f"{_NAMES[provider]}, d {d}": {r.seqlen_k: r for r in lengths if (r.provider, r.d) == (provider, d)}
            for d in sorted({row.d for row in lengths})
            for provider in dict.fromkeys(row.provider for row in lengths)
        }
        parts.append(_table("relative error, v of one sign", {n: f"{length_label(n)} keys" for n in sizes}, of_dims))
    return "\n".join(parts)


def _table(title: str, columns: dict[Any, str], lines: dict[str, dict[Any, AccuracyRow]]) -> str:
    """Columns and lines by name; each line has rows by column."""
    shown = [f"| {title} | " + " | ".join(columns.values()) + " |", "|---|" + "---:|" * len(columns)]
    for name, cells in lines.items():
        if cells:
            shown.append(f"| {name} | " + " | ".join(_text(cells[c]) if c in cells else "-" for c in columns) + " |")
    return "\n".join(shown) + "\n"


def _text(row: AccuracyRow) -> str:
    return f"{row.rmse:.2e}" if row.experiment == "outliers" else f"{100 * (row.relative or 0.0):.2f} %"


def write_rows(path: Path, env: dict[str, Any], rows: Sequence[AccuracyRow]) -> None:
    """The rows as JSON, with where they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = {"env": env, "rows": [{"suite": SUITE, **asdict(row)} for row in rows]}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(stored, indent=1) + "\n")
    temporary.replace(path)


def read_rows(path: Path) -> tuple[dict[str, Any], list[AccuracyRow]]:
    """What `write_rows` stored."""
    stored = json.loads(path.read_text())
    return stored["env"], [AccuracyRow(**{k: v for k, v in row.items() if k != "suite"}) for row in stored["rows"]]
