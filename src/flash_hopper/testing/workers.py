"""Run cases one after the other or in several processes: `results`, called by `cli/verify.py`.

Several are for the CPU. On a GPU, whose time processes share in slices, they wait for each other.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool

from flash_hopper.testing.cases import Case
from flash_hopper.testing.run import CaseResult, lost_device, run_case

_CASES_A_TASK = 8  # few enough that the last ones end together


class DeviceLost(RuntimeError):
    """The GPU, or the process that used it, is beyond repair; the text says what it answered."""


def results(cases: Sequence[Case], device: str, *, repeat: int = 1, jobs: int = 1) -> Iterator[CaseResult]:
    """The result of each case as soon as there is one: in order with one job, else in any order.

    Raises DeviceLost, after the result that showed it, if the GPU answers nothing any more or a process died; the cases
    whose results were not given by then did not run, or nobody knows how.
    """
    if jobs == 1 or len(cases) <= _CASES_A_TASK:
        for case in cases:
            result = run_case(case, device, repeat=repeat)
            yield result
            if not result.passed and (lost := lost_device(device)) is not None:
                raise DeviceLost(lost)
        return
    tasks = [cases[i : i + _CASES_A_TASK] for i in range(0, len(cases), _CASES_A_TASK)]
    context = multiprocessing.get_context("spawn")  # a forked child could not use CUDA
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=context) as pool:
        futures = [pool.submit(_run, task, device, repeat) for task in tasks]
        try:
            for future in as_completed(futures):
                found, lost = future.result()
                yield from found
                if lost is not None:
                    raise DeviceLost(lost)
        except BrokenProcessPool as error:
            raise DeviceLost(f"a process died: {error}") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _run(cases: Sequence[Case], device: str, repeat: int) -> tuple[list[CaseResult], str | None]:
    """In a process of the pool: results, and why there are no more, if the GPU was lost."""
    found: list[CaseResult] = []
    try:
        found.extend(results(cases, device, repeat=repeat))
    except DeviceLost as lost:
        return found, str(lost)
    return found, None
