"""The backward on a GPU: gradients of q, k and v from what the forward saved.

`prepare_backward` binds a forward problem and what is asked of its backward to kernels, once; `PreparedBackward.run`
allocates and launches. Work for gradients that nobody needs is left out.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from flash_hopper.compile.load import as_argument
from flash_hopper.compile.store import get_kernel
from flash_hopper.geometry.arith import ceil_div, round_up
from flash_hopper.geometry.masks import kernel_bounds
from flash_hopper.geometry.tiles import (
    KEY_SECTION_BYTES,
    KEY_SECTION_ROUNDS,
    heads_per_section,
    query_heads_per_section,
    rows_per_section,
)
from flash_hopper.launch.device import device_facts, tile_counter
from flash_hopper.launch.ragged import (
    RaggedLaunch,
    addressable_rows,
    first_entry,
    most_tiles,
    ragged_launch,
)
from flash_hopper.launch.sequences import Sequences
from flash_hopper.launch.tensors import addressable
from flash_hopper.plan.backward import STATISTICS_ROWS, BackwardPlans, BackwardRequest, plan_backward
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
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
    ragged: RaggedLaunch | None

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
        gradients = self._allocate(q, k, v) if into is None else into
        if self.preprocess is None:
            for gradient in gradients if into is None else ():
                if gradient is not None:
                    gradient.zero_()
            return gradients
        targets = gradients if into is None else self._with_both(into, k, v)
        passed = addressable if self.ragged is None else addressable_rows
        self._launch(
            Operands(passed(q), passed(k), passed(v), passed(out), lse, passed(dout), dlse, *targets), sequences
        )
        return gradients

    def _with_both(self, into: Gradients, k: torch.Tensor, v: torch.Tensor) -> Gradients:
        """A kernel computes dK and dV together: the one that a caller does not want goes where nobody looks."""
        dq, dk, dv = into
        if self.request.needs_dkdv:
            dk, dv = (
                torch.empty(like.shape, dtype=torch.float32, device=like.device) if target is None else target
                for target, like in ((dk, k), (dv, v))
            )
        return dq, dk, dv

    def _allocate(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Gradients:
        needs_dq, needs_dkdv = self.request.needs_dq, self.request.needs_dkdv
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device) if needs_dq else None
        dk = torch.empty(k.shape, dtype=q.dtype, device=q.device) if needs_dkdv else None
        dv = torch.empty(v.shape, dtype=q.dtype, device=q.device) if needs_dkdv else None
        return dq, dk, dv

    def _launch(self, given: "Operands", sequences: Sequences | None) -> None:
        """All kernels in order."""
        p = self.problem
        statistics, accumulator = self._workspace(given.q.device)
        call = None
        if self.ragged is not None:
            assert sequences is not None, "prepared for a ragged batch"
            given, call = self._ragged_call(self.ragged, given, sequences)
        assert self.preprocess is not None, "something is to be computed"
        self.preprocess(
            given.out, given.dout, given.lse, given.dlse, statistics, accumulator,
            call and call.args(_OF_PREPROCESS, is_first=True),
        )  # fmt: skip
        if self.dq is not None:
            assert self.plans.dq is not None, "its plan was compiled"
            ctas, section = self._grid_of_queries(self.plans.dq.tile_m)
            self.dq(
                given.q, given.k, given.v, given.dout, given.dq, statistics, self._counter(),
                call and call.args(_OF_DQ),
                *kernel_bounds(self.mask), p.softmax_scale, ctas, section,
            )  # fmt: skip
        if given.dk is not None and given.dv is not None:
            self._run_dkdv(given, statistics, accumulator, call)
        if self.postprocess is not None:
            self.postprocess(accumulator, given.dq, call and call.args(_DQ), p.softmax_scale)

    def _run_dkdv(
        self,
        given: "Operands",
        statistics: torch.Tensor,
        accumulator: torch.Tensor | None,
        call: "RaggedCall | None",
    ) -> None:
        """The key-parallel kernel; dK and dV of grouped queries go through float32 accumulators if its plan says so."""
        p, plan = self.problem, self.plans.dkdv
        assert self.dkdv is not None and plan is not None, "dK and dV are asked for"
        dk_target, dv_target = given.dk, given.dv
        rows = _OF_DKDV
        if plan.adds_dkdv:
            entries, keys = self._padded(p.seqlen_k, p.rows_k, plan.tile_n)
            dk_target, dv_target = (
                torch.zeros((entries, p.heads_k, keys * cols), dtype=torch.float32, device=given.q.device)
                for cols in (plan.tile_hdim, plan.tile_hdimv)
            )
            rows = _INPUTS_OF_DKDV
        ctas, section = self._grid_of_keys(plan.tile_n)
        self.dkdv(
            given.q, given.k, given.v, given.dout, dk_target, dv_target, statistics, accumulator, self._counter(),
            call and call.args(rows), *kernel_bounds(self.mask), p.softmax_scale, ctas, section,
        )  # fmt: skip
        if self.postprocess_dk is not None and self.postprocess_dv is not None:
            self.postprocess_dk(dk_target, given.dk, call and call.args(_DK), p.softmax_scale)
            self.postprocess_dv(dv_target, given.dv, call and call.args(_DV), 1.0)

    def _ragged_call(
        self, launch: RaggedLaunch, given: "Operands", sequences: Sequences
    ) -> "tuple[Operands, RaggedCall]":
        """Operands as the kernels of a ragged batch take them, and what these are told beside them."""
        table, lengths = launch.table(self.device_index), launch.lengths(sequences, *self._multiples)
        entries = [0] * len(given)
        if not (launch.packed_q and launch.packed_k):
            is_packed = {"q": launch.packed_q, "k": launch.packed_k}
            found: list[Any] = list(given)
            for i, (tensor, side) in enumerate(zip(given, _SIDES, strict=True)):
                if tensor is not None and not is_packed[side]:
                    found[i], entries[i] = first_entry(tensor)
            given = Operands(*found)
        return given, RaggedCall(table, launch.sequences, entries, lengths)

    def _workspace(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Statistics (2, batch, heads, rows) and, if dQ is added up, its accumulator; float32, linear in the rows of q."""
        p, dkdv = self.problem, self.plans.dkdv
        entries, rows = self._padded(p.seqlen_q, p.rows_q, self._multiples[0])
        statistics = torch.empty((2, entries, p.heads, rows), dtype=torch.float32, device=device)
        if dkdv is None or not dkdv.adds_dq:
            return statistics, None
        shape = (entries, p.heads, rows * dkdv.tile_hdim)
        return statistics, torch.empty(shape, dtype=torch.float32, device=device)

    def _padded(self, seqlen: int, rows: int, multiple: int) -> tuple[int, int]:
        """Entries of a padded buffer and rows of each; of a ragged batch all sequences are one entry, and each starts a new
        block, as do the rows behind them."""
        if self.problem.ragged is None:
            return self.problem.batch, round_up(seqlen, multiple)
        return 1, (rows + (self.problem.batch + 1) * multiple) // multiple * multiple

    @property
    def _multiples(self) -> tuple[int, int]:
        """What the first padded row of a sequence's queries, and of its keys, is a multiple of."""
        dkdv = self.plans.dkdv
        return (STATISTICS_ROWS, 1) if dkdv is None else (dkdv.tile_m, dkdv.tile_n)

    @property
    def _is_uneven(self) -> bool:
        """Whether some tiles visit more blocks than others."""
        return self.mask.kind in ("causal", "local")

    def _grid_of_queries(self, tile_rows: int) -> tuple[int, int]:
        """How many CTAs may run, and how many heads (of a ragged batch: rows) run side by side, for tiles of queries."""
        p = self.problem
        row_bytes = (p.head_dim + p.head_dim_v) * p.dtype.itemsize
        if p.ragged is not None:
            tiles = most_tiles(p.rows_q, p.batch, tile_rows) * p.heads
            return min(self.ctas, tiles), rows_per_section(row_bytes, self._is_uneven)
        pair_bytes = self.mask.reach(p.seqlen_k) * row_bytes
        return self.ctas, query_heads_per_section(
            pair_bytes, self._is_uneven, p.heads, p.batch, p.qhead_per_kvhead, self.ctas * tile_rows
        )

    def _grid_of_keys(self, tile_rows: int) -> tuple[int, int]:
        """The same for tiles of keys."""
        p, plan = self.problem, self.plans.dkdv
        assert plan is not None, "dK and dV are asked for"
        heads, visited = (p.heads, 1) if plan.adds_dkdv else (p.heads_k, p.qhead_per_kvhead)  # query heads of a tile
        accumulated = plan.tile_hdim * DType.FP32.itemsize if plan.adds_dq else 0
        row_bytes = ((p.head_dim + p.head_dim_v) * p.dtype.itemsize + accumulated) * visited
        if p.ragged is not None:
            tiles = most_tiles(p.rows_k, p.batch, tile_rows) * heads
            return min(self.ctas, tiles), rows_per_section(row_bytes, self._is_uneven, KEY_SECTION_BYTES)
        pair_bytes = self.mask.reach(p.seqlen_q) * row_bytes
        least = KEY_SECTION_ROUNDS * self.ctas // max(1, ceil_div(p.seqlen_k, tile_rows))
        return self.ctas, heads_per_section(pair_bytes, self._is_uneven, heads, p.batch, 1, KEY_SECTION_BYTES, least)

    def _counter(self) -> torch.Tensor | None:
        is_dynamic = self.mask.kind != "full" and self.problem.ragged is None
        return tile_counter(self.device_index) if is_dynamic else None


