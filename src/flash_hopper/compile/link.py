"""Object files become a shared library that needs only tvm-ffi: with the system's C compiler.

Two routes serve a compiled kernel, and `linker` decides which one this machine has:

- **C compiler** (`cc`, `gcc`, `clang` or `$CC`): objects, the DSL's runtime archive, a few lines of C and the CUDA runtime
  become one library. Warm starts import no compiler. Packs can be made only so.
- **DSL loader**: without a C compiler or a CUDA runtime of the right major version the object is kept as it is, and the
  DSL's own loader links it in memory. Each process that uses a kernel then imports the DSL (0.5 s, up to 4 s from a
  cold disk).

Called by `store` and `pack`; `describe` is for `flash-hopper env`.
"""

import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flash_hopper import settings
from flash_hopper.compile.target import Toolkit, host, toolkit
from flash_hopper.problem.errors import CompileError, MissingDependencyError

# Generated host code reports CUDA errors through these two; the DSL's archive lacks them, its header declares them.
_ERROR_SHIM = r"""
#include <stdint.h>
#include <stdio.h>
typedef void (*raise_t)(const char *kind, const char **parts, int32_t count);
const char *cudaGetErrorName(int code);
const char *cudaGetErrorString(int code);

__attribute__((visibility("hidden"))) void CuteDSLRT_TVMFFISetRaisedCudaError(raise_t raise, int32_t code) {
  const char *parts[] = {"CUDA error ", cudaGetErrorName(code), ": ", cudaGetErrorString(code)};
  if (raise) raise("RuntimeError", parts, 4);
}

__attribute__((visibility("hidden"))) void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(
    raise_t raise, int32_t grid_x, int32_t grid_y, int32_t grid_z, int32_t block_x, int32_t block_y, int32_t block_z,
    int32_t threads, int64_t smem, int32_t device, int32_t max_threads, int32_t max_block_x, int32_t max_block_y,
    int32_t max_block_z, int32_t max_grid_x, int32_t max_grid_y, int32_t max_grid_z, int32_t max_smem,
    int32_t max_smem_optin, const char *violation, const char *file, int32_t line, int32_t column, int32_t end) {
  char text[256];
  snprintf(text, sizeof text, "grid (%d, %d, %d), block (%d, %d, %d), %lld bytes of shared memory (limit %d), device %d",
           grid_x, grid_y, grid_z, block_x, block_y, block_z, (long long)smem, max_smem_optin, device);
  const char *parts[] = {"launch refused: ", violation ? violation : "invalid", ": ", text};
  if (raise) raise("RuntimeError", parts, 4);
}
"""

_RUNTIME_WHEELS = {"cu12": "pip install nvidia-cuda-runtime-cu12", "cu13": "pip install nvidia-cuda-runtime"}

_FLAGS = ("-shared", "-fPIC", "-O2", "-Wl,--exclude-libs,ALL", "-Wl,--gc-sections", "-Wl,-z,now", "-Wl,-s")


@dataclass(frozen=True, slots=True)
class Linker:
    """A C compiler's command and the CUDA runtime to link: a static archive, or the shared library where there is none."""

    command: tuple[str, ...]
    cuda_runtime: Path

    @property
    def runtime_arguments(self) -> list[str]:
        """What to add to the link line for the CUDA runtime."""
        if self.cuda_runtime.suffix == ".a":
            return [str(self.cuda_runtime), "-ldl", "-lrt", "-lpthread"]
        return [str(self.cuda_runtime), f"-Wl,-rpath,{self.cuda_runtime.parent}"]


def linker(kit: Toolkit) -> Linker | None:
    """The linker for this toolkit's objects; None if kernels go through the DSL's own loader."""
    command, runtime = _compiler_command(), cuda_runtime(kit.cuda_major)
    return Linker(command, runtime) if command and runtime else None


def require_linker(kit: Toolkit) -> Linker:
    """The linker, or MissingDependencyError saying what is missing."""
    found = linker(kit)
    if found is None:
        raise MissingDependencyError(f"a library of kernels cannot be linked: {' and '.join(_missing(kit))}")
    return found


def describe() -> str:
    """One line: how compiled kernels are linked and loaded on this machine."""
    try:
        kit = toolkit()
    except MissingDependencyError as error:
        return f"packs only ({error})"
    found = linker(kit)
    if found is None:
        return f"DSL loader, each process imports the DSL ({' and '.join(_missing(kit))})"
    return f"{' '.join(found.command)} with {found.cuda_runtime}"


def link(objects: Sequence[Path], out: Path, kit: Toolkit) -> None:
    """Link object files made by `kit` into the shared library `out`. Raises MissingDependencyError or CompileError."""
    found = require_linker(kit)
    with tempfile.TemporaryDirectory(prefix="flash-hopper-") as folder:
        shim = Path(folder) / "errors.c"
        shim.write_text(_ERROR_SHIM, encoding="utf-8")
        # the tvm-ffi symbols stay undefined: its library is in the process before a kernel is loaded
        command = [*found.command, *_FLAGS, "-o", str(out), *map(str, objects), str(shim), str(kit.runtime_archive)]
        done = subprocess.run([*command, *found.runtime_arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(
            f"{' '.join(found.command)} could not link {out.name}: {done.stderr.strip()}\nSet CC to another C compiler, or to "
            "'none' to load kernels through the DSL"
        )


def cuda_runtime(major: int) -> Path | None:
    """The CUDA runtime of this major version, from wheels or a toolkit; a static archive is preferred."""
    wheels = [Path(sysconfig.get_path(name)) / "nvidia" for name in ("purelib", "platlib")]
    folders = [wheel / part / "lib" for wheel in wheels for part in (f"cu{major}", "cuda_runtime")]
    folders += [settings.cuda_home() / "lib64", settings.cuda_home() / "lib"]
    folders += [Path(sys.prefix) / "lib", Path(f"/usr/lib/{host()}-linux-gnu")]
    shared = [f / f"libcudart.so.{major}" for f in folders if (f / f"libcudart.so.{major}").exists()]
    # the archive's name has no version: the shared library beside it tells
    static = [so.with_name("libcudart_static.a") for so in shared]
    return next((path for path in [*static, *shared] if path.exists()), None)


def _compiler_command() -> tuple[str, ...]:
    named = settings.c_compiler()
    if named is not None:
        command = tuple(shlex.split(named))
        return command if shutil.which(command[0]) else ()
    found = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    return (found,) if found else ()


def _missing(kit: Toolkit) -> list[str]:
    missing = []
    if not _compiler_command():
        missing.append("no C compiler was found (install gcc or clang, or set CC)")
    if cuda_runtime(kit.cuda_major) is None:
        missing.append(f"no CUDA {kit.cuda_major} runtime was found ({_RUNTIME_WHEELS[kit.flavour]})")
    return missing
