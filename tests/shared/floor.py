"""A GPU floor in several runs: `--passed FILE` leaves out the tests that the file names, and adds those that pass.

So a run that was cut off goes on where it stood. And however a run ends, it says how many of the tests that it collected did not run:
pytest itself counts only those that did. Registered by `tests/gpu/conftest.py`.
"""

from pathlib import Path
from typing import Any

import pytest

OPTION = "--passed"


class Floor:
    """A plugin, in each process of a run; only the one that prints writes the file."""

    def __init__(self, file: Path | None, is_worker: bool) -> None:
        self.file = file
        self.is_worker = is_worker
        self.collected = 0
        self.ran: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """After `-m` and `-k`. Workers start together, before the file grows."""
        known = names_in(self.file)
        gone = [item for item in items if item.nodeid in known]
        if gone:
            items[:] = [item for item in items if item.nodeid not in known]
            config.hook.pytest_deselected(items=gone)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Without workers."""
        self.collected = max(self.collected, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """With them: each collects everything."""
        self.collected = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Setup, call and teardown of each test."""
        if report.when == "teardown":
            self.ran.add(report.nodeid)
        elif report.when == "call" and report.passed and self.file is not None and not self.is_worker:
            with self.file.open("a", encoding="utf-8") as names:
                names.write(report.nodeid + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The last word."""
        missing = self.collected - len(self.ran)
        if missing:
            terminalreporter.write_line(f"{missing} of {self.collected} tests did not run", red=True)


def names_in(file: Path | None) -> set[str]:
    """The lines of a file, none if there is no file."""
    return set(file.read_text(encoding="utf-8").splitlines()) if file is not None and file.exists() else set()
