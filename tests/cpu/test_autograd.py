"""Gradients by eager autograd on the CPU, where the reference computes them."""

import pytest
import torch
from autograd_checks import *  # noqa: F403
from places import Place


@pytest.fixture
def place() -> Place:
    return Place(torch.device("cpu"), torch.float32, 2e-5)
