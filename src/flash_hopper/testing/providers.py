"""Who computes the attention that `bench` times: ours and the peers that are installed.

`prepare` returns a call whose result was checked, or raises `ProviderAbsent` with the reason: a provider that is not
installed or refuses a shape is shown as absent, one that is wrong is shown as wrong. Views, keyword arguments and, for
the backward, the forward are made here, outside of the timed region.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_hopper
from flash_hopper.testing import fp8_providers
from flash_hopper.testing.bench_check import WrongResult, check_gradients, check_result
from flash_hopper.testing.bench_suites import QUANTISE, BenchShape
from flash_hopper.testing.fa3_backward import fa3_gradients
from flash_hopper.testing.provider_base import (
    Inputs,
    Maker,
    Prepared,
    ProviderAbsent,
    first_line,
    function_of,
    make_inputs,
)

Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k and v that require grad

__all__ = ["MAKERS", "Inputs", "Prepared", "ProviderAbsent", "WrongResult", "make_inputs", "prepare"]


def prepare(name: str, shape: BenchShape, inputs: Inputs) -> Prepared:
    """The provider's call, run once and checked. Raises ProviderAbsent or WrongResult."""
    makers = FP8 if shape.is_fp8 and shape.direction == "forward" else MAKERS[shape.direction]
    if name not in makers:
        raise ProviderAbsent(f"no such provider of the {shape.direction}; there is {', '.join(makers)}")
    try:
        prepared = makers[name](shape, inputs)
        result = prepared.scoped()()
    except ProviderAbsent:
        raise
    except Exception as refusal:  # peers refuse with any type; the reason is shown in the row
        raise ProviderAbsent(f"refuses this shape: {first_line(refusal)}") from refusal
    if shape.direction == "backward":
        check_gradients(result, shape, inputs)
    elif shape.direction == QUANTISE:
        wrong = fp8_providers.check_quantised(name, result, shape, inputs)
        if wrong is not None:
            raise WrongResult(wrong)
    else:
        check_result(result, shape, prepared.compared_with or inputs, seqlen_dim=prepared.seqlen_dim)
    return prepared


def _ours(shape: BenchShape, inputs: Inputs) -> Prepared:
    return _call_of_ours(shape, inputs)


def _ours_out(shape: BenchShape, inputs: Inputs) -> Prepared:
    return _call_of_ours(shape, inputs, out=inputs.out)


def _ours_deterministic(shape: BenchShape, inputs: Inputs) -> Prepared:
    return _call_of_ours(shape, inputs, deterministic=True)


def _call_of_ours(shape: BenchShape, inputs: Inputs, **options: Any) -> Prepared:
    q, k, v, cu_seqlens = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens
    if shape.left is not None:
        options["window_size"] = shape.window
    if cu_seqlens is None:
        return Prepared(lambda: flash_hopper.flash_attn_func(q, k, v, causal=shape.causal, **options))
    rows = cu_seqlens, cu_seqlens, shape.seqlen_q, shape.seqlen_k
    return Prepared(lambda: flash_hopper.flash_attn_varlen_func(q, k, v, *rows, causal=shape.causal, **options))


def _sdpa(backend: SDPBackend) -> Maker:
    def make(shape: BenchShape, inputs: Inputs) -> Prepared:
        if shape.is_ragged or shape.left is not None:
            if backend == SDPBackend.FLASH_ATTENTION:
                return _torch_flash(shape, inputs)
            raise ProviderAbsent("scaled_dot_product_attention has no windows and no packed batches")
        if shape.causal and shape.seqlen_q != shape.seqlen_k:
            raise ProviderAbsent("is_causal is aligned top-left there, which differs for unequal lengths")
        q, k, v = (t.transpose(1, 2) for t in (inputs.q, inputs.k, inputs.v))
        gqa = shape.heads != shape.heads_k
        return Prepared(
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=gqa),
            lambda: sdpa_kernel(backend),
            seqlen_dim=2,
        )

    return make


def _torch_flash(shape: BenchShape, inputs: Inputs) -> Prepared:
    """The operator behind SDPA's flash backend, which takes offsets of sequences and windows."""
    longest = shape.seqlen_q, shape.seqlen_k
    arguments = inputs.q, inputs.k, inputs.v, inputs.cu_seqlens, inputs.cu_seqlens, *longest, 0.0, shape.causal, False
    options: dict[str, Any] = {"scale": shape.problem.softmax_scale}
    if shape.left is not None:
        options |= {"window_size_left": shape.left, "window_size_right": 0 if shape.causal else None}
    return Prepared(lambda: torch.ops.aten._flash_attention_forward(*arguments, **options))


