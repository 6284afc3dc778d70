"""Machine code of many kernels from one run of nvdisasm, which takes 0.4 s to start: instructions and loops."""

import re
import struct
import subprocess
import tempfile
from itertools import accumulate, pairwise
from typing import NamedTuple

from flash_hopper.compile.sass import count_instructions, disassembler

TEXT = ".text."
ADDRESS = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")
BRANCH = re.compile(r"\bBRA 0x([0-9a-f]+)")


class Line(NamedTuple):
    """An instruction and its place."""

    at: int
    text: str


def lines_of(cubins: list[bytes]) -> list[dict[str, list[Line]]]:
    """The instructions in each cubin, by kernel."""
    named = [code_of(cubin) for cubin in cubins]
    codes = [code for each in named for code in each.values()]
    with tempfile.NamedTemporaryFile(suffix=".code") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [disassembler(), "--binary", "SM90a", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [Line(int(found[1], 16), line) for line in text.splitlines() if (found := ADDRESS.match(line))]
    ends = accumulate((len(code) for code in codes), initial=0)
    parts = iter([[line for line in lines if start <= line.at < end] for start, end in pairwise(ends)])
    return [{name: next(parts) for name in each} for each in named]


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


def count(lines: list[Line]) -> dict[str, int]:
    """What `compile.sass` counts."""
    return count_instructions("\n".join(line.text for line in lines))


def matrix_loops(lines: list[Line]) -> list[dict[str, int]]:
    """Instructions of each innermost loop that holds warpgroup MMAs, in the order of the code.

    A branch from behind the kernel's end back into it closes no loop.
    """
    found = []
    for i, line in enumerate(lines):
        if (branch := BRANCH.search(line.text)) and (start := int(branch[1], 16)) <= line.at:
            body = [other for other in lines[: i + 1] if other.at >= start]
            if any("GMMA." in one.text for one in body) and not any("EXIT" in one.text for one in body):
                found.append(body)
    inner = [body for body in found if not any(_is_within(other, body) for other in found if other is not body)]
    return [count(body) for body in sorted(inner, key=lambda body: body[0].at)]


def _is_within(body: list[Line], other: list[Line]) -> bool:
    return other[0].at <= body[0].at and body[-1].at <= other[-1].at
