"""The forward on a GPU: from checked tensors to a running kernel.

`prepare` does everything that depends on shapes, strides and flags only, once per signature; `PreparedForward.run` is
what every later call does: allocate and launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flash_hopper.compile.store import get_kernel
from flash_hopper.geometry.tiles import heads_per_section
from flash_hopper.kernels.forward.support import DTYPES, SUPPORTED
from flash_hopper.launch.device import device_facts, tile_counter
from flash_hopper.launch.tensors import (
    ALIGN_BYTES,
    addressable,
    describe,
    has_plain_strides,
    is_aligned,
    with_plain_unit_strides,
)
from flash_hopper.plan.forward import plan_forward
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.features import check_supported

# A scale of zero is passed as the smallest normal float32: the scores vanish just the same, and a masked -inf stays -inf.
SMALLEST_SCALE = 2.0**-126

Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PreparedForward:
    """A checked signature, bound to its kernel. `kernel` is None if there is nothing to compute."""

    kernel: Callable[..., Any] | None
    problem: AttentionProblem
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    device: torch.device
    scale: float
    ctas: int
    heads_per_section: int
    is_dynamic: bool
    is_regular: bool  # strides can be passed as they are

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        """(out, lse or None) for tensors of exactly the signature that was prepared."""
        index = self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(q, k, v, out)
        if out is None:
            out = torch.empty(self.out_shape, dtype=q.dtype, device=self.device)
        lse = None
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        if self.kernel is None:
            out.zero_()
            return out, None if lse is None else lse.fill_(float("-inf"))
        addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | out.data_ptr()
        if self.is_regular and addresses % ALIGN_BYTES == 0:
            self._launch(q, k, v, out, lse)
        else:
            self._launch_irregular(q, k, v, out, lse)
        return out, lse

    def _launch(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        assert self.kernel is not None
        counter = tile_counter(self.device.index) if self.is_dynamic else None
        self.kernel(q, k, v, out, lse, counter, self.scale, self.ctas, self.heads_per_section)

    def _launch_irregular(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """A tensor that TMA cannot address is copied once; everything else is passed as it is."""
        q, k, v = addressable(q), addressable(k), addressable(v)
        if is_aligned(out):
            self._launch(q, k, v, with_plain_unit_strides(out), lse)
            return
        staged = torch.empty(self.out_shape, dtype=out.dtype, device=self.device)
        self._launch(q, k, v, with_plain_unit_strides(staged), lse)
        out.copy_(staged)


def prepare(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: AttentionOptions, out: torch.Tensor | None
) -> PreparedForward:
    """Check a call and bind it to a kernel, compiling it if need be.

    Raises the errors of `attention_problem`, DeviceError for another GPU, UnsupportedError for missing features, and
    MissingDependencyError or CompileError from the compile layer. Nothing is allocated.
    """
    problem = attention_problem(
        describe("q", q), describe("k", k), describe("v", v), options, dtypes=DTYPES,
        out=None if out is None else describe("out", out),
    )  # fmt: skip
    facts = device_facts(q.device.index)
    check_supported(problem.features, SUPPORTED, f"the forward kernel ({facts.name})")
    plan = plan_forward(problem)
    is_trivial = problem.has_no_output or problem.has_no_keys
    p = problem
    return PreparedForward(
        kernel=None if is_trivial else get_kernel(plan),
        problem=problem,
        out_shape=(p.batch, p.seqlen_q, p.heads, p.head_dim_v),
        lse_shape=(p.batch, p.heads, p.seqlen_q) if options.return_lse else None,
        device=q.device,
        scale=max(abs(p.softmax_scale), SMALLEST_SCALE),
        ctas=max(1, facts.sm_count - p.sm_margin),
        heads_per_section=heads_per_section(
            p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize, p.causal, p.heads, p.batch,
            p.qhead_per_kvhead,
        ),
        is_dynamic=plan.scheduler == "dynamic",
        is_regular=all(has_plain_strides(t) for t in (q, k, v, out) if t is not None),
    )  # fmt: skip
