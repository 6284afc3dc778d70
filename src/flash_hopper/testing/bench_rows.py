"""Rows of `bench`: what one is, how they are stored, and how ours compares with the peers in them.

`bench_run.py` makes rows, the command line shows them, `tables.py` and `plots.py` draw them. Their fields are described in
`docs/measuring.md`.
"""

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.bench_suites import dims_label, length_label

OURS, DETERMINISTIC = "ours", "ours-det"
# never a peer
OWN = (
    OURS,
    "ours-out",
    DETERMINISTIC,
    "ours-block",
    "ours-rows",
    "ours-fast",
    "ours-bf16",
    "ours-rotary",
    "ours-values",
)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One measured time, or the reason why there is none. The fields are the JSON keys.

    `us` is GPU time per call for burst, steady and graph, host time else; `mhz` and `watt` are read by steady only.
    """

    suite: str
    direction: str
    dtype: str
    d: int
    dv: int
    causal: bool
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    heads_k: int
    provider: str
    protocol: str
    us: float | None = None
    tflops: float | None = None
    tbps: float | None = None
    mhz: float | None = None
    watt: float | None = None
    error: str | None = None
    left: int | None = None
    lengths: str | None = None

    @property
    def cell(self) -> tuple[Any, ...]:
        """What rows must share to be compared."""
        sizes = (self.d, self.dv, self.causal, self.seqlen_q, self.seqlen_k, self.batch, self.heads, self.heads_k)
        return (self.protocol, self.suite, self.direction, self.dtype, *sizes, self.left, self.lengths)

    @property
    def kind(self) -> str:
        """Head dims, and heads where several query heads share a key head: 128, 192/128, 128 h32/8."""
        group = "" if self.heads == self.heads_k else f" h{self.heads}/{self.heads_k}"
        return dims_label(self.d, self.dv) + group

    @property
    def where(self) -> str:
        """The cell in short: d128 h32/8 causal s4k."""
        lengths = self.column
        if self.seqlen_k != self.seqlen_q:
            lengths += f"x{length_label(self.seqlen_k)}"
        return f"d{self.kind} {'causal' if self.causal else 'full'} s{lengths}"

    @property
    def column(self) -> str:
        """Lengths and window in short: 4k; 16k w1024; 8x2k, packed; 64x3455, zipf."""
        length = length_label(self.seqlen_q)
        if self.lengths is not None:
            length = f"{self.batch}x{length}, {'packed' if self.lengths == 'equal' else self.lengths}"
        return length if self.left is None else f"{length} w{self.left}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against another provider in one cell; `ratio` above 1 means that ours is faster."""

    ours: BenchRow
    other: BenchRow

    @property
    def ratio(self) -> float:
        """Time of the other over ours."""
        return (self.other.us or math.nan) / (self.ours.us or math.nan)


@dataclass(frozen=True, slots=True)
class RelativeRate:
    """Our rate in a ragged or windowed cell as a part of that in the dense one without a window, `base`."""

    row: BenchRow
    base: BenchRow

    @property
    def ratio(self) -> float:
        """1 if an operation on a visible score takes as long as there."""
        return (self.row.tflops or math.nan) / (self.base.tflops or math.nan)


@dataclass(frozen=True, slots=True)
class Summary:
    """Ours against the best peer over the cells of one protocol and direction. `unmatched` cells lack ours or any peer.

    `deterministic`: what the deterministic mode costs, ratios of its time to ours; its geometric mean and the worst cell.
    """

    protocol: str
    direction: str
    cells: int
    unmatched: int
    geometric_mean: float
    worst: Comparison | None
    deterministic_mean: float
    deterministic_worst: Comparison | None


def compare(rows: Iterable[BenchRow]) -> list[Comparison]:
    """Ours against the fastest peer, for every cell that has both."""
    comparisons = []
    for cell in _cells(rows):
        ours = next((row for row in cell if row.provider == OURS), None)
        peers = [row for row in cell if row.provider not in OWN]
        if ours and peers:
            comparisons.append(Comparison(ours, min(peers, key=lambda row: row.us or math.inf)))
    return comparisons


def deterministic_costs(rows: Iterable[BenchRow]) -> list[Comparison]:
    """Ours against our deterministic mode, for every cell that has both; the ratio is what determinism costs."""
    costs = []
    for cell in _cells(rows):
        by_provider = {row.provider: row for row in cell}
        if OURS in by_provider and DETERMINISTIC in by_provider:
            costs.append(Comparison(by_provider[OURS], by_provider[DETERMINISTIC]))
    return costs


def relative_rates(rows: Sequence[BenchRow]) -> list[RelativeRate]:
    """Ours in packed batches against the dense batch, and with windows against the same length without one."""
    ours = [row for row in rows if row.provider == OURS and row.tflops is not None]
    dense = [row for row in ours if row.left is None and row.lengths is None]
    found = []
    for row in ours:
        same = [
            base
            for base in dense
            if (base.protocol, base.suite, base.direction, base.dtype, base.kind, base.causal)
            == (row.protocol, row.suite, row.direction, row.dtype, row.kind, row.causal)
        ]
        if row.left is not None:
            same = [base for base in same if (base.seqlen_q, base.batch) == (row.seqlen_q, row.batch)]
        elif row.lengths is None:
            continue
        # a packed batch stands beside the dense one of several sequences
        bases = [base for base in same if row.left is not None or base.batch > 1]
        if bases:
            found.append(RelativeRate(row, bases[0]))
    return found


def summarise(rows: Sequence[BenchRow]) -> list[Summary]:
    """Per protocol and direction, those that have anything to compare."""
    summaries = []
    for protocol, direction in dict.fromkeys((row.protocol, row.direction) for row in rows):
        group = [row for row in rows if (row.protocol, row.direction) == (protocol, direction)]
        comparisons, costs = compare(group), deterministic_costs(group)
        if comparisons or costs:
            summaries.append(
                Summary(
                    protocol,
                    direction,
                    len(comparisons),
                    len({row.cell for row in group}) - len(comparisons),
                    _geometric_mean(comparisons),
                    min(comparisons, key=lambda c: c.ratio, default=None),
                    _geometric_mean(costs),
                    max(costs, key=lambda c: c.ratio, default=None),
                )
            )
    return summaries


def write_rows(path: Path, env: dict[str, Any], rows: Sequence[Any]) -> None:
    """Store rows, dataclasses of `bench` or `tune`, as JSON; the file is complete or absent at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(path.suffix + ".part")
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    part.write_text(f'{{"env": {json.dumps(env)},\n "rows": [\n{lines}\n]}}\n')
    os.replace(part, path)


def read_rows(path: Path) -> tuple[dict[str, Any], list[BenchRow]]:
    """The environment and rows of a stored file. Raises ArgumentError if it is none."""
    try:
        stored = json.loads(path.read_text())
        return stored["env"], [BenchRow(**row) for row in stored["rows"]]
    except (OSError, ValueError, KeyError, TypeError) as damage:
        raise ArgumentError(f"{path} holds no bench rows: {damage}") from damage


def _cells(rows: Iterable[BenchRow]) -> Iterable[list[BenchRow]]:
    """Measured rows of one cell together."""
    cells: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in rows:
        if row.us is not None:
            cells.setdefault(row.cell, []).append(row)
    return cells.values()


def _geometric_mean(comparisons: Sequence[Comparison]) -> float:
    """Of the ratios; nan if there are none."""
    if not comparisons:
        return math.nan
    return math.exp(math.fsum(math.log(c.ratio) for c in comparisons) / len(comparisons))
