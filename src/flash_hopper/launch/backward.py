"""The backward on a GPU: gradients of q, k and v from what the forward saved.

`prepare_backward` binds a forward problem and what is asked of its backward to kernels, once; `PreparedBackward.run`
allocates and launches. Work for gradients that nobody needs is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flash_hopper.compile.store import get_kernel
from flash_hopper.geometry.arith import round_up
from flash_hopper.geometry.masks import kernel_bounds
from flash_hopper.geometry.tiles import heads_per_section
from flash_hopper.launch.device import device_facts, tile_counter
from flash_hopper.launch.sequences import Sequences
from flash_hopper.launch.tensors import addressable
from flash_hopper.plan.backward import STATISTICS_ROWS, BackwardPlans, BackwardRequest, plan_backward
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.mask import Mask

Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class PreparedBackward:
    """A backward bound to its kernels; those that it does not need are None, all of them if nothing is to be computed."""

    problem: AttentionProblem
    request: BackwardRequest
    plans: BackwardPlans
    device_index: int
    ctas: int
    mask: Mask  # simplified
    preprocess: Kernel | None
    dkdv: Kernel | None
    dq: Kernel | None
    postprocess: Kernel | None
    postprocess_dk: Kernel | None
    postprocess_dv: Kernel | None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        sequences: Sequences | None = None,
        into: Gradients | None = None,
    ) -> Gradients:
        """(dq, dk, dv) in the dtype of q, contiguous, None where not needed.

        out, lse: as the forward returned them; dout: like out, any strides; dlse: like lse, if `request.has_dlse`; into, if
        `request.accumulates`: float32 tensors like q, k and v, None where not needed, last stride 1, to which the gradients
        are added, and which are returned.
        """
        assert self.request.accumulates == (into is not None), "prepared for another call"
        if torch._C._cuda_getDevice() != self.device_index:
            with torch.cuda.device(self.device_index):
                return self.run(q, k, v, out, lse, dout, dlse, sequences, into)
        dq, dk, dv = self._allocate(q, k, v) if into is None else into
        if self.preprocess is None:
            if into is None:
                for gradient in (dq, dk, dv):
                    if gradient is not None:
                        gradient.zero_()
            return dq, dk, dv
        q, k, v, out, dout = (addressable(t) for t in (q, k, v, out, dout))
        statistics, accumulator = self._workspace(q)
        p = self.problem
        self.preprocess(out, dout, lse, dlse, statistics, accumulator)
        if self.dq is not None:
            section = heads_per_section(
                p.seqlen_k * _row_bytes(p), self._is_masked, p.heads, p.batch, p.qhead_per_kvhead
            )
            self.dq(
                q,
                k,
                v,
                dout,
                dq,
                statistics,
                self._counter(),
                *kernel_bounds(self.mask),
                p.softmax_scale,
                self.ctas,
                section,
            )
        if dk is not None and dv is not None:
            self._run_dkdv(q, k, v, dout, dk, dv, statistics, accumulator)
        if self.postprocess is not None:
            self.postprocess(accumulator, dq, p.softmax_scale)
        return dq, dk, dv

    def _allocate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Gradients:
        needs_dq, needs_dkdv = self.request.needs_dq, self.request.needs_dkdv
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if needs_dq else None
        dk = torch.empty(k.shape, dtype=q.dtype, device=q.device) if needs_dkdv else None
        dv = torch.empty(v.shape, dtype=q.dtype, device=q.device) if needs_dkdv else None
        return dq, dk, dv

    def _run_dkdv(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dout: torch.Tensor,
        dk: torch.Tensor,
        dv: torch.Tensor,
        statistics: torch.Tensor,
        accumulator: torch.Tensor | None,
    ) -> None:
        """The key-parallel kernel; dK and dV of grouped queries go through float32 accumulators if its plan says so."""
        p, plan = self.problem, self.plans.dkdv
        assert self.dkdv is not None and plan is not None, "dK and dV are asked for"
        dk_target, dv_target = dk, dv
        if plan.adds_dkdv:
            keys = round_up(p.seqlen_k, plan.tile_n)
            dk_target, dv_target = (
                torch.zeros((p.batch, p.heads_k, keys * cols), dtype=torch.float32, device=q.device)
                for cols in (plan.tile_hdim, plan.tile_hdimv)
            )
        heads, group = (p.heads, 1) if plan.adds_dkdv else (p.heads_k, p.qhead_per_kvhead)
        section = heads_per_section(p.seqlen_q * group * _row_bytes(p), self._is_masked, heads, p.batch, 1)
        self.dkdv(
            q, k, v, dout, dk_target, dv_target, statistics, accumulator, self._counter(), *kernel_bounds(self.mask),
            p.softmax_scale, self.ctas, section,
        )  # fmt: skip
        if self.postprocess_dk is not None and self.postprocess_dv is not None:
            self.postprocess_dk(dk_target, dk, p.softmax_scale)
            self.postprocess_dv(dv_target, dv, 1.0)

    def _workspace(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Statistics (2, batch, heads, rows) and, if dQ is added up, its accumulator; float32, linear in seqlen_q."""
        p, dkdv = self.problem, self.plans.dkdv
        rows = round_up(p.seqlen_q, STATISTICS_ROWS if dkdv is None else dkdv.tile_m)
        statistics = torch.empty((2, p.batch, p.heads, rows), dtype=torch.float32, device=q.device)
        if dkdv is None or not dkdv.adds_dq:
            return statistics, None
        shape = (p.batch, p.heads, rows * dkdv.tile_hdim)
        return statistics, torch.empty(shape, dtype=torch.float32, device=q.device)

    @property
    def _is_masked(self) -> bool:
        """Tiles differ in length."""
        return self.mask.kind != "full"

    def _counter(self) -> torch.Tensor | None:
        return tile_counter(self.device_index) if self._is_masked else None


def _row_bytes(p: AttentionProblem) -> int:
    return (p.head_dim + p.head_dim_v) * p.dtype.itemsize


@lru_cache(maxsize=4096)
def prepare_backward(problem: AttentionProblem, request: BackwardRequest, device_index: int) -> PreparedBackward:
    """Bind a checked problem to its backward kernels, compiling them if need be.

    Raises MissingDependencyError or CompileError from the compile layer. Support was checked at the forward call.
    """
    plans = plan_backward(problem, request)

    is_trivial = problem.has_no_output or problem.has_no_keys

    def kernel(plan: Any) -> Kernel | None:
        return None if plan is None or is_trivial else get_kernel(plan)

    return PreparedBackward(
        problem=problem,
        request=request,
        plans=plans,
        device_index=device_index,
        ctas=max(1, device_facts(device_index).sm_count - problem.sm_margin),
        mask=problem.mask.simplified(problem.seqlen_q, problem.seqlen_k),
        preprocess=kernel(plans.preprocess),
        dkdv=kernel(plans.dkdv),
        dq=kernel(plans.dq),
        postprocess=kernel(plans.postprocess),
        postprocess_dk=kernel(plans.postprocess_dk),
        postprocess_dv=kernel(plans.postprocess_dv),
    )
