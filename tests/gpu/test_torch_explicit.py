"""The backward as a call of its own through the kernels."""

import pytest
import torch
from explicit_checks import *  # noqa: F403
from places import HAS_C_COMPILER, Place


@pytest.fixture
def place(device) -> Place:
    return Place(device, torch.bfloat16, 2e-2)


@pytest.fixture
def compiler() -> str:
    """Generated code where there is a C compiler, which Triton needs too; else the graph as torch traced it."""
    return "inductor" if HAS_C_COMPILER else "aot_eager"
