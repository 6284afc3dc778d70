"""Cases, ragged or not, as the GPU tests call them: a forward, and a forward with its backward."""

import torch
from torch import Tensor

import flash_hopper
from flash_hopper.testing.cases import Case
from flash_hopper.testing.inputs import Inputs
from flash_hopper.testing.run import max_seqlen


def hints_of(case: Case, device: torch.device) -> dict:
    """max_seqlen_q and max_seqlen_k as a case gives them. One on the device is copied there: not to be done in a capture."""
    return {f"max_seqlen_{side}": max_seqlen(case, side, device) for side in ("q", "k")}


def attention(case: Case, tensors, lengths: dict[str, Tensor], hints: dict | None = None, **options):
    """(out, lse) of q, k and v with the mask of a case; `lengths` by the names of the arguments, `hints` made now if None."""
    q, k, v = tensors
    given = {
        "softmax_scale": case.scale, "causal": case.causal, "window_size": (case.left, case.right),
        "attention_chunk": case.chunk, "deterministic": case.deterministic, "return_lse": True, **options,
    }  # fmt: skip
    if not case.is_ragged:
        return flash_hopper.flash_attn_func(q, k, v, **given)
    hints = hints_of(case, q.device) if hints is None else hints
    absent = {"cu_seqlens_q": None, "cu_seqlens_k": None}
    return flash_hopper.flash_attn_varlen_func(q, k, v, **(absent | lengths | hints | given))


def leaves(inputs: Inputs):
    """q, k and v that require grad, sharing the inputs' memory."""
    return tuple(x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))


def step(case: Case, tensors, lengths: dict[str, Tensor], dout, dlse=None, **options):
    """out, lse, dq, dk and dv for the gradients of out and of lse, if any; `tensors` require grad."""
    out, lse = attention(case, tensors, lengths, **options)
    passed = [(x, grad) for x, grad in ((out, dout), (lse, dlse)) if grad is not None]
    found = torch.autograd.grad([x for x, _ in passed], tensors, [grad for _, grad in passed])
    return out.detach(), lse.detach(), *found


def of_case(case: Case, inputs: Inputs, **options):
    """All results of a case on its inputs."""
    if case.is_backward:
        return step(case, leaves(inputs), inputs.lengths, inputs.dout, inputs.dlse, **options)
    return attention(case, (inputs.q, inputs.k, inputs.v), inputs.lengths, **options)
