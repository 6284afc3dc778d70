"""Gradients of attention, and which way a call takes: straight to the launcher, or through a torch operator.

An eager call on ordinary tensors goes to the launcher, as one autograd node if an input requires grad. A call that
somebody must see as an operator (torch.compile, torch.export, fake and meta tensors, dispatch modes such as that of selective
checkpointing, tensor subclasses) goes through `flash_hopper::forward`, whose gradient is
`flash_hopper::backward`. Both ways save q, k, v, out, LSE and the tensors that make a batch ragged, and run the same kernels;
the backward recomputes the rest (specification chapter 7). LSE is differentiable; a second derivative is refused. Jagged
tensors go either way as their values and offsets.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling

from flash_hopper.launch import ops
from flash_hopper.launch.attention import Prepared, check_differentiable, gradients, prepare_call, seen_call
from flash_hopper.launch.backward import Gradients
from flash_hopper.launch.forward import Result
from flash_hopper.launch.fp8 import fp8_attention, is_fp8
from flash_hopper.launch.jagged import JaggedCall, is_jagged
from flash_hopper.launch.route import (
    as_plain,
    check_tensors,
    dispatch_modes,
    must_be_seen,
    refuse_transforms,
    transform,
)
from flash_hopper.launch.sequences import TENSORS, Sequences
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, requested_features
from flash_hopper.problem.errors import ArgumentError, UnsupportedError
from flash_hopper.problem.features import Feature

assert list(AttentionOptions.__dataclass_fields__)[-1] == "return_lse", "calls set it as the last of the options"


def differentiable_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None = None,
) -> Result:
    """(out, lse or None) of a call; differentiable in q, k and v if one of them requires grad.

    `options` holds the fields of `AttentionOptions` in order. A call that the backward could not follow is refused here.
    """
    if is_fp8(q):
        return fp8_attention(q, k, v, out, options, sequences)
    if (
        is_dynamo_compiling()
        or not (type(q) is type(k) is type(v) is Tensor and (out is None or type(out) is Tensor))
        or not (sequences is None or sequences.are_plain)
        or dispatch_modes()
        or transform() is not None
    ):
        return _out_of_the_ordinary(q, k, v, out, options, sequences)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    asked = options
    if needs_grad:
        _refuse_out(out)
        options = (*options[:-1], True)  # the last one is return_lse: the backward needs it
    prepared = seen_call(q, k, v, out, options, sequences)
    if prepared is None:
        if q.is_meta:
            return _as_operator(q, k, v, out, asked, sequences)
        q, k, v = _autocast(q, k, v)
        prepared = prepare_call(q, k, v, out, options, sequences)
    if not needs_grad:
        return prepared.run(q, k, v, out, sequences)
    check_differentiable(prepared.problem, q.device)
    result, lse = _Attention.apply(q, k, v, prepared, sequences)  # type: ignore[no-untyped-call]
    return result, lse if asked[-1] else None


def _out_of_the_ordinary(
    q: Any, k: Any, v: Any, out: Any, options: tuple[Any, ...], sequences: Sequences | None
) -> Result:
    """A call that is traced, or whose arguments are not plain tensors; raises DTypeError if one is no tensor at all."""
    if is_jagged(q, k, v, out):
        jagged = JaggedCall(q, k, v, out, sequences)
        result, lse = differentiable_attention(*jagged.tensors, options, jagged.sequences)
        return jagged.wrapped(result), lse
    if is_dynamo_compiling():
        return _as_operator(q, k, v, out, options, sequences)
    given = {"q": q, "k": k, "v": v} if out is None else {"q": q, "k": k, "v": v, "out": out}
    if sequences is not None:
        given |= sequences.present
    check_tensors(given)
    if must_be_seen(given.values()):
        return _as_operator(q, k, v, out, options, sequences)
    plain = as_plain(given)
    if sequences is not None:
        sequences = sequences.replaced_by(plain)
    result, lse = differentiable_attention(plain["q"], plain["k"], plain["v"], plain.get("out"), options, sequences)
    return result if out is None else out, lse


def _as_operator(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, options: tuple[Any, ...], sequences: Sequences | None
) -> Result:
    """The call as `flash_hopper::forward`, which checks the tensors, with data or without."""
    asked = AttentionOptions(*options)
    if not is_dynamo_compiling():
        requested_features(asked)  # each option's type and range
        refuse_transforms()
    ops.check_expressed(asked)
    if sequences is not None:
        ops.check_ragged(sequences)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        _refuse_out(out)
    q, k, v = _autocast(q, k, v)
    if not is_dynamo_compiling():
        ops.checked_problem(q, k, v, asked, sequences)
    arguments = (*ops.flags_of(asked), *(sequences or ops.NO_SEQUENCES))
    result, lse = torch.ops.flash_hopper.forward(q, k, v, *arguments)
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype or out.device != result.device:
            raise ArgumentError(
                f"out must be {tuple(result.shape)}, {result.dtype} on {result.device}, got {tuple(out.shape)}, "
                f"{out.dtype} on {out.device}"
            )
        result = out.copy_(result)
    return result, lse if asked.return_lse else None


def _refuse_out(out: Tensor | None) -> None:
    if out is not None:
        raise ArgumentError("out= cannot be combined with inputs that require grad: drop out= or use torch.no_grad()")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where torch.autocast is on for the device of q: its dtype in place of float32."""
    kind = q.device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    q, k, v = (t.to(dtype) if t.dtype == torch.float32 else t for t in (q, k, v))
    return q, k, v


