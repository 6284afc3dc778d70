"""Dispatch of a dense attention call by device, with one look-up for a signature seen before.

The public functions call `attention`. On a GPU a call is prepared once per signature (shapes, strides, dtypes, options)
and found in a dictionary afterwards; on the CPU the reference computes it. Nothing falls back from one to the other.
"""

from typing import Any

import torch

from flash_hopper.launch.forward import PreparedForward, Result, prepare
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.attention import AttentionOptions, attention_problem
from flash_hopper.problem.errors import ArgumentError, DeviceError
from flash_hopper.problem.features import Feature, check_supported
from flash_hopper.reference import tiled

# Signatures kept; a server that meets ever new lengths starts over instead of growing without bound.
MAX_SIGNATURES = 8192

_prepared: dict[tuple[Any, ...], PreparedForward] = {}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> Result:
    """(out, lse or None) of a dense call; on the GPU not differentiable (`autograd.py` is).

    `options` holds the fields of `AttentionOptions` in order. Raises every error of `problem`; see `prepare`.
    """
    if not isinstance(q, torch.Tensor) or not q.is_cuda:
        return _on_cpu(q, k, v, out, AttentionOptions(*options))
    return prepared_call(q, k, v, out, options).run(q, k, v, out)


def prepared_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> PreparedForward:
    """The prepared form of a call on a GPU, found by its signature or made now."""
    if not (type(k) is type(v) is torch.Tensor and type(options[_WINDOW]) is tuple):
        return prepare(q, k, v, AttentionOptions(*options), out)
    signature = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, options,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
    )  # fmt: skip
    prepared = _prepared.get(signature)
    if prepared is None:
        prepared = prepare(q, k, v, AttentionOptions(*options), out)
        _remember(signature, options, prepared)
    return prepared


_WINDOW = list(AttentionOptions.__dataclass_fields__).index("window_size")


def _remember(signature: tuple[Any, ...], options: tuple[Any, ...], prepared: PreparedForward) -> None:
    """Keep a prepared call, unless an option is an object that is not compared by value."""
    if all(value is None or isinstance(value, int | float | tuple) for value in options):
        if len(_prepared) >= MAX_SIGNATURES:
            _prepared.clear()
        _prepared[signature] = prepared


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: AttentionOptions
) -> Result:
    """The reference, for tensors in host memory."""
    problem = attention_problem(
        describe("q", q),
        describe("k", k),
        describe("v", v),
        options,
        dtypes=tiled.DTYPES,
        out=None if out is None else describe("out", out),
    )
    if q.device.type != "cpu":
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {q.device}")
    check_supported(problem.features, tiled.SUPPORTED, "the CPU reference")
    if out is not None and Feature.GRADIENT in problem.features:
        raise ArgumentError("out= cannot be combined with inputs that require grad: drop out= or use torch.no_grad()")
    result, lse = tiled.attention(q, k, v, softmax_scale=problem.softmax_scale, causal=problem.causal)
    if out is not None:
        result = out.copy_(result)
    return result, lse if options.return_lse else None
