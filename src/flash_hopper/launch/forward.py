"""The forward on a GPU: from checked tensors to a running kernel.

`prepare` does everything that depends on shapes, strides and flags only, once per signature; `PreparedForward.run` is
what every later call does: allocate and launch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flash_hopper.compile.load import as_argument
from flash_hopper.compile.store import get_kernel
from flash_hopper.geometry.masks import kernel_bounds
from flash_hopper.geometry.tiles import query_heads_per_section, rows_per_section
from flash_hopper.kernels.forward.support import DTYPES, SUPPORTED
from flash_hopper.launch.device import device_facts, tile_counter
from flash_hopper.launch.ragged import (
    RaggedLaunch,
    addressable_rows,
    first_entry,
    is_viewable,
    most_tiles,
    ragged_launch,
    viewable,
)
from flash_hopper.launch.sequences import Sequences, described_problem
from flash_hopper.launch.tensors import (
    ALIGN_BYTES,
    addressable,
    has_plain_strides,
    is_aligned,
    result_shapes,
    with_plain_unit_strides,
)
from flash_hopper.plan.forward import ForwardPlan, plan_forward
from flash_hopper.plan.forward_fp8 import ForwardFp8Plan
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem
from flash_hopper.problem.dtypes import DType
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
    bounds: tuple[int | None, int | None, int | None]  # left, right, chunk
    ctas: int
    section: int
    is_dynamic: bool
    is_regular: bool  # strides can be passed as they are
    ragged: RaggedLaunch | None

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        sequences: Sequences | None = None,
    ) -> Result:
        """(out, lse or None) for tensors of exactly the signature that was prepared."""
        index = self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(q, k, v, out, sequences)
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
            self._launch(q, k, v, out, lse, sequences)
        else:
            self._launch_irregular(q, k, v, out, lse, sequences)
        return out, lse

    def _launch_irregular(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sequences: Sequences | None,
    ) -> None:
        """A tensor that the kernel's views cannot address is copied once; everything else is passed as it is."""
        is_ragged = sequences is not None
        q, k, v = map(addressable_rows if is_ragged else addressable, (q, k, v))
        plain = with_plain_unit_strides(out)
        if is_ragged:
            plain = viewable(plain)
        if is_aligned(out) and (not is_ragged or is_viewable(plain)):
            self._launch(q, k, v, plain, lse, sequences)
            return
        staged = torch.empty(out.shape, dtype=out.dtype, device=self.device)
        self._launch(q, k, v, staged, lse, sequences)
        out.copy_(staged)

    def _launch(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sequences: Sequences | None,
    ) -> None:
        """Tensors that the kernel's views can address, to one call into the compiled library."""
        assert self.kernel is not None
        launch = self.ragged
        if launch is None or sequences is None:
            counter = tile_counter(self.device.index) if self.is_dynamic else None
            self.kernel(q, k, v, out, lse, counter, None, *self.bounds, self.scale, self.ctas, self.section)
            return
        of_q = of_k = of_v = of_out = of_lse = 0
        if not launch.packed_q:
            q, of_q = first_entry(q)
            out, of_out = first_entry(out)
            if lse is not None:
                lse, of_lse = first_entry(lse)
        if not launch.packed_k:
            k, of_k = first_entry(k)
            v, of_v = first_entry(v)
        entries = (of_q, of_k, of_v, of_out, of_lse)
        table = launch.forward_table(self.device.index)
        ragged = as_argument((table.data_ptr(), launch.sequences, entries, launch.lengths(sequences)))
        self.kernel(q, k, v, out, lse, None, ragged, *self.bounds, self.scale, self.ctas, self.section)


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    options: AttentionOptions,
    out: torch.Tensor | None,
    sequences: Sequences | None = None,
    plan: ForwardPlan | None = None,
) -> PreparedForward:
    """Check a call and bind it to a kernel, compiling it if need be. `plan`: this one of the problem's plans, as `tune` tries them.

    Raises the errors of `problem`, DeviceError for another GPU, UnsupportedError for missing features, and
    MissingDependencyError or CompileError from the compile layer. Nothing is allocated.
    """
    p = described_problem(q, k, v, options, out, sequences, dtypes=DTYPES)
    facts = device_facts(q.device.index)
    check_supported(p.features, SUPPORTED, f"the forward kernel ({facts.name})")
    if plan is None:
        plan = plan_forward(p, facts.name)
    is_trivial = p.has_no_output or p.has_no_keys
    ctas, section = grid_of(p, plan, facts.sm_count)
    _, lse_shape = result_shapes(p)
    return PreparedForward(
        kernel=None if is_trivial else get_kernel(plan),
        problem=p,
        out_shape=(*q.shape[:-1], p.head_dim_v),
        lse_shape=lse_shape if options.return_lse else None,
        device=q.device,
        scale=max(abs(p.softmax_scale), SMALLEST_SCALE),
        bounds=kernel_bounds(p.mask.simplified(p.seqlen_q, p.seqlen_k)),
        ctas=ctas,
        section=section,
        is_dynamic=plan.scheduler == "dynamic" and not plan.is_ragged,
        is_regular=all(_is_regular(t, p.ragged is not None) for t in (q, k, v, out) if t is not None),
        ragged=None if p.ragged is None else ragged_launch(p),
    )


def grid_of(p: AttentionProblem, plan: ForwardPlan | ForwardFp8Plan, sm_count: int) -> tuple[int, int]:
    """How many CTAs may run, and how many heads (of a ragged batch: rows) run side by side."""
    ctas = max(1, sm_count - p.sm_margin)
    is_uneven = plan.mask in ("causal", "local")
    reach = p.mask.reach(p.seqlen_k)
    columns = p.head_dim + p.head_dim_v
    if p.ragged is None:
        # e4m3 as if it had 16 bits: sections of as many pairs are best (docs/findings/fp8.md)
        pair_bytes, rows = reach * columns * DType.BF16.itemsize, ctas * plan.tile_m * plan.streams
        return ctas, query_heads_per_section(pair_bytes, is_uneven, p.heads, p.batch, p.qhead_per_kvhead, rows)
    tiles = most_tiles(p.ragged.rows_q, p.batch, plan.tile_m) * p.heads
    return min(ctas, tiles), rows_per_section(columns * p.dtype.itemsize, is_uneven)


def _is_regular(tensor: torch.Tensor, is_ragged: bool) -> bool:
    """True if the strides can be passed as they are."""
    return has_plain_strides(tensor) and (not is_ragged or is_viewable(tensor))
