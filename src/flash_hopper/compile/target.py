"""What kernels are compiled for, and with what: the only place that knows the architecture.

Answers which DSL, which of its CUDA flavours and which tvm-ffi this process would use, without importing any of them,
so that keys can be computed and missing packages named in a process that never compiles. Called by `key`, `build`,
`link` and `pack`; nothing here imports torch or the DSL.
"""

import ctypes
import importlib.metadata
import importlib.util
import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from flash_hopper.problem.errors import MissingDependencyError

GPU_ARCH = "sm_90a"
CAPABILITY = (9, 0)

DSL_PACKAGE, DSL_VERSIONS = "nvidia-cutlass-dsl", ((4, 8),)
FFI_PACKAGE = "apache-tvm-ffi"
# What to install, by flavour of the DSL.
INSTALL = {"cu12": 'pip install "nvidia-cutlass-dsl==4.8.*"', "cu13": 'pip install "nvidia-cutlass-dsl[cu13]==4.8.*"'}
INSTALL_FFI = 'pip install "apache-tvm-ffi>=0.1.15"'


@dataclass(frozen=True, slots=True)
class Toolkit:
    """An installed DSL: its version, its flavour ("cu12" or "cu13"), the folder of that flavour, and tvm-ffi's version.

    The flavour is the CUDA major version of the generated code: a driver of an older major version refuses it.
    """

    dsl_version: str
    flavour: str
    folder: Path
    ffi_version: str

    @property
    def cuda_major(self) -> int:
        """CUDA major version that the driver must have at least."""
        return flavour_major(self.flavour)

    @property
    def runtime_archive(self) -> Path:
        """Static library with the layer between generated host code and the CUDA runtime."""
        return self.folder / "lib" / "libcuda_dialect_runtime_static.a"


def flavour_major(flavour: str) -> int:
    """13 for "cu13"."""
    return int(flavour.removeprefix("cu"))


def host() -> str:
    """Processor of the host code inside a compiled kernel, e.g. x86_64."""
    return platform.machine()


@lru_cache(maxsize=1)
def driver_cuda_version() -> tuple[int, int] | None:
    """(major, minor) of the newest CUDA that the installed driver serves; None where there is no driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


def require_ffi() -> str:
    """Version of tvm-ffi, through which every compiled kernel is called. Raises MissingDependencyError."""
    try:
        return importlib.metadata.version(FFI_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise MissingDependencyError(f"calling a kernel needs {FFI_PACKAGE}: {INSTALL_FFI}") from None


@lru_cache(maxsize=1)
def toolkit() -> Toolkit:
    """The DSL that would compile here. Raises MissingDependencyError saying what is missing and what to install."""
    ffi_version = require_ffi()
    flavours = installed_flavours()
    try:
        version = importlib.metadata.version(DSL_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or not flavours:
        raise MissingDependencyError(f"compiling a kernel needs {DSL_PACKAGE}: {INSTALL[wanted_flavour()]}")
    if _release(version) not in DSL_VERSIONS:
        tested = ", ".join(".".join(map(str, v)) for v in DSL_VERSIONS)
        raise MissingDependencyError(
            f"{DSL_PACKAGE} {version} is installed, this package is tested with {tested}: {INSTALL[wanted_flavour()]}"
        )
    flavour = choose_flavour(flavours, driver_cuda_version())
    return Toolkit(version, flavour, flavours[flavour], ffi_version)


def installed_flavours() -> dict[str, Path]:
    """Complete flavours of the DSL: name -> folder. Empty without the DSL."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    folders = {f.name: f for root in roots for f in sorted(root.glob("cu[0-9]*"))}
    return {name: f for name, f in folders.items() if (f / "lib" / "libcute_dsl_runtime.so").exists()}


def choose_flavour(flavours: dict[str, Path], driver: tuple[int, int] | None) -> str:
    """The flavour that the DSL itself takes: the newest that the driver serves, without a driver the newest."""
    usable = [f for f in flavours if driver is None or flavour_major(f) <= driver[0]]
    if not usable:
        assert driver is not None, "without a driver every flavour is usable"
        raise MissingDependencyError(
            f"{DSL_PACKAGE} is installed for {', '.join(sorted(flavours))}, the driver serves CUDA "
            f"{driver[0]}.{driver[1]}: {INSTALL['cu12']}, or update the driver"
        )
    return max(usable, key=flavour_major)


def wanted_flavour() -> str:
    """The flavour to install on this machine."""
    driver = driver_cuda_version()
    return "cu12" if driver is not None and driver[0] < 13 else "cu13"


def ffi_abi(ffi_version: str) -> str:
    """The part of tvm-ffi's version that stands for its binary interface: major.minor."""
    return ".".join(map(str, _release(ffi_version)))


def _release(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
