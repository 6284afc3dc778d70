"""FlashAttention-3's backward as a peer: its C++ kernels from the library of a JAX package, called through `xla_ffi.py`.

The torch build of FA3 that is published as a wheel has the forward only. The package `dew-flash-attn-cu13` holds both as
XLA FFI handlers; its Python part needs JAX, its library does not. Called directly, the kernels run on torch's stream
and are timed like every other provider. `providers.py` calls it.
"""

import ctypes
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.provider_base import Inputs, Prepared, ProviderAbsent, first_line
from flash_hopper.testing.xla_ffi import Handler

LIBRARY = "libdew_flash_attn3.so"
MODULES = ("dew3", "dew_flash_attn")  # beside which the library lies
FORWARD, BACKWARD = "dew_flash3_mha_fwd", "dew_flash3_mha_bwd"
ROW_BLOCK = 128  # the statistics of each sequence are padded to a multiple of the row block, which is at most this


def fa3_gradients(shape: BenchShape, inputs: Inputs) -> Prepared:
    """The backward of FA3 C++; its forward runs once, here. Raises ProviderAbsent."""
    if shape.d != shape.dv:
        raise ProviderAbsent("this build takes equal head dims of q and v only")
    if shape.is_ragged:
        raise ProviderAbsent("the handlers of this build are called for dense batches only")
    library = _library()
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    attributes: dict[str, bool | int | float] = {
        "softmax_scale": float(shape.problem.softmax_scale),
        "is_causal": shape.causal,
        "window_size_left": -1 if shape.left is None else shape.left,
        "window_size_right": -1 if shape.left is None else 0,
    }

    def floats(*sizes: int) -> torch.Tensor:
        return torch.empty(sizes, dtype=torch.float32, device=q.device)

    out, lse = torch.empty_like(dout), floats(shape.batch, shape.heads, shape.seqlen_q)
    forward = Handler(library, FORWARD).bind((q, k, v), (out, lse, floats(1, 1, 1, 1), floats(1, 1, 1)), attributes)
    dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
    statistics = [floats(shape.heads * (shape.batch * (shape.seqlen_q + ROW_BLOCK) + ROW_BLOCK)) for _ in range(2)]
    backward = Handler(library, BACKWARD).bind((dout, q, k, v, out, lse), (dq, dk, dv, *statistics), attributes)
    has_run = False

    def call() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        nonlocal has_run
        if not has_run:
            forward()
            has_run = True
        backward()
        return dq, dk, dv

    return Prepared(call)


@cache
def _library() -> Any:
    """The library, loaded into this process; the CUDA runtime that it needs is the one of torch."""
    places = [Path(spec.origin).parent for name in MODULES if (spec := find_spec(name)) is not None and spec.origin]
    paths = [place / LIBRARY for place in places if (place / LIBRARY).is_file()]
    if not paths:
        raise ProviderAbsent("dew-flash-attn-cu13 is not installed")
    try:
        return ctypes.CDLL(str(paths[0]))
    except OSError as failure:
        raise ProviderAbsent(f"{LIBRARY} cannot be loaded: {first_line(failure)}") from failure
