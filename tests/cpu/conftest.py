"""The CPU floor: many small tensors, for which a second thread costs more than it brings."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """One thread a test process: on two busy cores OpenMP waiting for its threads made this floor six times slower."""
    torch.set_num_threads(1)
