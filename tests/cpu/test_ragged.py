"""Ragged batches, windows and chunks by eager calls on the CPU, where the reference computes them."""

import pytest
import torch
from places import Place
from ragged_checks import *  # noqa: F403


@pytest.fixture
def place() -> Place:
    return Place(torch.device("cpu"), torch.float32, 2e-5)
