"""Ragged batches, windows and chunks by eager calls on a GPU, where the kernels compute them."""

import pytest
import torch
from places import Place
from ragged_checks import *  # noqa: F403


@pytest.fixture
def place(device) -> Place:
    return Place(device, torch.bfloat16, 2e-2)
