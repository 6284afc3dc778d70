"""Gradients of attention, and which way a call takes: straight to the launcher, or through a torch operator.

An eager call on ordinary tensors goes to the launcher, as one autograd node if an input requires grad. A call that
somebody must see as an operator (torch.compile, torch.export, fake and meta tensors, dispatch modes such as that of selective
checkpointing, tensor subclasses) goes through `flash_hopper::forward`, whose gradient is
`flash_hopper::backward`. Both ways save q, k, v, out and LSE and run the same kernels; the backward recomputes the rest
(specification chapter 7). LSE is differentiable; a second derivative is refused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling

from flash_hopper.launch import ops
from flash_hopper.launch.attention import Prepared, check_differentiable, gradients, prepare_call, seen_call
from flash_hopper.launch.forward import Result
from flash_hopper.launch.tensors import describe
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, requested_features
from flash_hopper.problem.errors import ArgumentError, UnsupportedError
from flash_hopper.problem.features import Feature

InputGradients = tuple[Tensor | None, Tensor | None, Tensor | None]

assert list(AttentionOptions.__dataclass_fields__)[-1] == "return_lse", "calls set it as the last of the options"

# One C call each; torch has no public names for them.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def differentiable_attention(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, options: tuple[Any, ...]) -> Result:
    """(out, lse or None) of a dense call; differentiable in q, k and v if one of them requires grad.

    `options` holds the fields of `AttentionOptions` in order. A call that the backward could not follow is refused here.
    """
    if (
        is_dynamo_compiling()
        or not (type(q) is type(k) is type(v) is Tensor and (out is None or type(out) is Tensor))
        or _dispatch_modes()
        or _transform() is not None
    ):
        return _out_of_the_ordinary(q, k, v, out, options)
    needs_grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    asked = options
    if needs_grad:
        _refuse_out(out)
        options = (*options[:-1], True)  # the last one is return_lse: the backward needs it
    prepared = seen_call(q, k, v, out, options)
    if prepared is None:
        if q.is_meta:
            return _as_operator(q, k, v, out, asked)
        q, k, v = _autocast(q, k, v)
        prepared = prepare_call(q, k, v, out, options)
    if not needs_grad:
        return prepared.run(q, k, v, out)
    check_differentiable(prepared.problem, q.device)
    result, lse = _Attention.apply(q, k, v, prepared)  # type: ignore[no-untyped-call]
    return result, lse if asked[-1] else None


def _out_of_the_ordinary(q: Any, k: Any, v: Any, out: Any, options: tuple[Any, ...]) -> Result:
    """A call that is traced, or whose arguments are not plain tensors; raises DTypeError if one is no tensor at all."""
    if is_dynamo_compiling():
        return _as_operator(q, k, v, out, options)
    tensors = [q, k, v] if out is None else [q, k, v, out]
    for name, tensor in zip(("q", "k", "v", "out"), tensors, strict=False):
        describe(name, tensor)
    if _dispatch_modes() or _transform() is not None or any(map(_is_wrapper, tensors)):
        return _as_operator(q, k, v, out, options)
    with torch._C.DisableTorchFunctionSubclass():
        # parameters, and subclasses that only change what torch functions do
        q, k, v, plain_out = (None if t is None else t.as_subclass(Tensor) for t in (q, k, v, out))
        result, lse = differentiable_attention(q, k, v, plain_out, options)
    return result if out is None else out, lse


def _is_wrapper(tensor: Tensor) -> bool:
    """True for a subclass whose data is not its own: fake, functional, distributed, quantized tensors."""
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _as_operator(q: Tensor, k: Tensor, v: Tensor, out: Tensor | None, options: tuple[Any, ...]) -> Result:
    """The call as `flash_hopper::forward`, which checks the tensors, with data or without."""
    asked = AttentionOptions(*options)
    if not is_dynamo_compiling():
        requested_features(asked)  # each option's type and range
        _refuse_transforms()
    ops.check_expressed(asked)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        _refuse_out(out)
    q, k, v = _autocast(q, k, v)
    if not is_dynamo_compiling():
        ops.checked_problem(q, k, v, asked)
    result, lse = torch.ops.flash_hopper.forward(
        q, k, v, asked.softmax_scale, asked.causal, asked.pack_gqa, asked.deterministic, asked.sm_margin
    )
    if out is not None:
        if out.shape != result.shape or out.dtype != result.dtype or out.device != result.device:
            raise ArgumentError(
                f"out must be {tuple(result.shape)}, {result.dtype} on {result.device}, got {tuple(out.shape)}, "
                f"{out.dtype} on {out.device}"
            )
        result = out.copy_(result)
    return result, lse if asked.return_lse else None


def _refuse_transforms() -> None:
    """Functionalization sees an operator; the other transforms of torch.func would need rules of their own."""
    transform = _transform()
    if transform is not None and transform.key() != torch._C._functorch.TransformType.Functionalize:
        raise UnsupportedError(
            f"attention does not support torch.func transforms, got {transform.key().name}: use torch.autograd for "
            "gradients and the batch dimension in place of vmap"
        )


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
    """Forward and backward of a prepared call as one node."""

    @staticmethod
    def forward(ctx: FunctionCtx, q: Tensor, k: Tensor, v: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor]:
        out, lse = prepared.run(q, k, v, None)
        assert lse is not None, "prepared with return_lse"
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = prepared.problem  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None
        problem: AttentionProblem = ctx.problem
        if is_dynamo_compiling() or torch.is_grad_enabled() or _dispatch_modes() or _transform() is not None:
            # somebody looks on; with create_graph=True it is autograd, which must meet the refusal of a second derivative
            return *_operator_gradients(ctx, dout, dlse, _flags(problem)), None
        needs_q, needs_k, needs_v, _ = ctx.needs_input_grad
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = gradients(q, k, v, out, lse, dout, dlse, problem, needs_q, needs_k or needs_v)
        return dq, dk if needs_k else None, dv if needs_v else None, None


def _flags(problem: AttentionProblem) -> tuple[Any, ...]:
    """A checked problem as the flags of an operator."""
    features = problem.features
    pack_gqa, deterministic = Feature.PACK_GQA in features, Feature.DETERMINISTIC in features
    return problem.softmax_scale, problem.causal, pack_gqa or None, deterministic, problem.sm_margin


def _operator_gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, flags: tuple[Any, ...]) -> InputGradients:
    """Gradients of q, k and v by `flash_hopper::backward`; None where not needed."""
    needs_q, needs_k, needs_v = ctx.needs_input_grad[:3]
    dq, dk, dv = torch.ops.flash_hopper.backward(
        dout, dlse, *ctx.saved_tensors, *flags, needs_q, needs_k or needs_v
    )  # fmt: skip
    return dq if needs_q else None, dk if needs_k else None, dv if needs_v else None


def _operator_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """What the gradient of `flash_hopper::forward` needs; refuses a call that it could not follow."""
    q, k, v, *flags = inputs
    check_differentiable(ops.checked_problem(q, k, v, ops.options_of(*flags)), q.device)
    ctx.save_for_backward(q, k, v, *output)
    ctx.flags = tuple(flags)
    ctx.set_materialize_grads(False)


def _operator_backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    none = (None,) * len(ops.FLAGS)
    if dout is None and dlse is None:
        return None, None, None, *none
    return *_operator_gradients(ctx, dout, dlse, ctx.flags), *none


def _refuse_second_derivative(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
    raise UnsupportedError(
        "attention does not support second derivatives: its gradient was differentiated again (create_graph=True)"
    )


torch.library.register_autograd(ops.FORWARD, _operator_backward, setup_context=_operator_context, lib=ops.library)
torch.library.register_autograd(ops.BACKWARD, _refuse_second_derivative, lib=ops.library)
