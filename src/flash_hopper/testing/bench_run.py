"""Measure the shapes of a suite with all providers, as rows.

`measure` yields the rows of one shape after another; `summarise` compares ours with the best peer. The command line
shows them, `tables.py` and `plots.py` read them back. Rows are what `docs/measuring.md` describes.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.cold import cold_call
from flash_hopper.testing.providers import OURS, Prepared, ProviderAbsent, WrongResult, make_inputs, prepare
from flash_hopper.testing.timing import (
    PAUSE_S,
    ROUNDS,
    STEADY_S,
    GpuQueue,
    Queue,
    Timing,
    burst,
    captured,
    host_cost,
    steady,
)

GPU_PROTOCOLS = ("burst", "steady", "graph")
HOST_PROTOCOLS = ("host-idle", "host-busy")
COLD_PROTOCOLS = ("cold-import", "cold-call")
DEFAULT_PROTOCOLS = {"paper": ("burst",), "host": HOST_PROTOCOLS, "cold": COLD_PROTOCOLS}
DEFAULT_PROVIDERS = {
    "paper": ("ours", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4"),
    "host": ("ours", "ours-out", "sdpa-flash", "sdpa-cudnn", "fa3", "fa4"),
    "cold": ("ours",),
}


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

    @property
    def cell(self) -> tuple[Any, ...]:
        """What rows must share to be compared."""
        sizes = (self.d, self.dv, self.causal, self.seqlen_q, self.seqlen_k, self.batch, self.heads, self.heads_k)
        return (self.protocol, self.suite, self.direction, self.dtype, *sizes)


@dataclass(frozen=True, slots=True)
class Settings:
    """Who is measured, and how long."""

    providers: Sequence[str]
    protocols: Sequence[str]
    rounds: int = ROUNDS
    pause_s: float = PAUSE_S
    steady_s: float = STEADY_S


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against the best peer in one cell; `ratio` above 1 means that ours is faster."""

    ours: BenchRow
    peer: BenchRow

    @property
    def ratio(self) -> float:
        """Time of the best peer over ours."""
        return (self.peer.us or math.nan) / (self.ours.us or math.nan)


@dataclass(frozen=True, slots=True)
class Summary:
    """Comparison over the cells of one protocol. `unmatched` cells lack ours or any peer."""

    protocol: str
    cells: int
    unmatched: int
    geometric_mean: float
    worst: Comparison


def check_protocols(suite: str, protocols: Sequence[str]) -> None:
    """Raise ArgumentError unless each protocol makes sense for the suite."""
    allowed = GPU_PROTOCOLS if suite == "paper" else DEFAULT_PROTOCOLS[suite]
    wrong = [p for p in protocols if p not in allowed]
    if wrong or not protocols:
        raise ArgumentError(
            f"protocol of suite {suite} must be of {', '.join(allowed)}, got {', '.join(wrong) or 'none'}"
        )


def measure(shape: BenchShape, settings: Settings, queue: Queue | None = None) -> Iterator[BenchRow]:
    """The rows of one shape, protocol by protocol; needs a CUDA device.

    Each provider's result is checked before anything is timed; an absent or wrong one has rows without a time.
    """
    if shape.suite == "cold":
        yield from _cold_rows(shape, settings)
        return
    queue = queue if queue is not None else GpuQueue()
    inputs = make_inputs(shape, "cuda")
    ready: dict[str, Prepared] = {}
    reasons: dict[str, str] = {}
    for name in settings.providers:
        try:
            ready[name] = prepare(name, shape, inputs)
        except ProviderAbsent as absent:
            reasons[name] = f"absent: {absent}"
        except WrongResult as wrong:
            reasons[name] = f"wrong: {wrong}"
    for protocol in settings.protocols:
        timings, failures = _timings(protocol, ready, settings, queue)
        for name in settings.providers:
            if name in timings:
                yield _timed_row(shape, name, protocol, timings[name])
            else:
                yield _row(shape, name, protocol, error=failures.get(name) or reasons[name])


