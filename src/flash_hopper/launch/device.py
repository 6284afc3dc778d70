"""What a launch needs of a CUDA device: facts, asked once a process, and memory that is kept from one launch to the next."""

import threading
from collections.abc import Callable, Hashable
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


_kept: dict[tuple[Hashable, int, int], torch.Tensor] = {}


def kept(name: Hashable, index: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """What `make(index)` allocates and fills, made once for the current stream of GPU `index`, on which all that use it follow.

    A CUDA graph may be replayed on any stream, so a call that is being captured gets one of its own, made anew by the graph. The
    caller holds it until its last launch is recorded: what is let go before is memory for the next allocation of the capture.
    """
    if torch.cuda.is_current_stream_capturing():
        return make(index)
    key = (name, index, torch._C._cuda_getCurrentRawStream(index))
    found = _kept.get(key)
    if found is None:
        found = _kept[key] = _lasting(index, lambda: make(index))
    return found


def tile_counter(index: int) -> torch.Tensor:
    """The (1,) int32 counter of the dynamic scheduler; zero between launches, which run one after the other on a stream. As `kept`."""
    return kept("tile counter", index, _zero)


def unit_descale(index: int) -> torch.Tensor:
    """A (1,) float32 that is 1. As `kept`."""
    return kept("unit descale", index, _one)


def _zero(index: int) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=f"cuda:{index}")


def _one(index: int) -> torch.Tensor:
    return torch.ones(1, device=f"cuda:{index}")


class _Tables(threading.local):
    """The tables of one thread by GPU and stream."""

    def __init__(self) -> None:
        self.by_stream: dict[tuple[int, int], torch.Tensor] = {}


_tables = _Tables()
_SMALLEST_TABLE = 1 << 12


def sequence_table(index: int, ints: int) -> torch.Tensor:
    """Memory for the table of a ragged call on the current stream of GPU `index`: at least so many int32, of any value.

    A call writes it in its first kernel, which waits for the stream's last one, and reads it until its last kernel. So calls
    of one thread on one stream may share it; another thread's kernels may come between those of a call, so each thread has
    its own. It is replaced by a larger one where that is needed; what is left of the old one is free for whatever comes later
    on its stream. A call that is being captured gets memory of the graph, as for `tile_counter`.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(ints, dtype=torch.int32, device=f"cuda:{index}")
    tables = _tables.by_stream
    key = (index, torch._C._cuda_getCurrentRawStream(index))
    table = tables.get(key)
    if table is None or table.numel() < ints:
        size = max(_SMALLEST_TABLE, 1 << (ints - 1).bit_length())
        table = tables[key] = _lasting(index, lambda: torch.empty(size, dtype=torch.int32, device=f"cuda:{index}"))
    return table


def _lasting(index: int, make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What `make` allocates, for the current stream and to be kept.

    The calling thread may be allocating from a private pool whose memory is taken back, as in the warm-up of
    torch.compile's CUDA graphs (mode="reduce-overhead") or under torch.cuda.use_mem_pool. Another thread is not.
    """
    stream = torch.cuda.current_stream(index)

    def on_stream() -> torch.Tensor:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(max_workers=1) as other_thread:
        return other_thread.submit(on_stream).result()
