"""The two torch operators, `flash_hopper::forward` and `flash_hopper::backward`: what a graph holds instead of Python.

    forward(q, k, v, softmax_scale=None, causal=False, pack_gqa=None, deterministic=False, sm_margin=0, window_left=None,
        window_right=None, attention_chunk=0, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None) -> (out, lse)
    backward(dout, dlse, q, k, v, out, lse, ..the same.., needs_dq=True, needs_dkdv=True) -> (dq, dk, dv)

Each has one implementation for tensors with data (CUDA: the kernels, CPU: the reference) and one for shapes only (fake and
meta tensors), which makes the same checks. `autograd.py` gives them their gradients and decides which calls come this way:
those that torch.compile, torch.export, a dispatch mode or a tensor subclass must see. A batch is ragged if one of the four
length tensors is there. Results are fresh, contiguous tensors. Gradients that are not asked for come back with no elements,
since an operator returns a fixed number of tensors.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import torch

from flash_hopper.kernels.forward import support
from flash_hopper.launch.attention import gradients, prepared_call
from flash_hopper.launch.sequences import HINTS, TENSORS, Sequences, described_problem
from flash_hopper.launch.tensors import check_results, lse_dtype, result_shapes
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem
from flash_hopper.problem.errors import ArgumentError, DeviceError, UnsupportedError
from flash_hopper.problem.features import Feature, check_supported
from flash_hopper.reference import tiled

FORWARD, BACKWARD = "flash_hopper::forward", "flash_hopper::backward"

FLAGS = (
    "softmax_scale",
    "causal",
    "pack_gqa",
    "deterministic",
    "sm_margin",
    "window_left",
    "window_right",
    "attention_chunk",
)
ARGUMENTS = (*FLAGS, *TENSORS, *HINTS)
_DEFAULTS = (None, False, None, False, 0, None, None, 0, *(None,) * len(TENSORS + HINTS))
_ARGUMENTS_SCHEMA = (
    "float? softmax_scale=None, bool causal=False, bool? pack_gqa=None, bool deterministic=False, int sm_margin=0, "
    "int? window_left=None, int? window_right=None, int attention_chunk=0, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, Tensor? seqused_k=None, SymInt? max_seqlen_q=None, "
    "SymInt? max_seqlen_k=None"
)
NO_SEQUENCES = Sequences(None, None, None, None, None, None)

InputGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

library = torch.library.Library("flash_hopper", "FRAGMENT")
library.define(f"forward(Tensor q, Tensor k, Tensor v, {_ARGUMENTS_SCHEMA}) -> (Tensor out, Tensor lse)")
library.define(
    f"backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_ARGUMENTS_SCHEMA}, "
    "bool needs_dq=True, bool needs_dkdv=True) -> (Tensor dq, Tensor dk, Tensor dv)"
)


def check_expressed(options: AttentionOptions) -> None:
    """Raise UnsupportedError if the options ask for more than the operators' flags can say.

    torch.compile traces this, with numbers that may be symbolic: hence nothing but comparisons.
    """
    asked = [
        (Feature.SOFTCAP, options.softcap != 0),
        (Feature.SINKS, options.sinks is not None),
        (Feature.SCORE_MOD, options.score_mod is not None),
        (Feature.MASK_MOD, options.mask_mod is not None),
        (Feature.AUX_TENSORS, options.aux_tensors is not None),
        (Feature.BLOCK_MASK, options.block_mask is not None),
        (Feature.DESCALE, not (options.q_descale is options.k_descale is options.v_descale is None)),
        (Feature.SPLIT_KV, options.num_splits > 1),
        (Feature.BATCH_INVARIANT, options.batch_invariant),
        (Feature.FAST_ACCUM, options.fast_accum),
    ]
    missing = [feature.value for feature, is_asked in asked if is_asked]
    if missing:
        raise UnsupportedError(f"the operator {FORWARD} does not support: {'; '.join(missing)}")


def check_ragged(sequences: Sequences) -> None:
    """Raise ArgumentError for a bundle without lengths, which the operators would take for a dense batch."""
    if not sequences.present:
        raise ArgumentError(
            f"one of {', '.join(TENSORS)} must be given; call flash_attn_func for a batch without lengths"
        )


def flags_of(options: AttentionOptions) -> tuple[Any, ...]:
    """Options that `check_expressed` let pass, as an operator's flags. torch.compile traces this."""
    left, right = options.window_size
    return (
        options.softmax_scale,
        options.causal,
        options.pack_gqa,
        options.deterministic,
        options.sm_margin,
        left,
        right,
        options.attention_chunk,
    )


