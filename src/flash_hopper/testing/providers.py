"""Who computes the attention that `bench` times: ours and the peers that are installed.

`prepare` returns a call whose result was checked, or raises `ProviderAbsent` with the reason: a provider that is not
installed or refuses a shape is shown as absent, one that is wrong is shown as wrong. Views and keyword arguments
are made here, outside of the timed region.
"""

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_hopper
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.inputs import TORCH_DTYPES
from flash_hopper.testing.timing import Call

CHECKED_ROWS = 8  # query rows of each checked (batch, head), spread over the sequence


class ProviderAbsent(Exception):
    """A provider that cannot take part; the message is the reason that the row shows."""


class WrongResult(Exception):
    """A provider whose output is further from float64 than its dtype allows."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """q, k, v (batch, seqlen, heads, head_dim) of one shape, and out for providers that write into one."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call to time. `scope` is the context that it needs; entering it costs host time, so `host` enters it once."""

    call: Call
    scope: Callable[[], AbstractContextManager[object]] = nullcontext

    def scoped(self) -> Call:
        """The call as it can be interleaved with others: entering its scope each time."""
        if self.scope is nullcontext:
            return self.call

        def call() -> object:
            with self.scope():
                return self.call()

        return call


Maker = Callable[[BenchShape, Inputs], Prepared]


def make_inputs(shape: BenchShape, device: torch.device | str, seed: int = 0) -> Inputs:
    """Standard normal q, k, v, the same for every provider."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = TORCH_DTYPES[shape.dtype]

    def normal(seqlen: int, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(shape.batch, seqlen, heads, dim, generator=generator, device=device, dtype=dtype)

    return Inputs(
        normal(shape.seqlen_q, shape.heads, shape.d),
        normal(shape.seqlen_k, shape.heads_k, shape.d),
        normal(shape.seqlen_k, shape.heads_k, shape.dv),
        torch.empty(shape.batch, shape.seqlen_q, shape.heads, shape.dv, device=device, dtype=dtype),
    )


def prepare(name: str, shape: BenchShape, inputs: Inputs) -> Prepared:
    """The provider's call, run once and checked. Raises ProviderAbsent or WrongResult."""
    if name not in PROVIDERS:
        raise ProviderAbsent(f"unknown provider; there is {', '.join(PROVIDERS)}")
    prepared = PROVIDERS[name](shape, inputs)
    try:
        result = prepared.scoped()()
    except Exception as refusal:  # peers refuse with any type; the reason is shown in the row
        raise ProviderAbsent(f"refuses this shape: {_first_line(refusal)}") from refusal
    check_result(result, shape, inputs, seqlen_dim=2 if name.startswith("sdpa") else 1)
    return prepared


def check_result(result: object, shape: BenchShape, inputs: Inputs, *, seqlen_dim: int = 1) -> None:
    """Compare some rows of a result with float64, element by element; raise WrongResult with the worst.

    `result` is out, or a tuple that begins with it; `seqlen_dim` is 2 for (batch, heads, seqlen, head_dim). The
    allowance is what rounding P and out to the dtype can cost, doubled: 2 eps sum_j p_j |v_j| + 1e-5.
    """
    out = result[0] if isinstance(result, tuple | list) else result
    if not isinstance(out, torch.Tensor):
        raise WrongResult(f"returned {type(out).__name__} instead of a tensor")
    out = out.transpose(1, 2) if seqlen_dim == 2 else out
    want_shape = (shape.batch, shape.seqlen_q, shape.heads, shape.dv)
    if tuple(out.shape) != want_shape:
        raise WrongResult(f"returned shape {tuple(out.shape)} instead of {want_shape}")
    rows = torch.linspace(0, shape.seqlen_q - 1, CHECKED_ROWS).round().long().unique().tolist()
    for batch, head in {(0, 0), (shape.batch - 1, shape.heads - 1)}:
        want, allowed = _exact_rows(shape, inputs, batch, head, rows)
        got = out[batch, rows, head].double()
        excess = (got - want).abs() - allowed
        if not bool((excess <= 0).all()):  # also catches NaN
            at = int(torch.nan_to_num(excess, nan=torch.inf).argmax())
            row, column = divmod(at, shape.dv)
            raise WrongResult(
                f"out[{batch}, {rows[row]}, {head}, {column}] is {float(got[row, column]):.6g}, float64 gives "
                f"{float(want[row, column]):.6g}, allowed {float(allowed[row, column]):.2g}"
            )


def _exact_rows(
    shape: BenchShape, inputs: Inputs, batch: int, head: int, rows: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention of some rows of one head, and the allowance of each element."""
    head_k = head // (shape.heads // shape.heads_k)
    q = inputs.q[batch, rows, head].double()
    k, v = inputs.k[batch, :, head_k].double(), inputs.v[batch, :, head_k].double()
    scores = q @ k.T * shape.problem.softmax_scale
    if shape.causal:
        last_key = torch.tensor(rows, device=q.device)[:, None] + shape.seqlen_k - shape.seqlen_q
        scores = scores.masked_fill(torch.arange(shape.seqlen_k, device=q.device) > last_key, -torch.inf)
    p = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return p @ v, 2 * torch.finfo(inputs.v.dtype).eps * (p @ v.abs()) + 1e-5


def _ours(shape: BenchShape, inputs: Inputs) -> Prepared:
    return Prepared(lambda: flash_hopper.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=shape.causal))


def _ours_out(shape: BenchShape, inputs: Inputs) -> Prepared:
    return Prepared(
        lambda: flash_hopper.flash_attn_func(inputs.q, inputs.k, inputs.v, causal=shape.causal, out=inputs.out)
    )


def _sdpa(backend: SDPBackend) -> Maker:
    def make(shape: BenchShape, inputs: Inputs) -> Prepared:
        if shape.causal and shape.seqlen_q != shape.seqlen_k:
            raise ProviderAbsent("is_causal is aligned top-left there, which differs for unequal lengths")
        q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        gqa = shape.heads != shape.heads_k
        return Prepared(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa),
            lambda: sdpa_kernel(backend),
        )

    return make


def flash_attn_like(module: str) -> Maker:
    """A module with FlashAttention's `flash_attn_func(q, k, v, softmax_scale, causal)`."""

    def make(shape: BenchShape, inputs: Inputs) -> Prepared:
        function = _function_of(module, "flash_attn_func")
        options: dict[str, Any] = {"softmax_scale": shape.problem.softmax_scale, "causal": shape.causal}
        unknown = set(options) - set(inspect.signature(function).parameters)
        if unknown:
            raise ProviderAbsent(f"{module}.flash_attn_func does not take {', '.join(sorted(unknown))}")
        return Prepared(lambda: function(inputs.q, inputs.k, inputs.v, **options))

    return make


def _function_of(module: str, name: str) -> Callable[..., object]:
    if find_spec(module.split(".")[0]) is None:
        raise ProviderAbsent(f"{module} is not installed")
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as failure:
        raise ProviderAbsent(f"{module}.{name} cannot be imported: {_first_line(failure)}") from failure
    return function


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


PROVIDERS: dict[str, Maker] = {
    "ours": _ours,
    "ours-out": _ours_out,
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": flash_attn_like("fa3_fwd_interface"),
    "fa4": flash_attn_like("flash_attn.cute"),
}
OURS = ("ours", "ours-out")
