"""Ragged batches through the torch operators on a GPU; torch.compile generates code around them."""

import pytest
import torch
from places import HAS_C_COMPILER, Place
from ragged_operator_checks import *  # noqa: F403


@pytest.fixture
def place(device) -> Place:
    return Place(device, torch.bfloat16, 2e-2)


@pytest.fixture
def compiler() -> str:
    """Generated code where there is a C compiler, which Triton needs too; else the graph as torch traced it."""
    return "inductor" if HAS_C_COMPILER else "aot_eager"