def options_of(*flags: Any) -> AttentionOptions:
    """The options that all of an operator's flags stand for. LSE is always returned."""
    *others, left, right, chunk = flags
    named = dict(zip(FLAGS, others, strict=False))
    return AttentionOptions(**named, window_size=(left, right), attention_chunk=chunk, return_lse=True)


def split_arguments(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """(flags, length tensors, hints) of an operator's call, where trailing defaults may be absent."""
    whole = (*arguments, *_DEFAULTS[len(arguments) :])
    tensors = len(FLAGS) + len(TENSORS)
    return whole[: len(FLAGS)], whole[len(FLAGS) : tensors], whole[tensors : len(ARGUMENTS)]


def read_arguments(arguments: Sequence[Any]) -> tuple[AttentionOptions, Sequences | None]:
    """The options and, for a ragged batch, the bundle that an operator's arguments stand for."""
    flags, tensors, hints = split_arguments(arguments)
    return options_of(*flags), _sequences(tensors, hints)


def _sequences(tensors: tuple[Any, ...], hints: tuple[Any, ...]) -> Sequences | None:
    if all(tensor is None for tensor in tensors):
        return None
    return Sequences(*tensors, *hints)


@lru_cache(maxsize=1024)
def _option_values(*flags: Any) -> tuple[Any, ...]:
    """Flags as the tuple of values by which calls are prepared."""
    options = options_of(*flags)
    return tuple(getattr(options, field.name) for field in fields(AttentionOptions))


def checked_problem(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, sequences: Sequences | None
) -> AttentionProblem:
    """The problem of tensors that may have no data and symbolic sizes; raises what the forward with data would raise.

    Its scale is 1 and it has no hints: the default would need the value of head_dim, the hints their own, and a wrong one
    is found with the data.
    """
    kind = q.device.type
    if kind not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {q.device}")
    dtypes = support.DTYPES if kind == "cuda" else tiled.DTYPES
    unscaled = replace(options, softmax_scale=1.0)
    problem = described_problem(q, k, v, unscaled, None, sequences, dtypes=dtypes, has_hints=False)
    forward = problem.features - {Feature.GRADIENT}
    if kind == "cuda":
        check_supported(forward, support.SUPPORTED, "the forward kernel")
    else:
        check_supported(forward, tiled.SUPPORTED, "the CPU reference")
    return problem


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    flags, tensors, hints = split_arguments(arguments)
    sequences = _sequences(tensors, hints)
    out, lse = prepared_call(q, k, v, None, _option_values(*flags), sequences).run(q, k, v, None, sequences)
    assert lse is not None, "prepared with return_lse"
    return out, lse


def _forward_of_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out_shape, lse_shape = result_shapes(checked_problem(q, k, v, *read_arguments(arguments)))
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


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
    arguments, needs_dq, needs_dkdv = _arguments_and_needs(rest)
    flags, tensors, hints = split_arguments(arguments)
    sequences = _sequences(tensors, hints)
    problem = prepared_call(q, k, v, None, _option_values(*flags), sequences).problem
    check_results(problem, dout, dlse, q, out, lse)
    found = gradients(q, k, v, out, lse, dout, dlse, problem, needs_dq, needs_dkdv, sequences)
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
    arguments, needs_dq, needs_dkdv = _arguments_and_needs(rest)
    problem = checked_problem(q, k, v, *read_arguments(arguments))
    check_results(problem, dout, dlse, q, out, lse)
    return (
        q.new_empty(q.shape if needs_dq else 0),
        q.new_empty(k.shape if needs_dkdv else 0),
        q.new_empty(v.shape if needs_dkdv else 0),
    )


def _arguments_and_needs(rest: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool, bool]:
    """An operator is called without trailing arguments that have their default value."""
    needs = (*rest[len(ARGUMENTS) :], True, True)
    return rest[: len(ARGUMENTS)], needs[0], needs[1]


for _device in ("CPU", "CUDA"):
    library.impl("forward", _forward, _device)
    library.impl("backward", _backward, _device)
torch.library.register_fake(FORWARD, _forward_of_shapes, lib=library)
torch.library.register_fake(BACKWARD, _backward_of_shapes, lib=library)
