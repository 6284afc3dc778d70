"""The backward of attention as a call of its own, into fresh tensors or added to float32 buffers.

`api.flash_attn_backward_func` is this. A ring of devices adds up the gradients of its parts with it: with out and lse of the
whole ring, what a part of the keys contributes is a partial sum of the whole gradient. Checks are made once per signature.
"""

from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from flash_hopper.kernels.forward import support
from flash_hopper.launch import ops
from flash_hopper.launch.attention import MAX_SIGNATURES, are_values, call_signature, check_differentiable, gradients
from flash_hopper.launch.backward import Gradients
from flash_hopper.launch.device import device_facts
from flash_hopper.launch.jagged import is_jagged
from flash_hopper.launch.route import as_plain, check_tensors, must_be_seen, refuse_transforms
from flash_hopper.launch.sequences import Sequences, described_problem
from flash_hopper.launch.tensors import check_results, describe
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, requested_features
from flash_hopper.problem.checks import check_last_stride, check_no_overlap, check_shape
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError, UnsupportedError
from flash_hopper.reference import tiled

TARGETS = ("dq of grad_out", "dk of grad_out", "dv of grad_out")

_problems: dict[tuple[Any, ...], AttentionProblem] = {}


def explicit_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None,
    grad_out: Gradients | None,
) -> Gradients:
    """(dq, dk, dv), fresh or those of `grad_out` with the gradients added; no part of a graph.

    `options` holds the fields of `AttentionOptions` in order. Raises what the forward call would raise, and the same kinds of
    error for the other tensors. A call that must be seen as an operator is `flash_hopper::backward`.
    """
    operands = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
    optional = {"dlse": dlse, **_targets(grad_out)}
    given = operands | {name: tensor for name, tensor in optional.items() if tensor is not None}
    if sequences is not None:
        given |= sequences.present
    if is_jagged(*given.values()):
        raise ArgumentError("the explicit backward takes no jagged tensors: pass their values() and offsets()")
    if not is_dynamo_compiling():
        check_tensors(given)
    with torch.no_grad():
        if is_dynamo_compiling() or must_be_seen(given.values()):
            return _as_operator(operands, dlse, options, sequences, grad_out)
        plain = as_plain(given)
        if sequences is not None:
            sequences = sequences.replaced_by(plain)
        targets = None if grad_out is None else (plain.get(TARGETS[0]), plain.get(TARGETS[1]), plain.get(TARGETS[2]))
        found = _eager(
            plain["q"], plain["k"], plain["v"], plain["out"], plain["lse"], plain["dout"], plain.get("dlse"),
            options, sequences, targets,
        )  # fmt: skip
    return found if grad_out is None else grad_out


def _targets(grad_out: Any) -> dict[str, Any]:
    """The buffers to add to, by name."""
    if grad_out is None:
        return {}
    if not isinstance(grad_out, tuple | list) or len(grad_out) != len(TARGETS):
        raise ArgumentError(f"grad_out must be None or a tuple (dq, dk, dv), got {type(grad_out).__name__}")
    return dict(zip(TARGETS, grad_out, strict=True))


def _as_operator(
    operands: dict[str, torch.Tensor],
    dlse: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None,
    grad_out: Gradients | None,
) -> Gradients:
    if grad_out is not None:
        raise UnsupportedError(
            "grad_out is not supported in a call that torch must see as an operator (torch.compile, dispatch modes, tensor "
            "subclasses): leave it out and add the gradients up"
        )
    asked = AttentionOptions(*options)
    if not is_dynamo_compiling():
        requested_features(asked)
        refuse_transforms()
    ops.check_expressed(asked)
    q, k, v, out, lse, dout = operands.values()
    arguments = (*ops.flags_of(asked), *(sequences or ops.NO_SEQUENCES))
    found: Gradients = torch.ops.flash_hopper.backward(dout, dlse, q, k, v, out, lse, *arguments)
    return found


def _eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    options: tuple[Any, ...],
    sequences: Sequences | None,
    targets: Gradients | None,
) -> Gradients:
    """The call on ordinary tensors, checked once per signature."""
    forms = map(_form, (out, lse, dout, dlse, *(targets or (None, None, None))))
    key = (call_signature(q, k, v, None, options, sequences), *forms, targets is None)
    try:
        problem = _problems.get(key)
    except TypeError:  # an option that cannot be hashed was never remembered; `_checked` judges it
        problem = None
    if problem is None:
        problem = _checked(q, k, v, out, lse, dout, dlse, AttentionOptions(*options), sequences, targets)
        if are_values(options):
            if len(_problems) >= MAX_SIGNATURES:
                _problems.clear()
            _problems[key] = problem
    if targets is None:
        return gradients(q, k, v, out, lse, dout, dlse, problem, True, True, sequences)
    dq, dk, dv = targets
    if dq is dk is dv is None:
        return targets
    needs = dq is not None, dk is not None or dv is not None
    return gradients(q, k, v, out, lse, dout, dlse, problem, *needs, sequences, targets)


def _form(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _checked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    options: AttentionOptions,
    sequences: Sequences | None,
    targets: Gradients | None,
) -> AttentionProblem:
    """The problem, after every check that does not need a tensor's values."""
    dtypes = support.DTYPES if q.is_cuda else tiled.DTYPES
    problem = described_problem(q, k, v, options, None, sequences, dtypes=dtypes)
    if q.is_cuda:
        device_facts(q.device.index)
    elif q.device.type != "cpu":
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {q.device}")
    check_differentiable(problem, q.device)
    check_results(problem, dout, dlse, q, out, lse)
    for name, target, like in zip(TARGETS, targets or (None, None, None), (q, k, v), strict=True):
        if target is not None:
            _check_target(name, target, like)
    return problem


def _check_target(name: str, target: torch.Tensor, like: torch.Tensor) -> None:
    spec = describe(name, target)
    check_shape(spec, tuple(like.shape), "of its input")
    if target.dtype != torch.float32:
        raise DTypeError(f"{name} must be torch.float32, got {target.dtype}")
    if target.device != like.device:
        raise DeviceError(f"{name} must be on {like.device} like q, got {target.device}")
    check_last_stride(spec)
    check_no_overlap(spec)