class Operands(NamedTuple):
    """What a backward reads and writes."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    dv: torch.Tensor | None


_SIDES = ["k" if name in ("k", "v", "dk", "dv") else "q" for name in Operands._fields]


def _places(*names: str) -> tuple[int, ...]:
    """Where these are in `Operands`."""
    return tuple(map(Operands._fields.index, names))


_OF_PREPROCESS = _places("out", "dout", "lse", "dlse")
_OF_DQ = _places("q", "k", "v", "dout", "dq")
_OF_DKDV = _places("q", "k", "v", "dout", "dk", "dv")
_INPUTS_OF_DKDV = _OF_DKDV[:4]
_DQ, _DK, _DV = _places("dq"), _places("dk"), _places("dv")


class RaggedCall(NamedTuple):
    """What the kernels of one ragged call are told beside tensors. entries: in the order of `Operands`."""

    table: torch.Tensor
    sequences: int
    entries: list[int]
    lengths: tuple[int, ...]

    def args(self, places: tuple[int, ...], is_first: bool = False) -> Any:
        """`RaggedArgs` for a kernel with the operands in these places; the first one gets the lengths."""
        entries = tuple([self.entries[i] for i in places])
        return as_argument((self.table.data_ptr(), self.sequences, entries, self.lengths if is_first else None))


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
        ragged=None if problem.ragged is None else ragged_launch(problem),
    )
