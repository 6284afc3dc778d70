"""The compile floor needs the DSL and no GPU. What is compiled here is compiled once, whatever looks at it."""

import os
import sys
from pathlib import Path

import pytest

from flash_hopper.compile.target import toolkit
from flash_hopper.problem.errors import MissingDependencyError

# helpers beside the tests are imported by name, also in spawned processes
sys.path.insert(0, str(Path(__file__).parent))

try:
    toolkit()
    MISSING = ""
except MissingDependencyError as error:
    MISSING = str(error)


class SkippedModule(pytest.Module):
    """Stands for a test module that cannot even be imported without the DSL."""

    def collect(self):
        pytest.skip(MISSING, allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    return SkippedModule.from_parent(parent, path=module_path) if MISSING else None


@pytest.fixture(scope="session")
def kernels(tmp_path_factory, request):
    """The compiled kernels of this session (see `compiled_kernels.CompiledKernels`), shared by parallel test workers."""
    from compiled_kernels import CompiledKernels

    base = tmp_path_factory.getbasetemp()
    is_alone = "PYTEST_XDIST_WORKER" not in os.environ
    calls = (item.callspec.params for item in request.session.items if hasattr(item, "callspec"))
    plans = list(dict.fromkeys(params["plan"] for params in calls if "plan" in params))
    shelf = CompiledKernels((base if is_alone else base.parent) / "kernels", plans)
    if is_alone:
        shelf.prepare()  # parallel test workers share the work by themselves
    return shelf
