"""Packs of ready-made kernels: build one where the DSL is, serve from it where only torch and tvm-ffi are.

`build_pack` is behind `flash-hopper compile --out`, `load_pack` is public and does what `FLASH_HOPPER_PACK` does.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from flash_hopper import settings
from flash_hopper.compile.disk import OBJECT, DiskCache
from flash_hopper.compile.key import Plan, plan_digest, source_fingerprint
from flash_hopper.compile.link import link, require_linker
from flash_hopper.compile.packfile import Manifest, Pack, append_manifest, open_pack
from flash_hopper.compile.parallel import Progress, compile_into, failures_of
from flash_hopper.compile.store import default_store
from flash_hopper.compile.target import GPU_ARCH, Toolkit, host, toolkit
from flash_hopper.problem.errors import ArgumentError, CacheError, CompileError
from flash_hopper.version import __version__

if TYPE_CHECKING:
    from flash_hopper.compile.build import Trace


def build_pack(
    plans: Sequence[Plan],
    out: str | os.PathLike[str],
    jobs: int | None = None,
    progress: Progress | None = None,
    trace: "Trace | None" = None,
    failures: dict[Plan, str] | None = None,
) -> Pack:
    """Compile `plans` with `jobs` worker processes (default: one a core) and link them into the pack `out`.

    `failures`: if given, plans that do not compile are left out of the pack and noted there with the reason.

    Objects that the disk cache has are reused. `progress(name, done, total)` is called after each kernel. Raises
    CompileError, CacheError if `out` cannot be written, MissingDependencyError without DSL, tvm-ffi or a C compiler.
    """
    plans = list(dict.fromkeys(plans))
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise ArgumentError(f"two plans of a pack have one name: {sorted(n for n in set(names) if names.count(n) > 1)}")
    if not plans:
        raise ArgumentError("a pack needs at least one plan")
    kit, path = toolkit(), Path(out)
    require_linker(kit)
    with _replacing(path) as library, tempfile.TemporaryDirectory(prefix="flash-hopper-") as scratch:
        cache = settings.cache_folder()
        folder = cache if cache is not None and DiskCache(cache).is_writable else Path(scratch)
        if failures is not None:
            failures |= failures_of(folder, plans, OBJECT, jobs=jobs, progress=progress, trace=trace)
            plans = [plan for plan in plans if plan not in failures]
            if not plans:
                raise CompileError(f"no plan of the pack compiles; the first: {next(iter(failures.values()))}")
            progress = None  # all are there
        objects = compile_into(folder, plans, OBJECT, jobs=jobs, progress=progress, trace=trace)
        link(objects, library, kit)
        append_manifest(library, _manifest(plans, kit))
    return open_pack(path)


def load_pack(path: str | os.PathLike[str]) -> Pack:
    """Serve kernels from a pack in this process, before the disk cache and before packs loaded earlier.

    Needs torch and tvm-ffi, neither the DSL nor a compiler. Raises CacheError if the pack is damaged, was made from
    other sources, for another processor or tvm-ffi, or for a newer driver; the message says what to do.
    """
    pack = open_pack(Path(path).expanduser())
    default_store().packs.insert(0, pack)
    return pack


def _manifest(plans: Sequence[Plan], kit: Toolkit) -> Manifest:
    return Manifest(
        package_version=__version__,
        sources=source_fingerprint(),
        dsl_version=kit.dsl_version,
        flavour=kit.flavour,
        ffi_version=kit.ffi_version,
        target=GPU_ARCH,
        host=host(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        kernels={plan_digest(plan): plan.name for plan in plans},
    )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Gives a new file beside `path` that takes its place in one step, or vanishes after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()  # before minutes of compiling: may it be written?
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        raise CacheError(f"pack {path} cannot be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
