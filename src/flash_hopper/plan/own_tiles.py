"""Forward tiles of the user's own: the file that FLASH_HOPPER_TILES names.

`flash-hopper tune --write FILE` adds rows to it, `plan_forward` asks it before the tables. A row says for which padded head dims,
mask, layout of the batch and query lengths it takes which tile, on which GPU, and why. A file is read once a process and checked whole:
a row that no kernel could follow is an error when the file is read, not when a call meets it. Plain Python.
"""

import json
import os
from collections.abc import Iterable
from dataclasses import MISSING, asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from flash_hopper.plan.budget import HDIM_STEP, Layout, OPlace, layout_fault
from flash_hopper.problem.attention import MAX_HEAD_DIM
from flash_hopper.problem.dtypes import KERNEL_DTYPES
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.mask import MaskKind

ROWS = "rows"  # the one name at the top of a file
_ITEMSIZE = max(dtype.itemsize for dtype in KERNEL_DTYPES)


@dataclass(frozen=True, slots=True)
class OwnRow:
    """One row; the fields are the JSON keys, all of them required but `streams`.

    It serves padded head dims `hdim` and `hdimv`, masks of this kind, ragged batches or dense ones, and `rows_from` to `rows_to` query
    rows (`plan.forward.Choice`: the length of a sequence, or the reach of a window or chunk if that is less). The rest of the numbers is the
    layout, in the words of `ForwardPlan`. `gpu`: only on GPUs of this name, or null for any. `why`: the measurement behind it.
    """

    hdim: int
    hdimv: int
    mask: MaskKind
    is_ragged: bool
    rows_from: int
    rows_to: int
    m: int
    n: int
    has_pingpong: bool
    q_stages: int
    kv_stages: int
    o_place: OPlace
    gpu: str | None
    why: str
    streams: int = 1

    @property
    def layout(self) -> Layout:
        """Tile and stages."""
        stages = self.q_stages, self.kv_stages, self.o_place
        return Layout(self.m, self.n, self.has_pingpong, *stages, self.streams)

    @property
    def place(self) -> tuple[Any, ...]:
        """All that it serves but the lengths."""
        return self.hdim, self.hdimv, self.mask, self.is_ragged, self.gpu

    def overlaps(self, other: "OwnRow") -> bool:
        """True if both serve the same request."""
        return self.place == other.place and self.rows_from <= other.rows_to and other.rows_from <= self.rows_to

    def replaces(self, other: "OwnRow") -> bool:
        """True if both serve exactly the same requests."""
        return (self.place, self.rows_from, self.rows_to) == (other.place, other.rows_from, other.rows_to)


def find_row(
    rows: Iterable[OwnRow], hdim: int, hdimv: int, mask: MaskKind, is_ragged: bool, query_rows: int, gpu: str | None
) -> OwnRow | None:
    """The row for a request, if there is one; one that names this GPU goes before one for any. `gpu` None: no GPU is known."""
    asked = hdim, hdimv, mask, is_ragged
    found = [
        row for row in rows
        if row.place[:-1] == asked and row.rows_from <= query_rows <= row.rows_to and row.gpu in (None, gpu)
    ]  # fmt: skip
    return max(found, key=lambda row: row.gpu is not None, default=None)


@lru_cache(maxsize=8)
def read_rows(path: Path) -> tuple[OwnRow, ...]:
    """The rows of a file. Raises ArgumentError, naming file, row and field, for anything that is not as it should be."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"the tiles in {path} cannot be read: {error}") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, name: str) -> tuple[OwnRow, ...]:
    """The rows of a file's text; `name` stands for the file in messages. Raises ArgumentError."""
    try:
        stored = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name} is not JSON: {error}") from error
    if not isinstance(stored, dict) or set(stored) != {ROWS} or not isinstance(stored[ROWS], list):
        raise ArgumentError(f'{name} must hold {{"{ROWS}": [...]}} and nothing else')
    rows = tuple(_row(values, f"{name}, row {i}") for i, values in enumerate(stored[ROWS]))
    for i, row in enumerate(rows):
        other = next((j for j in range(i) if rows[j].overlaps(row)), None)
        if other is not None:
            raise ArgumentError(f"{name}, row {i}: rows_from to rows_to overlap with those of row {other}")
    return rows


