"""How long a call takes: the burst, graph, steady and host protocols, and launches from rest.

Providers are given as functions without arguments and are timed in the same run. `GpuQueue` is all that touches the
GPU; the protocols are plain Python above it and are tested against a simulated queue. Used by `bench` and `demo`;
`docs/measuring.md` says what each figure means.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from flash_hopper.testing.clocks import ClockSampler, gpu_clock_sampler

Call = Callable[[], object]

ROUNDS = 12
ROUNDS_PER_GROUP = 3
WARMUP_CALLS = 3
# 0.12-0.2 s of rest give every group the same cool clock; without it the order of providers decides (H200, 2026-11)
PAUSE_S = 0.15
REST_S = 0.012  # between two launches of a few milliseconds
STEADY_S = 3.0
STEADY_SETTLE_S = 0.5
STEADY_CHUNK_S = 0.02
HOST_CALLS = 200
HOST_CALLS_BEHIND_QUEUE = 50  # few enough that the driver's launch queue (1024 entries) never blocks the host
CLOCK_HZ = 2.0e9  # upper bound of the SM clock; used to size waits only


@dataclass(frozen=True, slots=True)
class Timing:
    """A measured time in microseconds with the samples behind it; clock and power where the protocol reads them."""

    us: float
    samples: tuple[float, ...]
    mhz: float | None = None
    watt: float | None = None


class Queue(Protocol):
    """A stream of work in order, and its clock."""

    def record(self) -> Any:
        """Mark this point of the stream."""

    def elapsed_us(self, start: Any, end: Any) -> float:
        """Time between two marks that were reached."""

    def synchronize(self) -> None:
        """Wait until all work is done."""

    def wait_for(self, mark: Any) -> None:
        """Wait until a mark is reached."""

    def hold(self, seconds: float) -> None:
        """Keep the stream busy, so that the host runs ahead and its own time is not measured."""

    def flush_l2(self) -> None:
        """Overwrite the L2 cache."""

    def clocks(self) -> AbstractContextManager[ClockSampler | None]:
        """A sampler of clock and power that runs while the context is open, or None."""


class GpuQueue:
    """The current stream of the current CUDA device."""

    def __init__(self) -> None:
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._scratch = torch.empty(max(2 * l2_bytes, 128 << 20), dtype=torch.int8, device="cuda")

    def record(self) -> torch.cuda.Event:
        """A timing event on the stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """Microseconds between two events."""
        return float(start.elapsed_time(end)) * 1e3

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def wait_for(self, mark: torch.cuda.Event) -> None:
        """Wait for an event."""
        mark.synchronize()

    def hold(self, seconds: float) -> None:
        """A kernel that spins for at least this long."""
        torch.cuda._sleep(int(seconds * CLOCK_HZ))

    def flush_l2(self) -> None:
        """Write a buffer of twice the L2's size."""
        self._scratch.zero_()

    def clocks(self) -> AbstractContextManager[ClockSampler | None]:
        """Readings of the current device."""
        return gpu_clock_sampler(torch.device("cuda", torch.cuda.current_device()))


def burst(
    calls: Mapping[str, Call], queue: Queue, *, rounds: int = ROUNDS, pause_s: float = PAUSE_S
) -> dict[str, Timing]:
    """Time calls at a cool clock, cold L2, launch by launch in turn. Median GPU time of `rounds` launches each.

    Every round launches each call once, starting with another one; before each group of `ROUNDS_PER_GROUP` rounds the
    GPU rests for `pause_s`, then is held until the host has enqueued the group.
    """
    names = list(calls)
    for name in names:
        for _ in range(WARMUP_CALLS):
            calls[name]()
    queue.synchronize()
    host_s = _host_seconds(calls, queue)
    samples: dict[str, list[float]] = {name: [] for name in names}
    done = 0
    while done < rounds:
        group = min(ROUNDS_PER_GROUP, rounds - done)
        time.sleep(pause_s)
        queue.hold(2 * host_s * group)
        marks = []
        for turn in range(done, done + group):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                queue.flush_l2()
                start = queue.record()
                calls[name]()
                marks.append((name, start, queue.record()))
        queue.synchronize()
        for name, start, end in marks:
            samples[name].append(queue.elapsed_us(start, end))
        done += group
    return {name: Timing(statistics.median(times), tuple(times)) for name, times in samples.items()}


