"""The GPU floor: skipped as a whole unless the current GPU is of compute capability 9.0."""

from pathlib import Path

import pytest
import torch
from floor import OPTION, Floor

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, type=Path, metavar="FILE", help="Leave out the tests that FILE names, and add those that pass."
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Floor(config.getoption(OPTION, None), hasattr(config, "workerinput")))
    config.addinivalue_line(
        "markers", "requires_hopper: needs a GPU of compute capability 9.0; every test in tests/gpu"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Importing a test file touches no device; this does, once, if a test of this folder was collected."""
    here = [item for item in items if HERE in item.path.parents]
    reason = missing_hopper() if here else None
    for item in here:
        item.add_marker(pytest.mark.requires_hopper)
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


def missing_hopper() -> str | None:
    """Why these tests cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, not 9.0"
    return None


@pytest.fixture
def device() -> torch.device:
    """The GPU under test."""
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def second_device() -> torch.device:
    """Another Hopper GPU of this machine."""
    found = [i for i in range(1, torch.cuda.device_count()) if torch.cuda.get_device_capability(i) == (9, 0)]
    if not found:
        pytest.skip(f"needs two GPUs of compute capability 9.0, this machine has {torch.cuda.device_count()} in all")
    return torch.device("cuda", found[0])


@pytest.fixture
def memory_gb(device: torch.device) -> float:
    """Free memory of the GPU, in 2^30 bytes, with nothing cached."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] / 2**30
