"""Markdown tables from stored bench rows, and keeping those in a document up to date.

A document marks a table with two comments; everything between them is rendered from the named file:

    <!-- bench: benchmarks/results/FILE.json PROTOCOL [DIRECTION] -->
    <!-- /bench -->

The direction may be left out if the file holds one only. For rows of the fp8-accuracy suite the name of an experiment stands in
place of the protocol.
`flash-hopper bench --tables README.md` rewrites them, and a test fails if a table is not what its file says.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing import fp8_accuracy
from flash_hopper.testing.bench_rows import BenchRow, read_rows
from flash_hopper.testing.bench_suites import QUANTISE, length_label

BLOCK = re.compile(
    r"(<!-- bench: (?P<file>\S+) (?P<protocol>\S+)(?: (?P<direction>forward|backward|quantise))? -->\n).*?(<!-- /bench -->)",
    re.DOTALL,
)
LABELS = {
    "ours": "flash-hopper",
    "ours-out": "flash-hopper, `out=`",
    "ours-det": "flash-hopper, deterministic",
    "ours-block": "flash-hopper, block scales",
    "ours-rows": "flash-hopper, V in rows",
    "ours-fast": "flash-hopper, fast_accum",
    "ours-rotary": "flash-hopper, rotary",
    "ours-values": "flash-hopper, V transposed",
    "ours-bf16": "flash-hopper, bf16",
    "sdpa-flash": "SDPA flash (FA2)",
    "sdpa-cudnn": "SDPA cuDNN",
    "fa3": "FA3 C++",
    "fa4": "FA4 CuTe",
    "copy": "copy on the device",
}
_DIGITS = {"TFLOP/s": 0, "TB/s": 2, "us": 1}
NO_E4M3 = ("sdpa-flash", "sdpa-cudnn")  # providers that compute in bf16 where ours and FA3 have e4m3


def update_tables(document: Path, root: Path) -> bool:
    """Render every marked table of a document again; True if the file changed. Files are relative to `root`."""
    before = document.read_text()
    after = render_tables(before, root)
    if after != before:
        document.write_text(after)
    return after != before


def render_tables(text: str, root: Path) -> str:
    """The text of a document with its marked tables as their files say. Raises ArgumentError for a missing file."""

    def block(match: re.Match[str]) -> str:
        if match["protocol"] in fp8_accuracy.EXPERIMENTS:
            env, errors = fp8_accuracy.read_rows(root / match["file"])
            table = fp8_accuracy.render([row for row in errors if row.experiment == match["protocol"]])
            if not table:
                raise ArgumentError(f"no row of the experiment {match['protocol']} to make a table of")
            return f"{match[1]}{table}\n{_where(env)}.\n{match[5]}"
        env, rows = read_rows(root / match["file"])
        wanted = [row for row in rows if row.protocol == match["protocol"]]
        if match["direction"]:
            wanted = [row for row in wanted if row.direction == match["direction"]]
        return f"{match[1]}{render_table(env, wanted)}{match[5]}"

    return BLOCK.sub(block, text)


def render_table(env: dict[str, Any], rows: Sequence[BenchRow]) -> str:
    """One line per head dim, mask and provider, one column per length (and window, or way in which a batch is ragged); the best of each cell is bold.

    TFLOP/s for GPU protocols, TB/s for what is no attention, microseconds for the others. `rows` are of one protocol and direction.
    """
    if not rows:
        raise ArgumentError("no row of this protocol and direction to make a table of")
    if len({row.direction for row in rows}) > 1:
        raise ArgumentError("the rows hold both directions; a table shows one: name it behind the protocol")
    unit = unit_of(rows)
    columns = columns_of(rows)
    providers = [p for p in dict.fromkeys(row.provider for row in rows) if any(r.us for r in rows if r.provider == p)]
    lines = [
        f"| head dim | mask | {unit} | " + " | ".join(columns) + " |",
        "|---|---|---|" + "---:|" * len(columns),
    ]
    for kind, causal in dict.fromkeys((row.kind, row.causal) for row in rows):
        group = [row for row in rows if (row.kind, row.causal) == (kind, causal)]
        for provider in providers:
            cells = [_cell(group, provider, column, unit) for column in columns]
            mask = "-" if rows[0].direction == QUANTISE else "causal" if causal else "full"
            lines.append(f"| {kind} | {mask} | {label_of(provider, rows)} | " + " | ".join(cells) + " |")
    what = f"{rows[0].direction}, protocol {rows[0].protocol}, {rows[0].dtype}"
    return "\n".join(lines) + f"\n\n{_where(env)}, {what}.\n"


def unit_of(rows: Sequence[BenchRow]) -> str:
    """What figures of these rows are shown in: TFLOP/s if there are any, else TB/s for kernels that only move bytes, else us."""
    if any(row.tflops is not None for row in rows):
        return "TFLOP/s"
    return "TB/s" if any(row.tbps is not None for row in rows) else "us"


def value_of(row: BenchRow, unit: str) -> float | None:
    """The figure of a row in a unit of `unit_of`."""
    return {"TFLOP/s": row.tflops, "TB/s": row.tbps, "us": row.us}[unit]


def label_of(provider: str, rows: Sequence[BenchRow]) -> str:
    """A provider's name in a table or figure of these rows."""
    label = LABELS.get(provider, provider)
    return f"{label}, bf16" if provider in NO_E4M3 and rows[0].dtype == str(DType.E4M3) else label


def _where(env: dict[str, Any]) -> str:
    """GPU, driver, torch and date of stored rows."""
    facts = (env.get("gpu"), f"driver {env['driver']}" if env.get("driver") else None, f"torch {env['torch']}")
    return ", ".join([*(str(fact) for fact in facts if fact), str(env["date"])[:10]])


def columns_of(rows: Sequence[BenchRow]) -> list[str]:
    """What a table or figure shows side by side: dense batches by their length, then ragged and windowed ones in order."""
    dense = sorted({row.seqlen_q for row in rows if row.column == length_label(row.seqlen_q)})
    return [*map(length_label, dense), *dict.fromkeys(r.column for r in rows if r.column != length_label(r.seqlen_q))]


def _cell(group: Sequence[BenchRow], provider: str, name: str, unit: str) -> str:
    column = [row for row in group if row.column == name and row.us is not None]
    row = next((row for row in column if row.provider == provider), None)
    value = None if row is None else value_of(row, unit)
    if row is None or row.us is None or value is None:
        return "-"
    text = f"{value:.{_DIGITS[unit]}f}"
    is_best = row.us == min(other.us for other in column if other.us is not None)
    return f"**{text}**" if is_best else text