def rested(
    calls: Mapping[str, Call], queue: Queue, *, launches: int = ROUNDS, rest_s: float = REST_S
) -> dict[str, Timing]:
    """Time many variants of one kernel: each launch after the GPU has rested, with cold L2, in another order every round.

    Median GPU time of `launches` each. In one group of `burst` ten variants that take milliseconds heat the GPU, and one and the same
    kernel under two names was up to 3 % apart; like this it differs by 0.4 % at most from itself (H200, 2026-11, docs/measuring.md).
    """
    names = list(calls)
    for name in names:
        for _ in range(WARMUP_CALLS):
            calls[name]()
    queue.synchronize()
    host_s = _host_seconds(calls, queue) / len(names)
    time.sleep(10 * rest_s)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(launches):
        for name in random.sample(names, len(names)):
            time.sleep(rest_s)
            queue.hold(2 * host_s)
            queue.flush_l2()
            start = queue.record()
            calls[name]()
            end = queue.record()
            queue.synchronize()
            samples[name].append(queue.elapsed_us(start, end))
    return {name: Timing(statistics.median(times), tuple(times)) for name, times in samples.items()}


def captured(call: Call) -> Call:
    """The call as a replay of a CUDA graph: what its kernels take alone, without the Python around them.

    It is captured on the stream of its warm-up, so that a backward meets the forward that ran there.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARMUP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    return graph.replay


def steady(call: Call, queue: Queue, *, seconds: float = STEADY_S) -> Timing:
    """Time a call under continuous load: mean GPU time over a loop of `seconds`, with median MHz and W.

    The first `STEADY_SETTLE_S` bring clock and power to their level and are not counted. L2 is as the loop leaves it.
    """
    call()
    queue.synchronize()
    begin = time.perf_counter()
    call()
    queue.synchronize()
    chunk = max(1, round(STEADY_CHUNK_S / (time.perf_counter() - begin)))
    settle = min(STEADY_SETTLE_S, seconds / 2)
    with queue.clocks() as sampler:
        _loop(call, queue, chunk, settle)
        if sampler is not None:
            sampler.mark()
        samples = _loop(call, queue, chunk, seconds - settle)
        reading = sampler.median() if sampler is not None else None
    return Timing(
        statistics.mean(samples),
        tuple(samples),
        reading.mhz if reading is not None else None,
        reading.watt if reading is not None else None,
    )


def host_cost(call: Call, queue: Queue, *, behind_queue: bool, calls: int = HOST_CALLS) -> Timing:
    """Host time of one call, which only enqueues: median over `calls`.

    `behind_queue`: the GPU is busy throughout, as in a model's forward; else it is idle before each call.
    """
    for _ in range(WARMUP_CALLS):
        call()
    queue.synchronize()
    samples: list[float] = []
    while len(samples) < calls:
        if behind_queue:
            batch = min(HOST_CALLS_BEHIND_QUEUE, calls - len(samples))
            queue.hold(2 * batch * (statistics.median(samples) * 1e-6 if samples else 500e-6))
            samples += [_host_us(call) for _ in range(batch)]
            queue.synchronize()
        else:
            samples.append(_host_us(call))
            queue.synchronize()
    return Timing(statistics.median(samples), tuple(samples))


def _loop(call: Call, queue: Queue, chunk: int, seconds: float) -> list[float]:
    """Launch chunks for `seconds` with one chunk queued ahead; GPU microseconds per call of each chunk."""
    marks = [queue.record()]
    begin = time.perf_counter()
    while len(marks) < 2 or time.perf_counter() - begin < seconds:
        for _ in range(chunk):
            call()
        marks.append(queue.record())
        queue.wait_for(marks[-2])
    queue.synchronize()
    return [queue.elapsed_us(a, b) / chunk for a, b in itertools.pairwise(marks)]


def _host_seconds(calls: Mapping[str, Call], queue: Queue) -> float:
    """Host time to enqueue one round."""
    begin = time.perf_counter()
    for call in calls.values():
        queue.flush_l2()
        queue.record()
        call()
        queue.record()
    seconds = time.perf_counter() - begin
    queue.synchronize()
    return seconds


def _host_us(call: Call) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) * 1e-3
