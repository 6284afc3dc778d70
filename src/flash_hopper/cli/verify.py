"""`flash-hopper verify`: run a suite of cases against float64 and say which fail, and how to replay them.

One line a failure, then `N passed, N failed`, alone on the last line; the exit code is 1 if anything failed or
could not be run. How far it is, and which case runs, is shown and stored now and then, so a run that hangs or is cut off
says where. What is checked: `testing/run.py`, `testing/compare.py`; the suites: `testing/suites.py`.
"""

import json as json_format
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_hopper.problem.errors import ArgumentError, DeviceError
from flash_hopper.testing.pulse import Pulse

if TYPE_CHECKING:
    from flash_hopper.testing.cases import Case
    from flash_hopper.testing.run import CaseResult

PULSE_SECONDS = 10.0  # between two words on how far a run is


def verify(
    suite: Annotated[
        str,
        typer.Option(
            help="forward, backward, ragged (with window) or window alone, accumulate, fp8 or fp8-rows; smoke, backward-smoke or "
            "ragged-smoke for the CPU; sanitizer, backward-sanitizer, ragged-sanitizer or fp8-sanitizer for slow tools."
        ),
    ] = "smoke",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:N; by default cuda if there is a GPU of capability 9.0.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Run this many cases, evenly spread over the suite.")] = None,
    seed: Annotated[int, typer.Option(help="Other random numbers for every case.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Store the outcome here; also while it runs.")] = None,
    case: Annotated[str | None, typer.Option(help="Run one case, in the form in which failures are shown.")] = None,
    repeat: Annotated[
        int, typer.Option(min=1, help="Call each case so often and demand the same bits where they are promised.")
    ] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Run so many cases at once, each in a process of its own.")] = 1,
) -> None:
    """Check attention and its gradients against float64, element by element, over a grid of cases."""
    from flash_hopper.testing.cases import Case
    from flash_hopper.testing.environment import environment
    from flash_hopper.testing.suites import sample
    from flash_hopper.testing.suites import suite as cases_of

    place = _device(device)
    cases = [Case.parse(case)] if case is not None else sample(cases_of(suite, seed), limit)
    console = Console()
    # asked for first: a lost GPU answers nothing
    facts = environment() if json is not None else {}
    outcome = _Outcome(cases, one_by_one=jobs == 1)

    def store() -> None:
        if json is not None:
            _write(json, facts, "case" if case is not None else suite, place, outcome)

    def beat() -> None:
        store()
        if not console.is_terminal:
            Console(stderr=True).print(outcome.progress(place), **_PLAIN)

    with Pulse(beat, PULSE_SECONDS):
        _run_all(outcome, place, repeat, jobs, console)
    store()
    not_run = outcome.not_run
    if outcome.lost:
        lost = f"the GPU does not answer any more ({outcome.lost})"
        console.print(f"stopped: {lost}; {not_run} cases were not run", **_PLAIN)
    if outcome.closest is not None:
        ratio, closest = outcome.closest.worst_ratio, outcome.closest.case
        console.print(f"largest error of those that passed: {ratio:.2f} of what is allowed, {closest}", **_PLAIN)
    console.print(f"{outcome.passed} passed, {len(outcome.failures)} failed", **_PLAIN)
    if outcome.failures or not_run:
        raise typer.Exit(1)


@dataclass
class _Outcome:
    """What a run of these cases gave so far: `closest` is the passed case with the largest error, `lost` why the run ended
    early, if it did, `since` when the last result came."""

    cases: "list[Case]"
    one_by_one: bool
    passed: int = 0
    failures: "list[CaseResult]" = field(default_factory=list)
    closest: "CaseResult | None" = None
    lost: str | None = None
    since: float = field(default_factory=time.monotonic)

    @property
    def not_run(self) -> int:
        """Cases without a result."""
        return len(self.cases) - self.passed - len(self.failures)

    @property
    def running(self) -> "Case | None":
        """The case that is being run, if that is known and there is one."""
        left = self.not_run
        return self.cases[-left] if left and self.one_by_one and self.lost is None else None

    def add(self, result: "CaseResult") -> None:
        """Count one result."""
        self.since = time.monotonic()
        if not result.passed:
            self.failures.append(result)
            return
        self.passed += 1
        if self.closest is None or result.worst_ratio > self.closest.worst_ratio:
            self.closest = result

    def progress(self, device: str) -> str:
        """How far it is, in a line."""
        done, running = len(self.cases) - self.not_run, self.running
        now = "" if running is None else f"; for {time.monotonic() - self.since:.0f} s: {running}"
        return f"verify on {device}: {done} of {len(self.cases)} cases, {len(self.failures)} failed{now}"


# messages hold brackets and are long: no markup, no colours of numbers, no wrapping
_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def _device(name: str | None) -> str:
    """The device to use. Raises DeviceError for one that cannot run anything here."""
    import torch

    if name is None:
        has_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
        return "cuda" if has_hopper else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ArgumentError(f"--device must be cpu, cuda or cuda:N, got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}: this machine has {torch.cuda.device_count()} CUDA devices")
    return name


def _run_all(outcome: _Outcome, device: str, repeat: int, jobs: int, console: Console) -> None:
    """Run the cases until the end or until the GPU is lost. Failures are shown as they come."""
    from flash_hopper.testing.workers import DeviceLost, results

    cases = outcome.cases
    text = TextColumn("verify on {task.fields[device]}"), TextColumn("{task.fields[state]}")
    columns = (text[0], BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), text[1])
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=len(cases), device=device, state="")
        try:
            for result in results(cases, device, repeat=repeat, jobs=jobs):
                outcome.add(result)
                if not result.passed:
                    replay = replay_command(result.case, device, repeat)
                    progress.console.print(f"FAILED {result.message} | {replay}", **_PLAIN)
                progress.update(task, advance=1, state=f"{len(outcome.failures)} failed" if outcome.failures else "")
        except DeviceLost as lost:
            outcome.lost = str(lost)


def replay_command(case: "Case", device: str, repeat: int = 1) -> str:
    """The command that runs one case again."""
    again = f" --repeat {repeat}" if repeat > 1 else ""
    return f'flash-hopper verify --device {device}{again} --case "{case}"'


def _write(path: Path, facts: dict[str, Any], suite: str, device: str, outcome: _Outcome) -> None:
    """The outcome so far, in one step: whoever reads the file finds all of it."""
    failures = [
        {"case": str(f.case), "message": f.message, "replay": replay_command(f.case, device)}
        for f in list(outcome.failures)
    ]
    closest, running = outcome.closest, outcome.running
    stored = {
        "env": facts,
        "suite": suite,
        "device": device,
        "passed": outcome.passed,
        "failed": len(failures),
        "not_run": outcome.not_run,
        "running": None if running is None else str(running),
        "closest": None if closest is None else {"case": str(closest.case), "error_to_allowed": closest.worst_ratio},
        "failures": failures,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(json_format.dumps(stored, indent=1) + "\n")
    os.replace(part, path)