class _Attention(torch.autograd.Function):
    """Forward and backward of a prepared call, dense or ragged, as one node."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, sequences: Sequences | None
    ) -> tuple[Tensor, Tensor]:
        out, lse = prepared.run(q, k, v, None, sequences)
        assert lse is not None, "prepared with return_lse"
        ctx.problem, ctx.hints = prepared.problem, None  # type: ignore[attr-defined]
        if sequences is None:
            ctx.save_for_backward(q, k, v, out, lse)
        else:
            ctx.save_for_backward(q, k, v, out, lse, *sequences.tensors)  # type: ignore[arg-type]
            ctx.hints = sequences[len(TENSORS) :]  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None, None
        problem: AttentionProblem = ctx.problem
        needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
        q, k, v, out, lse, *lengths = ctx.saved_tensors
        sequences = None if ctx.hints is None else Sequences(*lengths, *ctx.hints)
        if is_dynamo_compiling() or torch.is_grad_enabled() or dispatch_modes() or transform() is not None:
            # somebody looks on; with create_graph=True it is autograd, which must meet the refusal of a second derivative
            arguments = (*_flags(problem), *(sequences or ops.NO_SEQUENCES))
            found = _operator_gradients(ctx, (q, k, v, out, lse), dout, dlse, arguments)
            return *found, None, None
        needs = needs_q, needs_k or needs_v
        dq, dk, dv = gradients(q, k, v, out, lse, dout, dlse, problem, *needs, sequences)
        return dq, dk if needs_k else None, dv if needs_v else None, None, None


def _flags(problem: AttentionProblem) -> tuple[Any, ...]:
    """A checked problem as the flags of an operator."""
    features, mask = problem.features, problem.mask
    return ops.flags_of(
        AttentionOptions(
            softmax_scale=problem.softmax_scale,
            window_size=(mask.left, mask.right),
            attention_chunk=mask.chunk,
            pack_gqa=Feature.PACK_GQA in features or None,
            deterministic=Feature.DETERMINISTIC in features,
            sm_margin=problem.sm_margin,
        )
    )


def _operator_gradients(
    ctx: Any, saved: tuple[Tensor, ...], dout: Tensor | None, dlse: Tensor | None, arguments: tuple[Any, ...]
) -> Gradients:
    """Gradients of q, k and v by `flash_hopper::backward`; None where not needed."""
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    dq, dk, dv = torch.ops.flash_hopper.backward(dout, dlse, *saved, *arguments, needs_q, needs_k or needs_v)
    return dq if needs_q else None, dk if needs_k else None, dv if needs_v else None


def _operator_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient of `flash_hopper::forward` needs; refuses a call that it could not follow."""
    q, k, v, *arguments = inputs
    options, sequences = ops.read_arguments(arguments)
    check_differentiable(ops.checked_problem(q, k, v, options, sequences), q.device)
    flags, lengths, hints = ops.split_arguments(arguments)
    ctx.save_for_backward(q, k, v, *output, *lengths)
    ctx.flags, ctx.hints = flags, hints
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * len(ops.ARGUMENTS)
    if dout is None and dlse is None:
        return None, None, None, *none
    q, k, v, out, lse, *lengths = ctx.saved_tensors
    arguments = (*ctx.flags, *lengths, *ctx.hints)
    return *_operator_gradients(ctx, (q, k, v, out, lse), dout, dlse, arguments), *none


def _refuse_second_derivative(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
    raise UnsupportedError(
        "attention does not support second derivatives: its gradient was differentiated again (create_graph=True)"
    )


torch.library.register_autograd(ops.FORWARD, _operator_backward, setup_context=_operator_context, lib=ops.library)
torch.library.register_autograd(ops.BACKWARD, _refuse_second_derivative, lib=ops.library)
