"""Plans of the quantise kernel: what it computes of a block of 128 rows of one head, fixed at compile time.

`launch/quantize.py` makes them from a call. One kernel serves all: it loads a block, turns it (rotary), transforms it (Hadamard),
and then, by `purpose`, either

  block      quantises it with the block's own scale, which it writes
  absmax     raises the largest magnitude of the block's group, in memory
  scaled     quantises it with the scale of its group, from what `absmax` has left
  transform  stores it in the dtype of the input
  reorder    stores codes, which the input already has, transposed
"""

from dataclasses import dataclass
from typing import Literal

from flash_hopper.geometry.strips import BLOCK_ROWS, threads_of
from flash_hopper.plan.budget import SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.quantize import RotaryKind

Purpose = Literal["block", "absmax", "scaled", "transform", "reorder"]

MOST_STAGES = 3
TABLE_BYTES = 1024  # maxima of the warps and places of the tiles in flight
THREADS_PER_SM = 512  # 128 registers a thread


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Compile-time choices of the quantise kernel.

    `hadamard`: elements that are transformed together, a power of two, 0 for none; `rotary_dim`: how many elements are turned;
    `has_wide_table`: cos and sin are float32, else of the dtype; `has_offsets`: positions start at a number of each sequence;
    `is_transposed`: codes are written as V^T.
    """

    dtype: DType
    head_dim: int
    purpose: Purpose
    is_transposed: bool
    hadamard: int
    has_signs: bool
    rotary: RotaryKind
    rotary_dim: int
    has_wide_table: bool
    has_offsets: bool
    is_ragged: bool
    has_seqused: bool

    kind = "quantize"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return threads_of(self.head_dim)

    @property
    def block_bytes(self) -> int:
        """Of a block of the input, which is one stage."""
        return BLOCK_ROWS * self.head_dim * self.dtype.itemsize

    @property
    def stages(self) -> int:
        """Blocks in shared memory: one that is computed, the others on their way."""
        return max(1, min(MOST_STAGES, self._room // self.block_bytes))

    @property
    def ctas_per_sm(self) -> int:
        """CTAs of an SM, as shared memory and registers allow."""
        by_memory = self._room // (self.stages * self.block_bytes + TABLE_BYTES + SMEM_RESERVED_BYTES)
        return max(1, min(by_memory, THREADS_PER_SM // self.threads))

    @property
    def _room(self) -> int:
        return SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - TABLE_BYTES

    @property
    def name(self) -> str:
        """Readable and unique among these plans."""
        parts = [
            "quantize",
            self.purpose,
            str(self.dtype),
            f"d{self.head_dim}",
            "vt" if self.is_transposed else "",
            f"h{self.hadamard}" if self.hadamard else "",
            "signs" if self.has_signs else "",
            f"{self.rotary}{self.rotary_dim}" if self.rotary != "none" else "",
            "wide" if self.has_wide_table else "",
            "offsets" if self.has_offsets else "",
            "ragged" if self.is_ragged else "",
            "used" if self.has_seqused else "",
        ]
        return "_".join(part for part in parts if part)


def reorder_plan(head_dim: int, is_ragged: bool, has_seqused: bool) -> QuantizePlan:
    """The kernel that makes the codes of `Fp8Values` from rows of codes."""
    return QuantizePlan(
        dtype=DType.E4M3,
        head_dim=head_dim,
        purpose="reorder",
        is_transposed=True,
        hadamard=0,
        has_signs=False,
        rotary="none",
        rotary_dim=0,
        has_wide_table=False,
        has_offsets=False,
        is_ragged=is_ragged,
        has_seqused=has_seqused,
    )