def flash_attn_like(module: str) -> Maker:
    """A module with FlashAttention's `flash_attn_func(q, k, v, softmax_scale, causal)` and `flash_attn_varlen_func`."""

    def make(shape: BenchShape, inputs: Inputs) -> Prepared:
        name = "flash_attn_varlen_func" if shape.is_ragged else "flash_attn_func"
        function = function_of(module, name)
        options: dict[str, Any] = {"softmax_scale": shape.problem.softmax_scale, "causal": shape.causal}
        if shape.left is not None:
            options["window_size"] = shape.window
        if shape.is_ragged:
            options |= {"cu_seqlens_q": inputs.cu_seqlens, "cu_seqlens_k": inputs.cu_seqlens}
            options |= {"max_seqlen_q": shape.seqlen_q, "max_seqlen_k": shape.seqlen_k}
        unknown = set(options) - set(inspect.signature(function).parameters)
        if unknown:
            raise ProviderAbsent(f"{module}.{name} does not take {', '.join(sorted(unknown))}")
        return Prepared(lambda: function(inputs.q, inputs.k, inputs.v, **options))

    return make


def gradients_of(maker: Maker) -> Maker:
    """The gradients of a provider's forward, as autograd delivers them to a user: `torch.autograd.grad`."""

    def make(shape: BenchShape, inputs: Inputs) -> Prepared:
        def forward() -> tuple[Prepared, Leaves]:
            q, k, v = (t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
            return maker(shape, replace(inputs, q=q, k=k, v=v)), (q, k, v)

        forward()  # says at once if there is no such provider
        return Prepared(_Gradients(forward, inputs.dout))

    return make


class _Gradients:
    """Gradients of q, k and v for dout, from a forward that ran before.

    Autograd runs a backward on the stream of its forward, and knows a leaf by the stream on which it met it first. So each
    stream that this is called on gets leaves and a forward of its own, at its first call; that one is never timed, as every
    protocol warms up first.
    """

    def __init__(self, forward: Callable[[], tuple[Prepared, Leaves]], dout: torch.Tensor) -> None:
        self._forward = forward
        self._dout = dout
        self._graphs: dict[int, tuple[torch.Tensor, Leaves, torch.Tensor]] = {}  # out, leaves, gradient of out

    def __call__(self) -> tuple[torch.Tensor, ...]:
        stream = torch.cuda.current_stream().cuda_stream if self._dout.is_cuda else 0
        graph = self._graphs.get(stream)
        if graph is None:
            graph = self._graphs[stream] = self._run_forward()
        out, leaves, dout = graph
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    def _run_forward(self) -> tuple[torch.Tensor, Leaves, torch.Tensor]:
        forward, leaves = self._forward()
        with torch.enable_grad():
            result = forward.scoped()()
        out = result[0] if isinstance(result, tuple | list) else result
        if not (isinstance(out, torch.Tensor) and out.requires_grad):
            raise ProviderAbsent("has no backward")
        return out, leaves, self._dout.transpose(1, 2) if forward.seqlen_dim == 2 else self._dout


FORWARD: dict[str, Maker] = {
    "ours": _ours,
    "ours-out": _ours_out,
    "sdpa-flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "fa3": flash_attn_like("fa3_fwd_interface"),
    "fa4": flash_attn_like("flash_attn.cute"),
}
BACKWARD: dict[str, Maker] = {
    "ours": gradients_of(_ours),
    "ours-det": gradients_of(_ours_deterministic),
    "sdpa-flash": gradients_of(FORWARD["sdpa-flash"]),
    "sdpa-cudnn": gradients_of(FORWARD["sdpa-cudnn"]),
    "fa3": fa3_gradients,
    "fa4": gradients_of(FORWARD["fa4"]),
}
# of e4m3 shapes; the 16-bit ones get the tensors that were quantised
FP8: dict[str, Maker] = {
    "ours": fp8_providers.ours,
    "ours-block": fp8_providers.ours_block,
    "ours-rows": fp8_providers.ours_rows,
    "ours-fast": fp8_providers.ours_fast,
    "ours-bf16": FORWARD["ours"],
    "fa3": fp8_providers.fa3,
    "sdpa-flash": FORWARD["sdpa-flash"],
    "sdpa-cudnn": FORWARD["sdpa-cudnn"],
}
MAKERS: Mapping[str, dict[str, Maker]] = {"forward": FORWARD, "backward": BACKWARD, QUANTISE: fp8_providers.QUANTISE}
NAMES = tuple(dict.fromkeys(name for makers in (*MAKERS.values(), FP8) for name in makers))
