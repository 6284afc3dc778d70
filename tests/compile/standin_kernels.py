"""Small kernels that stand in for the real ones where a test is about compiling, caching or packing."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Constexpr, Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """y = factor * x. `flaw` is what the kernel does wrong, `log` a file to which each compile adds a line."""

    factor: int
    flaw: str = ""
    log: str = ""

    kind = "scale"

    @property
    def name(self) -> str:
        return f"scale_by_{self.factor}{'_' if self.flaw else ''}{self.flaw}"


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor, factor: Constexpr, flaw: Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    if cutlass.const_expr(flaw == "setmaxnreg"):
        cute.arch.setmaxregister_increase(160)
    i = block * 128 + thread
    if cutlass.const_expr(flaw == "spill"):
        held = cute.make_rmem_tensor(cute.make_layout(96), Float32)
        for k in cutlass.range_constexpr(96):
            held[k] = x[i + 128 * k]
        cute.arch.barrier()
        for k in cutlass.range_constexpr(96):
            y[i + 128 * k] = held[k] * held[(k + 1) % 96] * factor
    elif i < cute.size(x):
        y[i] = x[i] * factor


@cute.jit
def scale(x: cute.Tensor, y: cute.Tensor, factor: Constexpr, flaw: Constexpr, stream: cuda.CUstream):
    # 1024 threads leave 64 registers each; without a minimum of CTAs an SM setmaxnreg is ignored
    threads = 1024 if cutlass.const_expr(flaw == "spill") else 128
    if cutlass.const_expr(flaw == "warns"):
        warnings.warn("an argument was ignored", UserWarning, stacklevel=1)
    scale_kernel(x, y, factor, flaw).launch(
        grid=[cute.ceil_div(cute.size(x), threads), 1, 1], block=[threads, 1, 1], stream=stream
    )


@cute.jit
def failing(x: cute.Tensor, stream: cuda.CUstream):
    missing = x.no_such_attribute  # noqa: F841


def trace(plan: ScalePlan):
    """As `kernels.registry.traceable`."""
    if plan.log:
        with Path(plan.log).open("a") as log:
            log.write(f"{os.getpid()} {plan.name}\n")
    if plan.flaw == "dies":
        os._exit(1)  # as a compiler does that aborts
    n = cute.sym_int32()
    x, y = (make_fake_tensor(Float32, (n,), (1,), assumed_align=16) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    if plan.flaw == "fails":
        return failing, (x, stream)
    return scale, (x, y, plan.factor, plan.flaw, stream)
