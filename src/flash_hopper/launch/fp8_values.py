"""v in rows of an e4m3 call on a GPU: its codes in the form of `Fp8Values`, by a launch in front of attention.

Attention multiplies by V^T, so rows are transposed first, in memory of the call: the quantise kernel moves bytes, and codes
stay what they are. `launch/forward_fp8.py` prepares a `Reordering` once per signature and runs it in each call.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flash_hopper.compile.store import get_kernel
from flash_hopper.launch.sequences import Sequences
from flash_hopper.launch.tensors import addressable
from flash_hopper.plan.quantize import QuantizePlan, reorder_plan
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.fp8 import block_count, packed_block_count, packed_rows, padded_rows

CODES = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Reordering:
    """The kernel for a checked signature, the shape of what it makes, and how many CTAs run."""

    kernel: Callable[..., Any]
    shape: tuple[int, ...]
    ctas: int

    def run(self, v: Tensor, sequences: Sequences | None) -> Tensor:
        """The codes of `Fp8Values` for v in rows; rows that no sequence uses are not read, unused keys are 0."""
        codes = torch.empty(self.shape, dtype=CODES, device=v.device)
        lengths = None
        if sequences is not None and not (sequences.cu_seqlens_k is sequences.seqused_k is None):
            lengths = sequences.cu_seqlens_k, sequences.seqused_k
        self.kernel(addressable(v), codes, (None, None, 1), None, None, lengths, 1.0, self.ctas)
        return codes


def prepare_reordering(p: AttentionProblem, sm_count: int) -> Reordering:
    """For a checked problem with keys. Raises MissingDependencyError or CompileError from the compile layer."""
    plan = value_plan(p)
    columns, rows = block_count(p.seqlen_k), padded_rows(p.seqlen_k)
    if plan.is_ragged:
        columns, rows = packed_block_count(p.rows_k, p.batch), packed_rows(p.rows_k, p.batch)
    batch = () if plan.is_ragged else (p.batch,)
    blocks = columns * p.heads_k * (1 if plan.is_ragged else p.batch)
    ctas = min(blocks, max(1, sm_count - p.sm_margin) * plan.ctas_per_sm)
    return Reordering(get_kernel(plan), (*batch, p.heads_k, p.head_dim_v, rows), ctas)


def value_plan(p: AttentionProblem) -> QuantizePlan:
    """The kernel that reorders v in rows."""
    ragged = p.ragged
    return reorder_plan(
        p.head_dim_v,
        is_ragged=ragged is not None and ragged.packed_k,
        has_seqused=ragged is not None and ragged.has_seqused_k,
    )
