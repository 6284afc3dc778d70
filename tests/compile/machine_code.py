"""Instruction counts of many kernels from one run of nvdisasm, which takes 0.4 s to start."""

import re
import struct
import subprocess
import tempfile
from itertools import accumulate, pairwise

from flash_hopper.compile.sass import count_instructions, disassembler

TEXT = ".text."
ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")


def instructions_of(cubins: list[bytes]) -> list[dict[str, dict[str, int]]]:
    """What `compile.sass` counts in each cubin, by kernel."""
    named = [code_of(cubin) for cubin in cubins]
    codes = [code for each in named for code in each.values()]
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [disassembler(), "--binary", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [(int(found[1], 16), line) for line in text.splitlines() if (found := ADDRESS.match(line))]
    ends = accumulate((len(code) for code in codes), initial=0)
    counts = iter(
        [
            count_instructions("\n".join(line for at, line in lines if start <= at < end))
            for start, end in pairwise(ends)
        ]
    )
    return [{name: next(counts) for name in each} for each in named]


def code_of(cubin: bytes) -> dict[str, bytes]:
    """The instructions of a cubin's kernels by name: of the ELF file's sections those whose name starts with .text."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    sections = [struct.unpack_from("<I4xQQQQ", cubin, table + i * size) for i in range(count)]
    strings = sections[names][3]
    found = {}
    for name, _, _, at, length in sections:
        label = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        if label.startswith(TEXT):
            found[label[len(TEXT) :]] = cubin[at : at + length]
    return found
