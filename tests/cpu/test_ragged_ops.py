"""Ragged batches through the torch operators on the CPU, where the reference computes them."""

import pytest
import torch
from places import Place
from ragged_operator_checks import *  # noqa: F403


@pytest.fixture
def place() -> Place:
    return Place(torch.device("cpu"), torch.float32, 2e-5)


@pytest.fixture
def compiler() -> str:
    """A backend without code generation, which would need a C++ compiler; tracing and autograd are torch.compile's own."""
    return "aot_eager"
