"""Gradients of attention: which calls need them, and the autograd node that delivers them.

On the GPU the forward kernel saves q, k, v, out and LSE; the backward recomputes the rest (specification chapter 7). LSE
is differentiable. Double backward is refused. On the CPU the reference brings its own node.
"""

from typing import Any

import torch
from torch.autograd.function import FunctionCtx, once_differentiable

from flash_hopper.kernels.backward_support import SUPPORTED
from flash_hopper.launch.attention import attention, prepared_call
from flash_hopper.launch.backward import Gradients, prepare_backward
from flash_hopper.launch.forward import PreparedForward, Result
from flash_hopper.plan.backward import BackwardRequest
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.features import Feature, check_supported

_RETURN_LSE = list(AttentionOptions.__dataclass_fields__).index("return_lse")


def differentiable_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> Result:
    """(out, lse or None) of a dense call; differentiable in q, k and v if one of them requires grad.

    `options` holds the fields of `AttentionOptions` in order. A call that the backward could not follow is refused here.
    """
    if not (torch.is_grad_enabled() and _on_gpu(q) and (q.requires_grad or k.requires_grad or v.requires_grad)):
        return attention(q, k, v, out, options)
    if out is not None:
        raise ArgumentError("out= cannot be combined with inputs that require grad: drop out= or use torch.no_grad()")
    with_lse = (*options[:_RETURN_LSE], True, *options[_RETURN_LSE + 1 :])
    with torch.no_grad():
        forward = prepared_call(q, k, v, None, with_lse)
    check_supported(forward.problem.features, SUPPORTED, "the backward kernels")
    result, lse = _Attention.apply(q, k, v, forward)  # type: ignore[no-untyped-call]
    return result, lse if options[_RETURN_LSE] else None


def _on_gpu(q: Any) -> bool:
    return isinstance(q, torch.Tensor) and q.is_cuda


class _Attention(torch.autograd.Function):
    """Forward and backward kernels as one node."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward: PreparedForward
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = forward.run(q, k, v, None)
        assert lse is not None, "prepared with return_lse"
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.problem = forward.problem  # type: ignore[attr-defined]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dout is None and dlse is None:
            return None, None, None, None
        q, k, v, out, lse = ctx.saved_tensors
        needs_q, needs_k, needs_v, _ = ctx.needs_input_grad
        dq, dk, dv = backward(q, k, v, out, lse, dout, dlse, ctx.problem, needs_q, needs_k or needs_v)
        return dq, dk if needs_k else None, dv if needs_v else None, None


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    problem: Any,
    needs_dq: bool,
    needs_dkdv: bool,
) -> Gradients:
    """Gradients of a GPU call; dout or dlse may be None, which stands for zeros."""
    request = BackwardRequest(needs_dq, needs_dkdv, dlse is not None, Feature.DETERMINISTIC in problem.features)
    prepared = prepare_backward(problem, request, q.device.index)
    return prepared.run(q, k, v, out, lse, torch.zeros_like(out) if dout is None else dout, dlse)
