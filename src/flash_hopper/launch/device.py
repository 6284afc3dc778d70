"""Facts about a CUDA device that a launch needs, asked once a process."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import NamedTuple

import torch

from flash_hopper.problem.errors import DeviceError

CAPABILITY = (9, 0)


class DeviceFacts(NamedTuple):
    """One GPU."""

    name: str
    sm_count: int


@cache
def device_facts(index: int) -> DeviceFacts:
    """Facts about GPU `index`. Raises DeviceError, naming the capability, unless it is a Hopper GPU."""
    properties = torch.cuda.get_device_properties(index)
    capability = (properties.major, properties.minor)
    if capability != CAPABILITY:
        raise DeviceError(
            f"cuda:{index} ({properties.name}) has compute capability {capability[0]}.{capability[1]}; the kernels are "
            f"for {CAPABILITY[0]}.{CAPABILITY[1]} (H100, H200, H800, H20). Tensors on the CPU use the reference."
        )
    return DeviceFacts(properties.name, properties.multi_processor_count)


_counters: dict[tuple[int, int], torch.Tensor] = {}


def tile_counter(index: int) -> torch.Tensor:
    """The (1,) int32 counter of the dynamic scheduler for the current stream of GPU `index`; zero between launches.

    Launches on one stream run one after the other, so they may share it. A CUDA graph may be replayed on any stream, so
    a launch that is being captured gets a counter of its own, cleared by the graph.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    counter = _counters.get(key)
    if counter is None:
        counter = _counters[key] = _lasting_counter(index)
    return counter


def _lasting_counter(index: int) -> torch.Tensor:
    """A counter that may be kept, for the current stream.

    The calling thread may be allocating from a private pool whose memory is taken back, as in the warm-up of
    torch.compile's CUDA graphs (mode="reduce-overhead") or under torch.cuda.use_mem_pool. Another thread is not.
    """
    stream = torch.cuda.current_stream(index)

    def make() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")

    with ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(make).result()
