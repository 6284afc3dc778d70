"""SM clock and power of the GPU while something runs, sampled through NVML.

Used by the steady protocol of `timing.py`. The `nvidia-ml-py` package is used where it is installed, else the
`nvidia-smi` program; both read the same counters.
"""

import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import TracebackType
from typing import Any, NamedTuple

import torch

SAMPLE_PERIOD_S = 0.05
NVIDIA_SMI_FIELDS = "clocks.sm,power.draw"


class Sample(NamedTuple):
    """One reading: SM clock in MHz, power in W."""

    mhz: float
    watt: float


@dataclass
class ClockSampler:
    """Context manager that reads clock and power every `SAMPLE_PERIOD_S` in a thread until it is left.

    `mark()` forgets what was read so far, so that the readings belong to the settled part of a run.
    """

    read: Callable[[], Sample]
    samples: list[Sample] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="clock-sampler", daemon=True)

    def __enter__(self) -> "ClockSampler":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def mark(self) -> None:
        """Drop the readings taken so far."""
        self.samples.clear()

    def median(self) -> Sample | None:
        """Median clock and power since the last mark; None if nothing was read."""
        samples = list(self.samples)
        if not samples:
            return None
        return Sample(statistics.median(s.mhz for s in samples), statistics.median(s.watt for s in samples))

    def _poll(self) -> None:
        while not self._stop.wait(SAMPLE_PERIOD_S):
            self.samples.append(self.read())


@contextmanager
def gpu_clock_sampler(device: torch.device) -> Iterator[ClockSampler | None]:
    """A running sampler for a CUDA device, or None where neither NVML package nor nvidia-smi can read it."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        reader = _nvml_reader(uuid) if find_spec("pynvml") is not None else _nvidia_smi_reader(uuid)
        reader()
    except Exception:  # a container may hide the counters; each way of reading has its own error types
        yield None
        return
    with ClockSampler(reader) as sampler:
        yield sampler


def _nvml_reader(uuid: str) -> Callable[[], Sample]:
    import pynvml  # an optional package

    pynvml.nvmlInit()
    handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read() -> Sample:
        mhz = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        return Sample(float(mhz), pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)

    return read


def _nvidia_smi_reader(uuid: str) -> Callable[[], Sample]:
    command = ["nvidia-smi", "-i", uuid, f"--query-gpu={NVIDIA_SMI_FIELDS}", "--format=csv,noheader,nounits"]

    def read() -> Sample:
        return parse_nvidia_smi(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    return read


def parse_nvidia_smi(text: str) -> Sample:
    """The reading in a line of `nvidia-smi --format=csv,noheader,nounits` for `NVIDIA_SMI_FIELDS`."""
    mhz, watt = text.strip().splitlines()[0].split(",")
    return Sample(float(mhz), float(watt))
