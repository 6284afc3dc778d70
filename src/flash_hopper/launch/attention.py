"""From an attention call, dense or ragged, to what runs it, with one look-up for a signature seen before.

A call is prepared once per signature (shapes, strides, dtypes, devices, options) and found in a dictionary afterwards: on a
GPU bound to its kernel, on the CPU to the reference. Nothing falls back from one to the other, and no tensor on a GPU is
read: lengths are values, not part of a signature. `autograd.py`, `ops.py` and `explicit.py` call this with tensors that hold
data; they run what they get, and its gradients, below autograd.
"""

from dataclasses import dataclass
from typing import Any

import torch

from flash_hopper.kernels import backward_support
from flash_hopper.launch.backward import Gradients, prepare_backward
from flash_hopper.launch.forward import PreparedForward, Result, prepare
from flash_hopper.launch.sequences import TENSORS, Sequences, described_problem, signature
from flash_hopper.plan.backward import BackwardRequest
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem
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

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        sequences: Sequences | None = None,
    ) -> Result:
        """(out, lse or None) for tensors of exactly the signature that was prepared.

        Raises ArgumentError for cu_seqlens or seqused that do not fit the rows.
        """
        p = self.problem
        if sequences is None:
            result, lse = tiled.attention(q, k, v, softmax_scale=p.softmax_scale, mask=p.mask)
        else:
            result, lse = tiled.varlen_attention(
                q, k, v, softmax_scale=p.softmax_scale, mask=p.mask, **length_tensors(sequences)
            )
        if out is not None:
            result = out.copy_(result)
        return result, lse if self.has_lse else None


Prepared = PreparedForward | PreparedReference

_prepared: dict[tuple[Any, ...], Prepared] = {}


def seen_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None = None,
) -> Prepared | None:
    """The prepared form of a call whose signature was seen before; one with float32 tensors never was.

    `options` holds the fields of `AttentionOptions` in order.
    """
    try:
        return _prepared.get(call_signature(q, k, v, out, options, sequences))
    except TypeError:  # an option that cannot be hashed was never remembered; `prepare_call` judges it
        return None


def prepare_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None = None,
) -> Prepared:
    """Check a call, bind it to what runs it, and remember it by its signature.

    Whether the inputs require grad is not looked at. Raises every error of `problem`; for a GPU see `forward.prepare`.
    """
    asked = AttentionOptions(*options)
    with torch.no_grad():  # so that `describe` sees no gradients
        prepared = (prepare if _is_on_gpu(q) else _prepare_reference)(q, k, v, asked, out, sequences)
    # under autocast float32 tensors stand for tensors of another dtype, so their signature says too little
    if prepared.problem.dtype is not DType.FP32 and are_values(options):
        if len(_prepared) >= MAX_SIGNATURES:
            _prepared.clear()
        _prepared[call_signature(q, k, v, out, options, sequences)] = prepared
    return prepared


def prepared_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None = None,
) -> Prepared:
    """The prepared form of a call, found or made now."""
    return seen_call(q, k, v, out, options, sequences) or prepare_call(q, k, v, out, options, sequences)


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
    sequences: Sequences | None = None,
    into: Gradients | None = None,
) -> Gradients:
    """(dq, dk, dv) in the dtype of q, None for those not needed, from what the forward took and returned.

    dout: like out, any strides; dlse: like lse, any strides; None stands for zeros. into: float32 buffers to which the
    gradients are added, in the shapes of q, k and v, and which are returned; None for those not needed.
    """
    if dout is None:
        dout = torch.zeros_like(out)
    if not _is_on_gpu(q):
        if into is not None:
            return _add_reference_gradients(into, (q, k, v, out, lse, dout, dlse), problem, sequences)
        dq, dk, dv = _reference_gradients(q, k, v, out, lse, dout, dlse, problem, sequences)
        return dq if needs_dq else None, dk if needs_dkdv else None, dv if needs_dkdv else None
    is_deterministic = Feature.DETERMINISTIC in problem.features
    request = BackwardRequest(needs_dq, needs_dkdv, dlse is not None, is_deterministic, accumulates=into is not None)
    prepared = prepare_backward(problem, request, q.device.index)
    return prepared.run(q, k, v, out, lse, dout, dlse, sequences=sequences, into=into)


def _reference_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    problem: AttentionProblem,
    sequences: Sequences | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv) by the reference, in the dtype of q, which may be wider than that of the problem."""
    scale, mask = problem.softmax_scale, problem.mask
    if sequences is None:
        return tiled.gradients(q, k, v, out, lse, dout, dlse, softmax_scale=scale, mask=mask)
    return tiled.varlen_gradients(
        q, k, v, out, lse, dout, dlse, softmax_scale=scale, mask=mask, **length_tensors(sequences)
    )


def _add_reference_gradients(
    into: Gradients,
    tensors: tuple[torch.Tensor | None, ...],
    problem: AttentionProblem,
    sequences: Sequences | None,
) -> Gradients:
    """Add the reference's gradients, not rounded to the dtype of q before that; `tensors` are q, k, v, out, .., dlse."""
    wide = (t.float() if t is not None and t.element_size() == 2 else t for t in tensors)
    found = _reference_gradients(*wide, problem, sequences)  # type: ignore[arg-type, call-arg]
    for target, gradient in zip(into, found, strict=True):
        if target is not None:
            target.add_(gradient)
    return into


def call_signature(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None,
) -> tuple[Any, ...]:
    """What the preparation of a call depends on."""
    return (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, options,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
        None if sequences is None else signature(sequences),
    )  # fmt: skip


def _is_on_gpu(q: Any) -> bool:
    return isinstance(q, torch.Tensor) and q.is_cuda


def are_values(options: tuple[Any, ...]) -> bool:
    """True if no option is an object that is not compared by value."""
    return all(value is None or isinstance(value, int | float | tuple) for value in options)


def length_tensors(sequences: Sequences) -> dict[str, Any]:
    """As the reference takes them."""
    return dict(zip(TENSORS, sequences.tensors, strict=True))


def _prepare_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    out: torch.Tensor | None,
    sequences: Sequences | None,
) -> PreparedReference:
    """The reference, for tensors in host memory."""
    problem = described_problem(q, k, v, options, out, sequences, dtypes=tiled.DTYPES)
    if q.device.type != "cpu":
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {q.device}")
    check_supported(problem.features, tiled.SUPPORTED, "the CPU reference")
    return PreparedReference(problem, options.return_lse)
