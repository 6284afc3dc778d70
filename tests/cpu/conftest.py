"""The CPU floor: many small tensors, for which a second thread costs more than it brings."""

from types import SimpleNamespace

import pytest
import torch

from flash_hopper.launch import backward, forward, ragged


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """One thread a test process: on two busy cores OpenMP waiting for its threads made this floor six times slower."""
    torch.set_num_threads(1)


@pytest.fixture
def kernels(monkeypatch):
    """A dictionary for what stands for kernels, by the kind of their plan: the launchers call it with tensors in host memory."""
    found = {}

    def launched(kind, arguments):
        assert not any(isinstance(x, tuple) for x in arguments), "tvm-ffi would convert it in every call: `as_argument`"
        return found[kind](*arguments)

    for module in (forward, backward):
        monkeypatch.setattr(module, "device_facts", lambda index: SimpleNamespace(name="stand-in", sm_count=132))
        monkeypatch.setattr(module, "get_kernel", lambda plan: lambda *arguments: launched(plan.kind, arguments))
    monkeypatch.setattr(ragged, "sequence_table", lambda index, ints: torch.empty(ints, dtype=torch.int32))
    monkeypatch.setattr(ragged, "tile_counter", lambda index: torch.zeros(1, dtype=torch.int32))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    backward.prepare_backward.cache_clear()
    yield found
    backward.prepare_backward.cache_clear()
