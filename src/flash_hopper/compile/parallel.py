"""Many plans at once: compile them into a disk cache with several worker processes.

The compiler is single-threaded and takes 1 to 2 s and 0.6 GB a kernel, so throughput comes from processes. Called by
`pack`, `flash-hopper compile` and the tests. Workers are spawned: a script that calls this needs the usual
`if __name__ == "__main__"`.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from flash_hopper import settings
from flash_hopper.compile.disk import DiskCache
from flash_hopper.compile.key import Plan
from flash_hopper.compile.store import KernelStore
from flash_hopper.problem.errors import CacheError, CompileError

if TYPE_CHECKING:
    from flash_hopper.compile.build import Trace

Result = TypeVar("Result")
# Called after each plan with its name, how many are done and how many there are.
Progress = Callable[[str, int, int], None]


def fill_cache(plans: Sequence[Plan], jobs: int | None = None, progress: Progress | None = None) -> list[Path]:
    """Put the kernels of `plans` into the disk cache of this user; returns their files, in order.

    Raises CacheError if there is no such cache or it cannot be written, and what `compile_into` raises.
    """
    return compile_into(_writable_cache(), plans, jobs=jobs, progress=progress)


def fill_cache_as_far_as_possible(
    plans: Sequence[Plan], jobs: int | None = None, progress: Progress | None = None
) -> dict[Plan, str]:
    """As `fill_cache`, but a plan that does not compile is no error: returns why, for each of them."""
    return failures_of(_writable_cache(), plans, jobs=jobs, progress=progress)


def failures_of(
    folder: Path,
    plans: Sequence[Plan],
    suffix: str | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    trace: "Trace | None" = None,
) -> dict[Plan, str]:
    """Compile `plans` into the disk cache `folder`, as `compile_into` does; why not, for each that does not compile.

    What kills the compiler's process counts as such a reason. Other errors are raised.
    """
    plans = list(dict.fromkeys(plans))
    arguments = (str(folder), suffix, trace)
    reasons: dict[Plan, str | None] = {}

    def note(plan: Plan, reason: str | None) -> None:
        reasons[plan] = reason
        if progress is not None:
            progress(plan.name, len(reasons), len(plans))

    try:
        for i, reason in _completed(_reason, plans, jobs, *arguments):
            note(plans[i], reason)
    except BrokenProcessPool:  # whose fault it was is not known: what is not done gets a process each
        for plan in [plan for plan in plans if plan not in reasons]:
            try:
                note(plan, next(_completed(_reason, [plan], 1, *arguments))[1])
            except BrokenProcessPool as error:
                note(plan, f"the compile process died: {error}")
    return {plan: reason for plan, reason in reasons.items() if reason is not None}


def compile_into(
    folder: Path,
    plans: Sequence[Plan],
    suffix: str | None = None,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
    trace: "Trace | None" = None,
) -> list[Path]:
    """Files of `plans`, in order, compiled into the disk cache `folder` where they are not there yet.

    `suffix` as in `KernelStore.ensure`: None for what this machine would load, OBJECT for what packs are linked from.
    `jobs` worker processes (default: one a core). Raises MissingDependencyError, CacheError if the folder cannot be
    written or, for the first plan that fails, CompileError.
    """
    store, unique = KernelStore(folder), list(dict.fromkeys(plans))
    found = {plan: path for plan in unique if (path := store.find(plan, suffix)) is not None}
    missing = [plan for plan in unique if plan not in found]
    tell: Progress = progress or (lambda name, done, total: None)
    for done, plan in enumerate(found, 1):
        tell(plan.name, done, len(unique))
    already = len(found)

    def advance(name: str, done: int, _: int) -> None:
        tell(name, already + done, len(unique))

    made = map_plans(_ensure, missing, jobs, advance, str(folder), suffix, trace)
    lost = [path for path in made if path.parent != folder]
    if lost:
        raise CacheError(f"{folder} could not be written, {len(lost)} kernels were lost; is the disk full?")
    found.update(zip(missing, made, strict=True))
    return [found[plan] for plan in plans]


def map_plans(
    function: Callable[..., Result],
    plans: Sequence[Plan],
    jobs: int | None = None,
    progress: Progress | None = None,
    *arguments: Any,
) -> list[Result]:
    """[function(plan, *arguments) for plan in plans] in worker processes; `function` is one that can be pickled."""
    results: dict[int, Result] = {}
    try:
        for i, result in _completed(function, plans, jobs, *arguments):
            results[i] = result
            if progress is not None:
                progress(plans[i].name, len(results), len(plans))
    except BrokenProcessPool as error:
        raise CompileError(f"a compile process died (out of memory? each takes 0.6 GB): {error}") from error
    return [results[i] for i in range(len(plans))]


def _completed(
    function: Callable[..., Result], plans: Sequence[Plan], jobs: int | None, *arguments: Any
) -> Iterator[tuple[int, Result]]:
    """(number of the plan, function(plan, *arguments)) as worker processes get done. Raises BrokenProcessPool if one dies."""
    if not plans:
        return
    workers = min(jobs or os.cpu_count() or 1, len(plans))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        futures = {pool.submit(function, plan, *arguments): i for i, plan in enumerate(plans)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _writable_cache() -> Path:
    """This user's disk cache. Raises CacheError."""
    folder = settings.cache_folder()
    if folder is None:
        raise CacheError(f"the disk cache is off; set {settings.CACHE} to a folder")
    if not DiskCache(folder).is_writable:
        raise CacheError(f"the disk cache {folder} cannot be written; set {settings.CACHE} to another folder")
    return folder


def _reason(plan: Plan, folder: str, suffix: str | None, trace: "Trace | None") -> str | None:
    """Why a plan does not compile; None if it does."""
    try:
        _ensure(plan, folder, suffix, trace)
    except CompileError as error:
        return str(error)
    return None


def _ensure(plan: Plan, folder: str, suffix: str | None, trace: "Trace | None") -> Path:
    return KernelStore(Path(folder), trace=trace).ensure(plan, suffix)
