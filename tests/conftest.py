"""Shared by all floors."""

import sys
from pathlib import Path

import pytest

# tests that more than one floor runs, and their helpers, are imported by name
sys.path.insert(0, str(Path(__file__).parent / "shared"))
pytest.register_assert_rewrite("autograd_checks", "operator_checks", "places")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return Path(__file__).resolve().parent.parent
