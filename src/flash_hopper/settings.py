"""Every environment variable that this package reads, and nothing else reads any.

| variable | meaning | default |
|---|---|---|
| `FLASH_HOPPER_CACHE` | folder of compiled kernels, or `off` to keep none on disk | `flash-hopper` in the user cache folder |
| `FLASH_HOPPER_PACK` | ready-made packs to serve kernels from, separated as in `PATH` | none |
| `FLASH_HOPPER_TILES` | a file of forward tiles of your own, as `flash-hopper tune` writes it | none |
| `XDG_CACHE_HOME` | the user cache folder | `~/.cache` |
| `CC` | C compiler that links compiled kernels; `none` (or what does not exist) leaves it to the DSL's loader | `cc`, `gcc` or `clang` on the path |
| `CUDA_HOME`, `CUDA_PATH` | CUDA toolkit with the CUDA runtime to link and with cuobjdump and nvdisasm | `/usr/local/cuda` |
| `CUTE_DSL_*` | settings of the compiler itself; those that change its output are part of every compile key | none |

Each function reads the environment when it is called, so a change takes effect for whatever is not loaded yet.
"""

import os
from pathlib import Path

CACHE = "FLASH_HOPPER_CACHE"
PACK = "FLASH_HOPPER_PACK"
TILES = "FLASH_HOPPER_TILES"

# Settings of the DSL that change the code it generates. Its target (CUTE_DSL_ARCH) is not among them: we always pass it.
_DSL_CODE_SETTINGS = (
    "CUTE_DSL_AUTO_M2S",
    "CUTE_DSL_COMPILER_BACKEND",
    "CUTE_DSL_COMPILER_OPT",
    "CUTE_DSL_DEBUG",
    "CUTE_DSL_DRYRUN",
    "CUTE_DSL_ENABLE_ASSERTIONS",
    "CUTE_DSL_ENABLE_PYIR",
    "CUTE_DSL_LINEINFO",
    "CUTE_DSL_LOC_TRACEBACKS",
    "CUTE_DSL_TOLERATE_M2M",
)


def cache_folder() -> Path | None:
    """Folder of compiled kernels (it need not exist), or None if nothing is to be kept on disk."""
    value = os.environ.get(CACHE, "").strip()
    if value.lower() == "off":
        return None
    if value:
        return Path(value).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME", "").strip()
    try:
        root = Path(user_cache) if user_cache else Path.home() / ".cache"
    except RuntimeError:  # this user has no home folder
        return None
    return root / "flash-hopper"


def pack_paths() -> tuple[Path, ...]:
    """Packs to serve kernels from, in the order given."""
    return tuple(Path(p).expanduser().absolute() for p in os.environ.get(PACK, "").split(os.pathsep) if p.strip())


def tiles_file() -> Path | None:
    """The user's own rows of forward tiles, if there are any."""
    value = os.environ.get(TILES, "").strip()
    return Path(value).expanduser().absolute() if value else None


def c_compiler() -> str | None:
    """The C compiler that the user named, if any."""
    return os.environ.get("CC", "").strip() or None


def cuda_home() -> Path:
    """Where a CUDA toolkit would be; it need not exist."""
    return Path(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda")


def search_path() -> str:
    """Folders of commands, as in `PATH`."""
    return os.environ.get("PATH", os.defpath)


def dsl_code_settings() -> tuple[tuple[str, str], ...]:
    """The DSL's own settings that change generated code, as (name, value) for those that are set."""
    return tuple((name, os.environ[name]) for name in _DSL_CODE_SETTINGS if os.environ.get(name))
