"""The two torch operators, `flash_hopper::forward` and `flash_hopper::backward`: what a graph holds instead of Python.

    forward(q, k, v, softmax_scale=None, causal=False, pack_gqa=None, deterministic=False, sm_margin=0) -> (out, lse)
    backward(dout, dlse, q, k, v, out, lse, ..the same.., needs_dq=True, needs_dkdv=True) -> (dq, dk, dv)

Each has one implementation for tensors with data (CUDA: the kernels, CPU: the reference) and one for shapes only (fake and
meta tensors), which makes the same checks. `autograd.py` gives them their gradients and decides which calls come this way:
those that torch.compile, torch.export, a dispatch mode or a tensor subclass must see. Results are fresh, contiguous tensors.
Gradients that are not asked for come back with no elements, since an operator returns a fixed number of tensors.
"""

from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch

from flash_hopper.kernels.forward import support
from flash_hopper.launch.attention import gradients, prepared_call
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError, UnsupportedError
from flash_hopper.problem.features import Feature, check_supported
from flash_hopper.reference import tiled

FORWARD, BACKWARD = "flash_hopper::forward", "flash_hopper::backward"

FLAGS = ("softmax_scale", "causal", "pack_gqa", "deterministic", "sm_margin")
_FLAGS_SCHEMA = (
    "float? softmax_scale=None, bool causal=False, bool? pack_gqa=None, bool deterministic=False, int sm_margin=0"
)

InputGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

library = torch.library.Library("flash_hopper", "FRAGMENT")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_FLAGS_SCHEMA}) -> (Tensor out, Tensor lse)")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_FLAGS_SCHEMA}, "
    "bool needs_dq=True, bool needs_dkdv=True) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def check_expressed(options: AttentionOptions) -> None:
    """Raise UnsupportedError if the options ask for more than the operators' flags can say.

    torch.compile traces this, with numbers that may be symbolic: hence nothing but comparisons.
    """
    left, right = options.window_size
    asked = [
        (Feature.WINDOW, (left is not None and left != -1) or (right is not None and right != -1)),
        (Feature.CHUNK, options.attention_chunk != 0),
        (Feature.SOFTCAP, options.softcap != 0),
        (Feature.SINKS, options.sinks is not None),
        (Feature.SCORE_MOD, options.score_mod is not None),
        (Feature.MASK_MOD, options.mask_mod is not None),
        (Feature.AUX_TENSORS, options.aux_tensors is not None),
        (Feature.BLOCK_MASK, options.block_mask is not None),
        (Feature.DESCALE, not (options.q_descale is options.k_descale is options.v_descale is None)),
        (Feature.SPLIT_KV, options.num_splits > 1),
        (Feature.BATCH_INVARIANT, options.batch_invariant),
    ]
    missing = [feature.value for feature, is_asked in asked if is_asked]
    if missing:
        raise UnsupportedError(f"the operator {FORWARD} does not support: {'; '.join(missing)}")


def options_of(*flags: Any) -> AttentionOptions:
    """The options that an operator's flags stand for; trailing ones may be absent. LSE is always returned."""
    return AttentionOptions(**dict(zip(FLAGS, flags, strict=False)), return_lse=True)


@lru_cache(maxsize=1024)
def _option_values(*flags: Any) -> tuple[Any, ...]:
    """The same as the tuple of values by which calls are prepared."""
    options = options_of(*flags)
    return tuple(getattr(options, field.name) for field in fields(AttentionOptions))


def checked_problem(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions) -> AttentionProblem:
    """The problem of tensors that may have no data and symbolic sizes; raises what the forward with data would raise.

    Its scale is 1: the default would need the value of head_dim, and a wrong one is found with the data.
    """
    kind = q.device.type
    if kind not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {q.device}")
    problem = attention_problem(
        describe("q", q), describe("k", k), describe("v", v), replace(options, softmax_scale=1.0),
        dtypes=support.DTYPES if kind == "cuda" else tiled.DTYPES,
    )  # fmt: skip
    forward = problem.features - {Feature.GRADIENT}
    if kind == "cuda":
        check_supported(forward, support.SUPPORTED, "the forward kernel")
    else:
        check_supported(forward, tiled.SUPPORTED, "the CPU reference")
    return problem


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *flags: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = prepared_call(q, k, v, None, _option_values(*flags)).run(q, k, v, None)
    assert lse is not None, "prepared with return_lse"
    return out, lse


def _forward_of_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *flags: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    p = checked_problem(q, k, v, options_of(*flags))
    out_shape, lse_shape = _result_shapes(p)
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=_lse_dtype(q.dtype))


def _backward(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> InputGradients:
    flags, needs_dq, needs_dkdv = _flags_and_needs(rest)
    problem = prepared_call(q, k, v, None, _option_values(*flags)).problem
    _check_results(problem, dout, dlse, q, out, lse)
    found = gradients(q, k, v, out, lse, dout, dlse, problem, needs_dq, needs_dkdv)
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient.contiguous() for gradient in found)
    return dq, dk, dv


def _backward_of_shapes(
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: Any,
) -> InputGradients:
    flags, needs_dq, needs_dkdv = _flags_and_needs(rest)
    problem = checked_problem(q, k, v, options_of(*flags))
    _check_results(problem, dout, dlse, q, out, lse)
    return (
        q.new_empty(q.shape if needs_dq else 0),
        q.new_empty(k.shape if needs_dkdv else 0),
        q.new_empty(v.shape if needs_dkdv else 0),
    )


def _flags_and_needs(rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
    """An operator is called without trailing arguments that have their default value."""
    needs = (*rest[len(FLAGS) :], True, True)
    return rest[: len(FLAGS)], needs[0], needs[1]


def _result_shapes(p: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (p.batch, p.seqlen_q, p.heads, p.head_dim_v), (p.batch, p.heads, p.seqlen_q)


def _lse_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_results(
    problem: AttentionProblem,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Raise unless out, lse and their gradients are what the forward returns, and gradients of it."""
    out_shape, lse_shape = _result_shapes(problem)
    for name, tensor, shape, dtype in (
        ("out", out, out_shape, q.dtype),
        ("dout", dout, out_shape, q.dtype),
        ("lse", lse, lse_shape, _lse_dtype(q.dtype)),
        ("dlse", dlse, lse_shape, _lse_dtype(q.dtype)),
    ):
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ArgumentError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
        if tensor.dtype != dtype:
            raise DTypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise DeviceError(f"{name} must be on {q.device} like q, got {tensor.device}")


for _device in ("CPU", "CUDA"):
    library.impl("forward", _forward, _device)
    library.impl("backward", _backward, _device)
torch.library.register_fake(FORWARD, _forward_of_shapes, lib=library)
torch.library.register_fake(BACKWARD, _backward_of_shapes, lib=library)
