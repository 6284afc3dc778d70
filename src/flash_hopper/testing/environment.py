"""What a measurement or a test outcome ran on: GPU, driver, versions, commit, date.

`environment()` is the "env" of every JSON file that `verify` and `bench` write, and what `flash-hopper env` shows.
Nothing here needs a GPU or imports the DSL; what is not there is None.
"""

import platform
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import flash_hopper
from flash_hopper.compile.target import DSL_PACKAGE, FFI_PACKAGE, driver_cuda_version, installed_flavours, toolkit
from flash_hopper.problem.errors import MissingDependencyError
from flash_hopper.version import __version__


def environment(commit: str | None = None) -> dict[str, Any]:
    """Facts about this machine and process, in the order in which they are shown.

    `commit` stands in where the package does not run from its git checkout. Values are JSON types.
    """
    driver_cuda = driver_cuda_version()
    return {
        **_gpu_facts(),
        "driver": _driver_version(),
        "driver_cuda": ".".join(map(str, driver_cuda)) if driver_cuda else None,
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "cutlass_dsl": installed_version(DSL_PACKAGE),
        "dsl_flavour": _flavour(),
        "dsl_flavours_installed": sorted(installed_flavours()),
        "tvm_ffi": installed_version(FFI_PACKAGE),
        "python": platform.python_version(),
        "flash_hopper": __version__,
        "commit": commit or _checkout_commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _flavour() -> str | None:
    """The flavour of the DSL that compiles here; None if none can."""
    try:
        return toolkit().flavour
    except MissingDependencyError:
        return None


def _gpu_facts() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"gpu": None, "gpus": 0, "capability": None, "sms": None}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "sms": properties.multi_processor_count,
    }


def _driver_version() -> str | None:
    answer = _output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return answer.splitlines()[0].strip() if answer else None


def _checkout_commit() -> str | None:
    """HEAD of the checkout that this package runs from, with "+" for uncommitted changes of tracked files."""
    package = Path(flash_hopper.__file__).resolve().parent
    top = _output_of(["git", "-C", str(package), "rev-parse", "--show-toplevel"])
    # a virtual environment may lie inside the checkout of another project
    if not top or Path(top, "src", "flash_hopper").resolve() != package:
        return None
    head = _output_of(["git", "-C", str(package), "rev-parse", "HEAD"])
    changed = _output_of(["git", "-C", str(package), "status", "--porcelain", "--untracked-files=no"])
    return f"{head}+" if head and changed else head


def _output_of(command: list[str]) -> str | None:
    """What a program prints, stripped; None if it is missing, fails or prints nothing."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
