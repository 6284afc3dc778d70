"""Keys of compiled kernels: what has to be equal for two kernels to be the same code.

A key covers the plan, the sources that shape kernels, the compiler with its flavour and settings, the target and the
host. Called by `store` and `pack`. Plain Python: no DSL, no torch, about 2 ms once a process.
"""

import hashlib
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from flash_hopper import settings
from flash_hopper.compile.target import GPU_ARCH, Toolkit, ffi_abi, host
from flash_hopper.problem.errors import CompileError

KEY_DIGITS = 32  # hexadecimal, of SHA-256
_PACKAGE = Path(__file__).resolve().parents[1]
# Folders and files whose text shapes the code of a kernel or of the library around it.
SOURCES = (
    "problem",
    "geometry",
    "plan",
    "device",
    "kernels",
    "compile/build.py",
    "compile/link.py",
    "compile/target.py",
)


class Plan(Protocol):
    """What this folder needs to know of a plan: it is a frozen dataclass and has these."""

    @property
    def kind(self) -> str:
        """Which kernel: "forward"."""

    @property
    def name(self) -> str:
        """Readable, an identifier, and unique among the plans of all kinds."""


@lru_cache(maxsize=1)
def source_fingerprint() -> str:
    """Digest of the names and contents of all sources that shape kernels."""
    return fingerprint_of(_PACKAGE, SOURCES)


def fingerprint_of(root: Path, sources: tuple[str, ...]) -> str:
    """Digest of the Python files below `root` that `sources` (folders or files) name."""
    digest = hashlib.sha256()
    for source in sources:
        path = root / source
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            text = file.read_bytes()
            digest.update(f"{file.relative_to(root).as_posix()} {len(text)}\n".encode())
            digest.update(text)
    return digest.hexdigest()[:KEY_DIGITS]


def plan_digest(plan: Plan) -> str:
    """Digest of a plan alone, the same on every machine and Python version."""
    return hashlib.sha256(plan_text(plan).encode()).hexdigest()[:KEY_DIGITS]


def plan_text(plan: Plan) -> str:
    """A plan as text: its kind, its type and each field with type and value.

    Raises CompileError for a field that is not an int, bool, str, enum member, float, None or a tuple of these: what has
    no canonical text cannot be part of a key.
    """
    if not is_dataclass(plan) or isinstance(plan, type):
        raise CompileError(f"a plan must be a dataclass instance, got {plan!r}")
    name = type(plan).__qualname__
    parts = [f"{f.name}={_value_text(f'{name}.{f.name}', getattr(plan, f.name))}" for f in fields(plan)]
    return f"{plan.kind}:{name}({', '.join(parts)})"


def kernel_key(plan: Plan, toolkit: Toolkit) -> str:
    """Key of the kernel that `toolkit` makes of `plan`."""
    return key_of_text(plan_text(plan), toolkit)


def key_of_text(text: str, toolkit: Toolkit) -> str:
    """`kernel_key` of the plan that `plan_text` wrote as `text`."""
    parts = {
        "plan": text,
        "sources": source_fingerprint(),
        "dsl": toolkit.dsl_version,
        "flavour": toolkit.flavour,
        "ffi": ffi_abi(toolkit.ffi_version),
        "settings": repr(settings.dsl_code_settings()),
        "target": GPU_ARCH,
        "host": host(),
    }
    joined = "\n".join(f"{name}: {value}" for name, value in parts.items())
    return hashlib.sha256(joined.encode()).hexdigest()[:KEY_DIGITS]


def _value_text(where: str, value: Any) -> str:
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is None or type(value) in (bool, int, str):
        return f"{type(value).__name__}:{value!r}"
    if type(value) is float:
        return f"float:{value.hex()}"
    if type(value) is tuple:
        return "(" + "".join(f"{_value_text(where, v)}," for v in value) + ")"
    raise CompileError(
        f"{where} is a {type(value).__name__} ({value!r}); a plan may hold int, bool, str, enum, float, None and tuples"
    )
