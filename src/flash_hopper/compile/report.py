"""What ptxas says about a kernel, and whether that is acceptable.

Called by `build`, which refuses a kernel that spills or whose `setmaxnreg` or wgmma ptxas could not honour, and by
`inspect`. Plain Python.
"""

import re
from dataclasses import dataclass

from flash_hopper.problem.errors import CompileError

# The report file is YAML; the remark is one single-quoted text that spans lines. Quotes inside are doubled.
_REMARK = re.compile(r"ptxas output: (.*?)'\s*(?:\n\.\.\.|\Z)", re.DOTALL)
_REGISTERS = re.compile(r"Used (\d+) registers")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_ADVISORY = re.compile(r"\(C7\d+\)")


@dataclass(frozen=True, slots=True)
class PtxasReport:
    """Registers a thread at launch, stack and spills in bytes a thread, the advisories, and the whole text."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    advisories: tuple[str, ...]
    text: str

    @property
    def faults(self) -> list[str]:
        """Why this kernel is not what its plan promised; empty if it is."""
        faults = list(self.advisories)
        if self.spill_bytes or self.stack_bytes:
            faults.append(f"{self.spill_bytes} bytes of spills, {self.stack_bytes} bytes of stack a thread")
        return faults


def parse_report(yaml_text: str) -> PtxasReport:
    """The report inside a remark file. Raises CompileError if ptxas left none, as a changed compiler might."""
    text = "\n".join(match.replace("''", "'").strip() for match in _REMARK.findall(yaml_text))
    registers = [int(n) for n in _REGISTERS.findall(text)]
    frames = [[int(n) for n in frame] for frame in _FRAME.findall(text)]
    if not registers or len(frames) != len(registers):
        raise CompileError(f"the compiler left no register report that could be read: {yaml_text!r}")
    advisories = tuple(line.strip() for line in text.splitlines() if _ADVISORY.search(line))
    stack = max(frame[0] for frame in frames)
    spills = max(frame[1] + frame[2] for frame in frames)
    return PtxasReport(max(registers), stack, spills, advisories, text)
