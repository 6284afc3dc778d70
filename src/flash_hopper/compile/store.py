"""`get_kernel(plan)`: the callable of a plan, from memory, a pack, the disk cache or a fresh compile, in this order.

`launch` calls it once per plan and keeps the result. A kernel that is in memory, in a pack or on disk is served without
importing the DSL. Threads and processes that ask for the same plan at once compile it once. A cache folder that cannot
be written is replaced by a temporary one, with a warning.
"""

import atexit
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from flash_hopper import settings
from flash_hopper.compile.disk import LIBRARY, OBJECT, DiskCache, FolderError, Record, stem_of
from flash_hopper.compile.key import Plan, kernel_key, plan_text
from flash_hopper.compile.link import link, linker
from flash_hopper.compile.load import Kernel, load_function
from flash_hopper.compile.packfile import Pack, open_pack
from flash_hopper.compile.target import INSTALL, Toolkit, toolkit, wanted_flavour
from flash_hopper.problem.errors import CacheError, MissingDependencyError

if TYPE_CHECKING:
    from flash_hopper.compile.build import Built, Trace


class KernelStore:
    """All the kernels that one process can get at.

    `folder` is the disk cache (None: a temporary folder that ends with the process), `packs` are asked first. `trace`
    replaces `kernels.registry.traceable`.
    """

    def __init__(self, folder: Path | None, packs: Iterable[Pack] = (), trace: "Trace | None" = None) -> None:
        self.packs = list(packs)
        self._cache = DiskCache(folder) if folder is not None else None
        self._is_temporary = False
        self._trace = trace
        self._kernels: dict[Plan, Kernel] = {}
        self._plan_locks: dict[Plan, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, plan: Plan) -> Kernel:
        """The kernel of a plan. Raises CompileError, CacheError or MissingDependencyError."""
        kernel = self._kernels.get(plan)
        if kernel is not None:
            return kernel
        with self._lock:
            plan_lock = self._plan_locks.setdefault(plan, threading.Lock())
        with plan_lock:
            kernel = self._kernels.get(plan)
            if kernel is None:
                kernel = self._from_packs(plan) or load_function(self.ensure(plan), plan.name)
                self._kernels[plan] = kernel
        return kernel

    def find(self, plan: Plan, suffix: str | None = None) -> Path | None:
        """As `ensure`, or None if the disk cache has no such file."""
        kit = self._toolkit(plan)
        return _stored(self._current_cache(), stem_of(plan.name, kernel_key(plan, kit)), kit, suffix)

    def ensure(self, plan: Plan, suffix: str | None = None) -> Path:
        """The intact file in the disk cache that holds the kernel of a plan, compiled if it is not there yet.

        `suffix`: OBJECT or LIBRARY; None takes what is to be loaded here.
        """
        found = self.find(plan, suffix)
        if found is not None:
            return found
        kit, cache = self._toolkit(plan), self._current_cache()
        stem = stem_of(plan.name, kernel_key(plan, kit))
        try:
            with cache.locked(stem):
                return _stored(cache, stem, kit, suffix) or self._make(cache, plan, kit, suffix)
        except FolderError as error:
            self._leave_folder(cache, error)
            return self.ensure(plan, suffix)

    def _from_packs(self, plan: Plan) -> Kernel | None:
        return next((pack.kernel(plan) for pack in self.packs if plan in pack), None)

    def _toolkit(self, plan: Plan) -> Toolkit:
        try:
            return toolkit()
        except MissingDependencyError as error:
            packs = ", ".join(str(pack.path) for pack in self.packs) or "no pack is loaded"
            raise MissingDependencyError(
                f"kernel {plan.name} is in no pack ({packs}) and cannot be compiled here: {error}. Or load a pack that "
                f"holds it (made elsewhere with: flash-hopper compile --out PACK.so; loaded with {settings.PACK}=PACK.so)"
            ) from error

    def _make(self, cache: DiskCache, plan: Plan, kit: Toolkit, suffix: str | None) -> Path:
        """Compile and link; with an intact object in the cache only link. Called under the entry's lock."""
        key = kernel_key(plan, kit)
        record = cache.record(stem_of(plan.name, key))
        if record is None or not cache.has(record, OBJECT):
            build = _compiler()
            built = build(plan, self._trace)
            record = cache.write_object(_record(plan, key, kit, built), built.object_code)
        if suffix == OBJECT or (suffix is None and linker(kit) is None):
            return cache.path(record.stem, OBJECT)
        with cache.adding_library(record) as path:
            link([cache.path(record.stem, OBJECT)], path, kit)
        return cache.path(record.stem, LIBRARY)

    def _current_cache(self) -> DiskCache:
        with self._lock:
            if self._cache is None:
                self._cache = DiskCache(_temporary_folder())
                self._is_temporary = True
            return self._cache

    def _leave_folder(self, cache: DiskCache, error: FolderError) -> None:
        """Go on in a temporary folder; the warning comes once."""
        with self._lock:
            if self._cache is not cache:
                return
            if self._is_temporary:
                raise CacheError(
                    f"compiled kernels can be kept nowhere, not even in {cache.folder}: {error}"
                ) from error
            self._cache = None
        warnings.warn(
            f"flash-hopper cannot keep compiled kernels in {cache.folder} ({error}): each process compiles its own. Set "
            f"{settings.CACHE} to a folder that can be written, or to 'off' to silence this",
            RuntimeWarning,
            stacklevel=2,
        )


def get_kernel(plan: Plan) -> Kernel:
    """The kernel of a plan as a callable; its arguments are those of the plan's kind (see `kernels.registry`).

    Raises CompileError, CacheError or MissingDependencyError, each saying what to do.
    """
    return default_store().get(plan)


def default_store() -> KernelStore:
    """The store of this process, set up from the environment at its first use."""
    global _default
    if _default is None:
        with _default_lock:
            if _default is None:
                _default = KernelStore(settings.cache_folder(), map(open_pack, settings.pack_paths()))
    return _default


_default: KernelStore | None = None
_default_lock = threading.Lock()


def _compiler() -> "Callable[..., Built]":
    """The compiler, imported only when it is needed. Raises MissingDependencyError if the DSL is there but broken."""
    try:
        from flash_hopper.compile.build import build
    except ImportError as error:
        raise MissingDependencyError(f"the DSL cannot be imported: {error}; {INSTALL[wanted_flavour()]}") from error
    return build


def _stored(cache: DiskCache, stem: str, kit: Toolkit, suffix: str | None) -> Path | None:
    """The intact file of an entry: the one asked for, or the library, or the object where nothing can be linked."""
    record = cache.record(stem)
    if record is None:
        return None
    if suffix is None:
        suffix = LIBRARY if cache.has(record, LIBRARY) or linker(kit) is not None else OBJECT
    return cache.path(stem, suffix) if cache.has(record, suffix) else None


def _record(plan: Plan, key: str, kit: Toolkit, built: "Built") -> Record:
    return Record(
        key=key,
        symbol=built.symbol,
        plan=plan_text(plan),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        dsl_version=kit.dsl_version,
        flavour=kit.flavour,
        ffi_version=kit.ffi_version,
        registers=built.report.registers,
        compile_seconds=round(built.seconds, 3),
        files={},
    )


def _temporary_folder() -> Path:
    """A folder that is removed at the end of this process (not of its forks)."""
    folder, owner = Path(tempfile.mkdtemp(prefix="flash-hopper-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
