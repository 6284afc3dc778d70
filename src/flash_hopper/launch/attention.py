"""From a dense attention call to what runs it, with one look-up for a signature seen before.

A call is prepared once per signature (shapes, strides, dtypes, devices, options) and found in a dictionary afterwards: on a
GPU bound to its kernel, on the CPU to the reference. Nothing falls back from one to the other. `autograd.py` and `ops.py`
call this with tensors that hold data; both run what they get, and its gradients, below autograd.
"""

from dataclasses import dataclass
from typing import Any

import torch

from flash_hopper.kernels import backward_support
from flash_hopper.launch.backward import Gradients, prepare_backward
from flash_hopper.launch.forward import PreparedForward, Result, prepare
from flash_hopper.launch.tensors import describe
from flash_hopper.plan.backward import BackwardRequest
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import DeviceError
from flash_hopper.problem.features import Feature, check_supported
from flash_hopper.reference import tiled

# Signatures kept; a server that meets ever new lengths starts over instead of growing without bound.
MAX_SIGNATURES = 8192


@dataclass(frozen=True, slots=True)
class PreparedReference:
    """A checked signature of tensors in host memory; the counterpart of `PreparedForward`."""

    problem: AttentionProblem
    has_lse: bool

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        """(out, lse or None) for tensors of exactly the signature that was prepared."""
        p = self.problem
        result, lse = tiled.attention(q, k, v, softmax_scale=p.softmax_scale, causal=p.causal)
        if out is not None:
            result = out.copy_(result)
        return result, lse if self.has_lse else None


Prepared = PreparedForward | PreparedReference

_prepared: dict[tuple[Any, ...], Prepared] = {}


def seen_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> Prepared | None:
    """The prepared form of a call whose signature was seen before; one with float32 tensors never was.

    `options` holds the fields of `AttentionOptions` in order.
    """
    try:
        return _prepared.get(_signature(q, k, v, out, options))
    except TypeError:  # an option that cannot be hashed was never remembered; `prepare_call` judges it
        return None


def prepare_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> Prepared:
    """Check a call, bind it to what runs it, and remember it by its signature.

    Whether the inputs require grad is not looked at. Raises every error of `problem`; for a GPU see `forward.prepare`.
    """
    asked = AttentionOptions(*options)
    with torch.no_grad():  # so that `describe` sees no gradients
        prepared = prepare(q, k, v, asked, out) if _is_on_gpu(q) else _prepare_reference(q, k, v, asked, out)
    # under autocast float32 tensors stand for tensors of another dtype, so their signature says too little
    if prepared.problem.dtype is not DType.FP32 and _are_values(options):
        if len(_prepared) >= MAX_SIGNATURES:
            _prepared.clear()
        _prepared[_signature(q, k, v, out, options)] = prepared
    return prepared


def prepared_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> Prepared:
    """The prepared form of a call, found or made now."""
    return seen_call(q, k, v, out, options) or prepare_call(q, k, v, out, options)


def check_differentiable(problem: AttentionProblem, device: torch.device) -> None:
    """Raise UnsupportedError, naming what is missing, if the backward could not follow a call on this device."""
    on_cpu = device.type == "cpu"
    supported = tiled.SUPPORTED if on_cpu else backward_support.SUPPORTED
    if not problem.features <= supported:
        check_supported(problem.features, supported, "the CPU reference" if on_cpu else "the backward kernels")


def gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    problem: AttentionProblem,
    needs_dq: bool,
    needs_dkdv: bool,
) -> Gradients:
    """(dq, dk, dv) in the dtype of q, None for those not needed, from what the forward took and returned.

    dout: like out, any strides; dlse: like lse, any strides; None stands for zeros.
    """
    if dout is None:
        dout = torch.zeros_like(out)
    if not _is_on_gpu(q):
        dq, dk, dv = tiled.gradients(
            q, k, v, out, lse, dout, dlse, softmax_scale=problem.softmax_scale, causal=problem.causal
        )
        return dq if needs_dq else None, dk if needs_dkdv else None, dv if needs_dkdv else None
    request = BackwardRequest(needs_dq, needs_dkdv, dlse is not None, Feature.DETERMINISTIC in problem.features)
    return prepare_backward(problem, request, q.device.index).run(q, k, v, out, lse, dout, dlse)


def _is_on_gpu(q: Any) -> bool:
    return isinstance(q, torch.Tensor) and q.is_cuda


def _signature(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, options: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, options,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
    )  # fmt: skip


def _are_values(options: tuple[Any, ...]) -> bool:
    """True if no option is an object that is not compared by value."""
    return all(value is None or isinstance(value, int | float | tuple) for value in options)


def _prepare_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, out: torch.Tensor | None
) -> PreparedReference:
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
    return PreparedReference(problem, options.return_lse)