def add_row(path: Path, row: OwnRow) -> None:
    """Add a row to a file, which need not exist, in place of one for exactly the same requests; the file is whole at any moment.

    Raises ArgumentError if the file or the row is not as it should be, and if the row overlaps with another.
    """
    rows = [*rows_beside(path, row), row]
    lines = ",\n".join("  " + json.dumps(asdict(each)) for each in rows)
    text = f'{{"{ROWS}": [\n{lines}\n]}}\n'
    parse_rows(text, str(path))
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error}") from error
    read_rows.cache_clear()


def rows_beside(path: Path, row: OwnRow) -> list[OwnRow]:
    """The rows of a file that stay beside this one. Raises ArgumentError if one of them overlaps with it, or the file is bad."""
    stored = enumerate(read_rows(path)) if path.exists() else ()
    kept = [(i, other) for i, other in stored if not row.replaces(other)]
    for i, other in kept:
        if row.overlaps(other):
            raise ArgumentError(
                f"{path}, row {i}: rows_from {other.rows_from} to rows_to {other.rows_to} overlap with {row.rows_from} to "
                f"{row.rows_to} of the new row; change or remove it first"
            )
    return [other for _, other in kept]


def _row(values: Any, where: str) -> OwnRow:
    """One row, checked."""
    if not isinstance(values, dict):
        raise ArgumentError(f"{where} must be an object, got {type(values).__name__}")
    names = [field.name for field in fields(OwnRow)]
    required = {field.name for field in fields(OwnRow) if field.default is MISSING}
    for word, wrong in (("is not known", set(values) - set(names)), ("is missing", required - set(values))):
        if wrong:
            raise ArgumentError(f"{where}: {sorted(wrong)[0]} {word}; a row has {', '.join(names)}")
    for name, value in values.items():
        _check_type(value, name, where)
    row = OwnRow(**values)
    kinds = get_args(MaskKind)
    faults = [
        *(_head_dim_fault(name, getattr(row, name)) for name in ("hdim", "hdimv")),
        None if row.mask in kinds else f"mask must be one of {', '.join(kinds)}, got {row.mask!r}",
        None if row.rows_from >= 0 else f"rows_from must not be negative, got {row.rows_from}",
        None if row.rows_to >= row.rows_from else f"rows_to must be at least rows_from, got {row.rows_to}",
        None if row.why.strip() else "why must say what the choice rests on",
        None if row.gpu is None or row.gpu.strip() else "gpu must be a name, or null for any",
    ]
    fault = next(filter(None, faults), None) or layout_fault(row.layout, row.hdim, row.hdimv, _ITEMSIZE, row.mask)
    if fault is not None:
        raise ArgumentError(f"{where}: {fault}")
    return row


def _check_type(value: Any, name: str, where: str) -> None:
    """`type` and not isinstance: true is no number."""
    if name == "gpu":
        wanted, fits = "a string or null", value is None or type(value) is str
    elif name in ("mask", "o_place", "why"):
        wanted, fits = "a string", type(value) is str
    elif name in ("is_ragged", "has_pingpong"):
        wanted, fits = "true or false", type(value) is bool
    else:
        wanted, fits = "an integer", type(value) is int
    if not fits:
        raise ArgumentError(f"{where}: {name} must be {wanted}, got {value!r}")


def _head_dim_fault(name: str, value: int) -> str | None:
    if value % HDIM_STEP or not HDIM_STEP <= value <= MAX_HEAD_DIM:
        return f"{name} must be a multiple of {HDIM_STEP} up to {MAX_HEAD_DIM}, as head dims are padded, got {value}"
    return None