def compare(rows: Iterable[BenchRow]) -> list[Comparison]:
    """Ours against the fastest peer, for every cell that has both."""
    cells: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in rows:
        if row.us is not None:
            cells.setdefault(row.cell, []).append(row)
    comparisons = []
    for cell in cells.values():
        ours = [row for row in cell if row.provider == OURS[0]]
        peers = [row for row in cell if row.provider not in OURS]
        if ours and peers:
            comparisons.append(Comparison(ours[0], min(peers, key=lambda row: row.us or math.inf)))
    return comparisons


def summarise(rows: Sequence[BenchRow]) -> list[Summary]:
    """Per protocol: geometric mean of the ratios to the best peer, and the worst cell."""
    summaries = []
    for protocol in dict.fromkeys(row.protocol for row in rows):
        of_protocol = [row for row in rows if row.protocol == protocol]
        comparisons = compare(of_protocol)
        if comparisons:
            mean = math.exp(math.fsum(math.log(c.ratio) for c in comparisons) / len(comparisons))
            unmatched = len({row.cell for row in of_protocol}) - len(comparisons)
            worst = min(comparisons, key=lambda c: c.ratio)
            summaries.append(Summary(protocol, len(comparisons), unmatched, mean, worst))
    return summaries


def write_rows(path: Path, env: dict[str, Any], rows: Sequence[BenchRow]) -> None:
    """Store rows as JSON; the file is complete or absent at any moment."""
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


def _timings(
    protocol: str, ready: dict[str, Prepared], settings: Settings, queue: Queue
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Timings of the providers that are ready, and why any failed."""
    failures: dict[str, str] = {}
    if not ready:
        return {}, failures
    if protocol == "burst":
        calls = {name: prepared.scoped() for name, prepared in ready.items()}
        return burst(calls, queue, rounds=settings.rounds, pause_s=settings.pause_s), failures
    if protocol == "graph":
        replays = {}
        for name, prepared in ready.items():
            try:
                replays[name] = captured(prepared.scoped())
            except RuntimeError as refusal:
                failures[name] = f"absent: cannot be captured: {str(refusal).splitlines()[0][:200]}"
        timings = burst(replays, queue, rounds=settings.rounds, pause_s=settings.pause_s) if replays else {}
        return timings, failures
    timings = {}
    for name, prepared in ready.items():
        with prepared.scope():
            if protocol == "steady":
                timings[name] = steady(prepared.call, queue, seconds=settings.steady_s)
            else:
                timings[name] = host_cost(prepared.call, queue, behind_queue=protocol == "host-busy")
    return timings, failures


def _cold_rows(shape: BenchShape, settings: Settings) -> Iterator[BenchRow]:
    for name in settings.providers:
        if name != "ours":
            for protocol in settings.protocols:
                yield _row(shape, name, protocol, error="absent: the cold suite measures ours only")
            continue
        cold = cold_call(shape)
        for protocol in settings.protocols:
            us = cold.import_us if protocol == "cold-import" else cold.call_us
            error = "the compiler was imported: the cache was not filled" if cold.imported_compiler else None
            yield _row(shape, name, protocol, us=us, error=error)


def _timed_row(shape: BenchShape, provider: str, protocol: str, timing: Timing) -> BenchRow:
    row = _row(shape, provider, protocol, us=timing.us)
    if protocol not in GPU_PROTOCOLS:
        return row
    return replace(
        row,
        tflops=round(shape.problem.flops / timing.us * 1e-6, 2),
        tbps=round(shape.bytes_moved / timing.us * 1e-6, 4),
        mhz=timing.mhz,
        watt=timing.watt,
    )


def _row(
    shape: BenchShape, provider: str, protocol: str, *, us: float | None = None, error: str | None = None
) -> BenchRow:
    return BenchRow(
        suite=shape.suite,
        direction=shape.direction,
        dtype=str(shape.dtype),
        d=shape.d,
        dv=shape.dv,
        causal=shape.causal,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        batch=shape.batch,
        heads=shape.heads,
        heads_k=shape.heads_k,
        provider=provider,
        protocol=protocol,
        us=None if us is None else round(us, 3),
        error=error,
    )
