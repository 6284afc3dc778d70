"""Measure the shapes of a suite with all providers, as rows.

`measure` yields the rows of one shape after another; the command line shows them. `bench_rows.py` holds what a row is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.bench_rows import OURS, BenchRow
from flash_hopper.testing.bench_suites import QUANTISE, BenchShape
from flash_hopper.testing.cold import cold_call
from flash_hopper.testing.providers import MAKERS, Prepared, ProviderAbsent, WrongResult, make_inputs, prepare
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
DEFAULT_PROTOCOLS = {
    "paper": ("burst",), "train": ("burst",), "host": HOST_PROTOCOLS, "cold": COLD_PROTOCOLS, "ragged": ("burst",),
    "fp8": ("burst",),
}  # fmt: skip
ALLOWED_PROTOCOLS = {**DEFAULT_PROTOCOLS, **dict.fromkeys(("paper", "train", "ragged", "fp8"), GPU_PROTOCOLS)}
PEERS = ("sdpa-flash", "sdpa-cudnn", "fa3", "fa4")


@dataclass(frozen=True, slots=True)
class Settings:
    """Who is measured, and how long. None takes the providers that are meant for the shape's suite and direction."""

    providers: Sequence[str] | None
    protocols: Sequence[str]
    rounds: int = ROUNDS
    pause_s: float = PAUSE_S
    steady_s: float = STEADY_S


def default_providers(shape: BenchShape) -> tuple[str, ...]:
    """Who is measured if the caller does not say."""
    if shape.suite == "cold":
        return (OURS,)
    if shape.direction == QUANTISE:
        return tuple(MAKERS[QUANTISE])
    if shape.is_fp8:
        return (OURS, "ours-block", "ours-fast", "ours-bf16", "fa3", "sdpa-flash", "sdpa-cudnn")
    if shape.direction == "backward":
        return (OURS, "ours-det", *PEERS)
    return (OURS, "ours-out", *PEERS) if shape.suite == "host" else (OURS, *PEERS)


def check_protocols(suite: str, protocols: Sequence[str]) -> None:
    """Raise ArgumentError unless each protocol makes sense for the suite."""
    allowed = ALLOWED_PROTOCOLS[suite]
    wrong = [p for p in protocols if p not in allowed]
    if wrong or not protocols:
        raise ArgumentError(
            f"protocol of suite {suite} must be of {', '.join(allowed)}, got {', '.join(wrong) or 'none'}"
        )


def measure(shape: BenchShape, settings: Settings, queue: Queue | None = None) -> Iterator[BenchRow]:
    """The rows of one shape, protocol by protocol; needs a CUDA device.

    Each provider's result is checked before anything is timed; an absent or wrong one has rows without a time.
    """
    providers = settings.providers or default_providers(shape)
    if shape.suite == "cold":
        yield from _cold_rows(shape, settings.protocols, providers)
        return
    queue = queue if queue is not None else GpuQueue()
    inputs = make_inputs(shape, "cuda")
    ready: dict[str, Prepared] = {}
    reasons: dict[str, str] = {}
    for name in providers:
        try:
            ready[name] = prepare(name, shape, inputs)
        except ProviderAbsent as absent:
            reasons[name] = f"absent: {absent}"
        except WrongResult as wrong:
            reasons[name] = f"wrong: {wrong}"
    for protocol in settings.protocols:
        timings, failures = _timings(protocol, ready, settings, queue)
        for name in providers:
            if name in timings:
                yield _timed_row(shape, name, protocol, timings[name])
            else:
                yield _row(shape, name, protocol, error=failures.get(name) or reasons[name])


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


def _cold_rows(shape: BenchShape, protocols: Sequence[str], providers: Sequence[str]) -> Iterator[BenchRow]:
    for name in providers:
        if name != OURS:
            for protocol in protocols:
                yield _row(shape, name, protocol, error="absent: the cold suite measures ours only")
            continue
        cold = cold_call(shape)
        for protocol in protocols:
            us = cold.import_us if protocol == "cold-import" else cold.call_us
            error = "the compiler was imported: the cache was not filled" if cold.imported_compiler else None
            yield _row(shape, name, protocol, us=us, error=error)


def _timed_row(shape: BenchShape, provider: str, protocol: str, timing: Timing) -> BenchRow:
    row = _row(shape, provider, protocol, us=timing.us)
    if protocol not in GPU_PROTOCOLS:
        return row
    return replace(
        row,
        tflops=round(shape.flops / timing.us * 1e-6, 2) if shape.flops else None,
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
        left=shape.left,
        lengths=shape.lengths,
    )
