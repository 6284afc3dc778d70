"""Plans of the quantise kernel: what it computes of a block of 128 rows of one head, fixed at compile time.

`launch/quantize.py` makes them from a call, by `plan_quantize`. One kernel serves all: it loads a block, turns it (rotary), transforms it (Hadamard),
and then, by `purpose`, either

  block      quantises it with the block's own scale, which it writes
  absmax     raises the largest magnitude of the block's group, in memory
  scaled     quantises it with the scale of its group, from what `absmax` has left
  transform  stores it in the dtype of the input
  reorder    stores codes, which the input already has, transposed
"""

from dataclasses import dataclass
from typing import Any, Literal

from flash_hopper.geometry.strips import BLOCK_ROWS, CHUNK_BYTES, LONG_STRIP, STRIP, threads_of
from flash_hopper.plan.budget import SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.roles import REGISTER_FILE, WARP
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.quantize import RotaryKind

Purpose = Literal["block", "absmax", "scaled", "transform", "reorder"]

MOST_STAGES = 3
TABLE_BYTES = 2048  # maxima and signs, and, for each warp, the places of the blocks in flight
PLAIN: dict[str, Any] = {
    "is_transposed": False, "hadamard": 0, "has_signs": False, "rotary": "none", "rotary_dim": 0, "has_wide_table": False,
    "has_offsets": False, "is_ragged": False, "has_seqused": False,
}  # fmt: skip
# Of a thread: a float32 for each element, and what a block's places take. ptxas takes 168 where 151 to 155 do (2026-11)
STRIP_REGISTERS = {STRIP: 128, LONG_STRIP: 168}
CODE_REGISTERS = 64  # of a thread that moves codes: 64 bytes


@dataclass(frozen=True, slots=True)
class QuantizePlan:
    """Compile-time choices of the quantise kernel.

    `hadamard`: elements that are transformed together, a power of two, 0 for none; `rotary_dim`: how many elements are turned;
    `has_wide_table`: cos and sin are float32, else of the dtype; `has_offsets`: positions start at a number of each sequence;
    `is_transposed`: codes are written as V^T. `strip`: elements of a thread; `ctas_per_sm`: CTAs that an SM is to hold;
    `by_warp`: each warp loads, computes and stores rows of its own, and meets the others only for the scale. It pays at head dim
    256, not below (16k rows of 2048 bf16, by warp and by CTA, in us of an H200: d = 64 34.1 and 33.3, d = 128 33.4 and 32.4,
    d = 256 39.6 and 40.7; 2026-11).
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
    strip: int
    ctas_per_sm: int
    by_warp: bool

    kind = "quantize"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return threads_of(self.head_dim, self.strip)

    @property
    def block_bytes(self) -> int:
        """Of a block of the input, which is one stage."""
        return block_bytes(self.head_dim, self.dtype)

    @property
    def stages(self) -> int:
        """Blocks in shared memory: one that is computed, the others on their way."""
        return max(1, stages_for(self.ctas_per_sm, self.block_bytes))

    @property
    def exchanges(self) -> bool:
        """Whether two lanes that share a Hadamard block end with half of the columns of both strips, else with a strip each."""
        return self.strip == LONG_STRIP and self.hadamard > self.strip and self.purpose != "transform"

    @property
    def loads_late(self) -> bool:
        """Whether the next block's load is started between reading and transforming one, which hides its arithmetic; there must
        be registers for both."""
        return self.exchanges and self.stages > 1 and not self.is_ragged

    @property
    def result_period(self) -> int:
        """Chunks of the result, in rows, that are swizzled the same way: what a thread, or two that exchange, have of it."""
        out_bytes = self.dtype.itemsize if self.purpose == "transform" else 1
        return self.strip * out_bytes // CHUNK_BYTES * (2 if self.exchanges else 1)

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
            f"s{self.strip}x{self.ctas_per_sm}",
            "warps" if self.by_warp else "",
        ]
        return "_".join(part for part in parts if part)


def block_bytes(head_dim: int, dtype: DType) -> int:
    """Of 128 rows of a head."""
    return BLOCK_ROWS * head_dim * dtype.itemsize


def stages_for(ctas: int, stage_bytes: int) -> int:
    """Stages of each of so many CTAs of an SM."""
    each = SMEM_LIMIT_BYTES // ctas - SMEM_RESERVED_BYTES - TABLE_BYTES
    return min(MOST_STAGES, each // stage_bytes)


def plan_quantize(
    dtype: DType,
    head_dim: int,
    purpose: Purpose,
    *,
    strip: int | None = None,
    ctas: int | None = None,
    by_warp: bool | None = None,
    **work: Any,
) -> QuantizePlan:
    """The plan for a kind of work: strip, CTAs of an SM and teams as given, or those that are best for it.

    work: the other fields of `QuantizePlan`, as far as they are not those of `PLAIN`.
    """
    what = PLAIN | work
    is_transposed = what["is_transposed"]
    if strip is None:
        is_long = what["rotary"] == "none" and not is_transposed and threads_of(head_dim, LONG_STRIP) % WARP == 0
        strip = LONG_STRIP if is_long else STRIP
    if ctas is None:
        registers = CODE_REGISTERS if purpose == "reorder" else STRIP_REGISTERS[strip]
        ctas = ctas_for(registers * threads_of(head_dim, strip), block_bytes(head_dim, dtype))
    if by_warp is None:
        by_warp = not is_transposed and head_dim > LONG_STRIP and may_be_by_warp(head_dim, dtype, ctas)
    return QuantizePlan(dtype, head_dim, purpose, strip=strip, ctas_per_sm=ctas, by_warp=by_warp, **what)


def may_be_by_warp(head_dim: int, dtype: DType, ctas: int) -> bool:
    """Whether a warp has whole rows, which it reads in whole ones at a time, and blocks follow each other in several stages."""
    row_chunks = head_dim * dtype.itemsize // CHUNK_BYTES
    return WARP % row_chunks == 0 and stages_for(ctas, block_bytes(head_dim, dtype)) > 1


def ctas_for(registers: int, stage_bytes: int) -> int:
    """As many CTAs, with so many registers each, as an SM has room for with a block on its way while one is computed."""
    ctas = max(1, REGISTER_FILE // registers)
    while ctas > 1 and stages_for(ctas, stage_bytes) < 2:
        ctas -= 1
    return ctas


def reorder_plan(head_dim: int, is_ragged: bool, has_seqused: bool) -> QuantizePlan:
    """The kernel that makes the codes of `Fp8Values` from rows of codes."""
    return plan_quantize(
        DType.E4M3, head_dim, "reorder", is_transposed=True, is_ragged=is_ragged, has_seqused=has_seqused
    )
