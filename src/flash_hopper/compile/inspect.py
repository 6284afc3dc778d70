"""What a compiled kernel is made of: registers, spills, shared memory, instructions.

`kernel_report(plan)` compiles a plan offline and looks inside; `flash-hopper inspect --sass` prints it, `tests/compile`
asserts on it. Needs the DSL and nvdisasm, no GPU.
"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flash_hopper.compile.key import Plan
from flash_hopper.compile.report import PtxasReport
from flash_hopper.compile.sass import by_kernel, count_instructions, disassemble, disassembler
from flash_hopper.compile.target import toolkit

if TYPE_CHECKING:
    from flash_hopper.compile.build import Built, Trace

# What to look for in a kernel of this kind, and what it tells.
NOTABLE = {
    "HGMMA": "warpgroup MMA, 16-bit (SS: both operands in shared memory, RS: first in registers)",
    "QGMMA": "warpgroup MMA, 8-bit",
    "WARPGROUP": "fences and waits around MMAs",
    "UTMALDG": "TMA loads",
    "UTMASTG": "TMA stores",
    "UTMAREDG": "TMA reductions",
    "SYNCS": "mbarrier operations",
    "BAR": "named barriers",
    "USETMAXREG": "register reallocation",
    "MUFU.EX2": "exponentials",
    "MUFU": "all special functions",
    "FFMA": "fused multiply-adds",
    "FMUL": "multiplications",
    "FMNMX": "maxima",
    "VIMNMX": "integer maxima",
    "VIMNMX3": "integer maxima of three",
    "F2FP": "conversions to 16 or 8 bit",
    "PRMT": "byte permutations",
    "SHFL": "shuffles",
    "STSM": "matrix stores to shared memory",
    "LDSM": "matrix loads from shared memory",
    "ACQBULK": "waits for the previous kernel",
    "PREEXIT": "releases of the next kernel",
    "LDL": "reads of spilled registers",
    "STL": "writes of spilled registers",
}


@dataclass(frozen=True, slots=True)
class KernelReport:
    """A compiled plan in numbers. `kernels` counts full mnemonics (see `count`) of each kernel, of which that of a ragged batch may
    have a second one, the writer of its table; `object_bytes` is the object file with host code and machine code; `seconds`
    went into compiling."""

    name: str
    ptxas: PtxasReport
    kernels: dict[str, dict[str, int]]
    cubin_bytes: int
    object_bytes: int
    seconds: float

    @property
    def instructions(self) -> dict[str, int]:
        """Of all kernels together."""
        return dict(sum(map(Counter, self.kernels.values()), Counter()))

    def count(self, mnemonic: str) -> int:
        """Instructions whose mnemonic has these leading parts, in order: `HGMMA.RS` counts `HGMMA.64x80x16...RS`."""
        return sum(self.counts(mnemonic))

    def counts(self, mnemonic: str) -> list[int]:
        """The same for each kernel."""
        head, *rest = mnemonic.split(".")
        return [
            sum(n for op, n in each.items() if _matches(op.split("."), head, rest)) for each in self.kernels.values()
        ]

    @property
    def notable(self) -> dict[str, int]:
        """`NOTABLE` instructions that occur, with their number."""
        counts = {op: self.count(op) for op in NOTABLE}
        for op in ("HGMMA", "QGMMA"):
            counts |= {f"{op}.{kind}": self.count(f"{op}.{kind}") for kind in ("SS", "RS")}
        return {op: n for op, n in sorted(counts.items()) if n}


def kernel_report(plan: Plan, trace: "Trace | None" = None, *, strict: bool = False) -> KernelReport:
    """Compile a plan and look inside. With `strict` a kernel that spills is a CompileError, as it is for `get_kernel`.

    Raises MissingDependencyError without the DSL or nvdisasm, before compiling.
    """
    toolkit()
    disassembler()
    from flash_hopper.compile.build import build

    return examine(build(plan, trace, artifacts=True, strict=strict))


def examine(built: "Built") -> KernelReport:
    """The report of a kernel that was built with artifacts."""
    assert built.cubin is not None, "artifacts were not asked for"
    kernels = {name: count_instructions(text) for name, text in by_kernel(disassemble(built.cubin)).items()}
    return KernelReport(built.symbol, built.report, kernels, len(built.cubin), len(built.object_code), built.seconds)


def _matches(parts: list[str], head: str, rest: list[str]) -> bool:
    """True if parts starts with head and holds the parts of rest in order."""
    following = iter(parts[1:])
    return parts[0] == head and all(part in following for part in rest)
