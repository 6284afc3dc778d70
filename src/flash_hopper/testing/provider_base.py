"""What every provider of `bench` gets and gives: inputs of a shape, and a call to time.

`providers.py` and `fa3_backward.py` make providers, `bench_check.py` compares their results.
"""

import importlib
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.inputs import TORCH_DTYPES
from flash_hopper.testing.timing import Call


class ProviderAbsent(Exception):
    """A provider that cannot take part; the message is the reason that the row shows."""


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """q, k, v (batch, seqlen, heads, head_dim) of one shape, out for providers that write into one, and the gradient of
    out for the backward. Packed tensors have rows in place of batch and seqlen, and `cu_seqlens` (batch + 1,) int32, the
    same for queries and keys. `rounds_weights`: they are float32, stand for e4m3 codes, and what computes with those rounds
    weights to e4m3. Two objects are never equal: they are compared by identity."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    dout: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    rounds_weights: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call to time. `scope` is the context that it needs; entering it costs host time, so `host` enters it once.

    `seqlen_dim` is 2 if its out is (batch, heads, seqlen, head_dim) instead of (batch, seqlen, heads, head_dim).
    `compared_with`: inputs of which the result must be the attention, if they are not those of the shape.
    """

    call: Call
    scope: Callable[[], AbstractContextManager[object]] = nullcontext
    seqlen_dim: int = 1
    compared_with: Inputs | None = None

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
    """Standard normal q, k, v and dout, the same for every provider; bf16 for a shape of e4m3, which is quantised from there."""
    generator = torch.Generator(device=device).manual_seed(seed)
    dtype = torch.bfloat16 if shape.is_fp8 else TORCH_DTYPES[shape.dtype]

    def normal(name: str, heads: int, dim: int) -> torch.Tensor:
        return torch.randn(*shape.rows(name), heads, dim, generator=generator, device=device, dtype=dtype)

    q = normal("q", shape.heads, shape.d)
    k, v = normal("k", shape.heads_k, shape.d), normal("v", shape.heads_k, shape.dv)
    dout = normal("q", shape.heads, shape.dv)
    cu_seqlens = None
    if shape.is_ragged:
        ends = list(itertools.accumulate((length for length, _ in shape.sequences), initial=0))
        cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=device)
    return Inputs(q, k, v, torch.empty_like(dout), dout, cu_seqlens)


def function_of(module: str, name: str) -> Callable[..., object]:
    """A function of a module that may be missing. Raises ProviderAbsent with the reason."""
    if find_spec(module.split(".")[0]) is None:
        raise ProviderAbsent(f"{module} is not installed")
    try:
        function: Callable[..., object] = getattr(importlib.import_module(module), name)
    except (ImportError, OSError, AttributeError) as failure:
        raise ProviderAbsent(f"{module}.{name} cannot be imported: {first_line(failure)}") from failure
    return function


def first_line(error: BaseException) -> str:
    """Type and first line of an error, short enough for a row."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
