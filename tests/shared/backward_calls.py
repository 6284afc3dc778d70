"""A forward and its backward as the GPU tests call them, and when two sets of results count as the same."""

import torch

import flash_hopper


def leaves(inputs, grads="qkv"):
    """q, k and v of a case's inputs, of which those in `grads` require grad; they share the inputs' memory."""
    return tuple(
        x.detach().requires_grad_(name in grads)
        for name, x in zip("qkv", (inputs.q, inputs.k, inputs.v), strict=True)
    )  # fmt: skip


def step(tensors, dout, dlse, case, **options):
    """out, lse and the gradients of those of q, k, v that require grad, for the gradients of out and of lse, if any."""
    options = {"causal": case.causal, "deterministic": case.deterministic, **options}
    out, lse = flash_hopper.flash_attn_func(*tensors, case.scale, return_lse=True, **options)
    passed = [(x, grad) for x, grad in ((out, dout), (lse, dlse)) if grad is not None]
    wanted = [x for x in tensors if x.requires_grad]
    found = torch.autograd.grad([x for x, _ in passed], wanted, [grad for _, grad in passed])
    return out.detach(), lse.detach(), *found


def differing(got, want, is_exact):
    """A boolean on the device: whether two results differ by more than they may.

    Bit for bit, or, where the order of additions is free, by one rounding and a little of what was added up.
    """
    if is_exact:
        return (got != want).any()
    allowed = torch.finfo(want.dtype).eps * want.abs().float() + 1e-4 * want.abs().amax().float()
    return ~((got.float() - want.float()).abs() <= allowed).all()  # NaN is no less than anything


def mistakes(got, want, case):
    """How many of out, lse, dq, dk, dv differ: a tensor on the device, so that nothing waits for it."""
    exact = (True, True, *(case.deterministic for _ in got[2:]))
    return torch.stack([differing(a, b, e) for a, b, e in zip(got, want, exact, strict=True)]).sum()


def assert_same(got, want, case):
    """All of out, lse, dq, dk, dv."""
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        is_exact = i < 2 or case.deterministic
        assert not differing(a, b, is_exact), f"result {i} differs in {int((a != b).sum())} elements: {case}"
