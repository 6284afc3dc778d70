"""Machine code as text: finds a disassembler and counts instructions.

Called by `inspect`. Plain Python; the disassembler is NVIDIA's nvdisasm from its wheel, a CUDA toolkit or triton's wheel.
"""

import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

from flash_hopper import settings
from flash_hopper.problem.errors import CompileError, MissingDependencyError

INSTALL_DISASSEMBLER = 'pip install "nvidia-cuda-nvdisasm>=13.4"'
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9a-z_.]*)(.*)")
_KERNEL = re.compile(r"^\.text\.(\w+):$", re.MULTILINE)
_WGMMA = ("HGMMA", "QGMMA", "IGMMA")


def disassembler() -> Path:
    """nvdisasm: from its wheel, a toolkit, the path or triton's wheel. Raises MissingDependencyError."""
    site = Path(sysconfig.get_path("purelib"))
    folders = [*sorted((site / "nvidia").glob("cu*/bin"), reverse=True), site / "nvidia" / "cuda_nvdisasm" / "bin"]
    folders += [settings.cuda_home() / "bin", *map(Path, settings.search_path().split(os.pathsep))]
    folders.append(site / "triton" / "backends" / "nvidia" / "bin")
    found = next(filter(None, (shutil.which("nvdisasm", path=str(f)) for f in folders)), None)
    if found is None:
        raise MissingDependencyError(f"counting instructions needs nvdisasm: {INSTALL_DISASSEMBLER}")
    return Path(found)


def disassemble(cubin: bytes) -> str:
    """The machine code of a cubin as text. Raises MissingDependencyError, or CompileError if it cannot be read."""
    tool = disassembler()
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"{tool} cannot read this machine code ({INSTALL_DISASSEMBLER}): {done.stderr.strip()}")
    return done.stdout


def by_kernel(sass: str) -> dict[str, str]:
    """The machine code of each kernel in the text of a cubin, by its mangled name."""
    _, *parts = _KERNEL.split(sass)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def count_instructions(sass: str) -> dict[str, int]:
    """Full mnemonic -> occurrences. Warpgroup MMAs get `.SS` or `.RS` appended: where their first operand lies."""
    return dict(Counter(_name(op, operands) for op, operands in _INSTRUCTION.findall(sass)))


def _name(op: str, operands: str) -> str:
    if not op.startswith(_WGMMA):
        return op
    first = operands.split(",")[1].strip()  # after the accumulator
    return f"{op}.{'SS' if first.startswith('gdesc') else 'RS'}"
