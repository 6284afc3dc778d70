"""A GPU floor in several runs (`tests/shared/floor.py`), with tests of its own that need no GPU."""

import subprocess
import sys

import pytest

TESTS = """
import os, pytest

@pytest.mark.parametrize("i", range(6))
def test_one(i):
    if os.environ.get("CUT") == str(i):
        raise KeyboardInterrupt
    assert os.environ.get("FAIL") != str(i)
"""
CONFTEST = """
from pathlib import Path
from floor import OPTION, Floor

def pytest_addoption(parser):
    parser.addoption(OPTION, type=Path)

def pytest_configure(config):
    config.pluginmanager.register(Floor(config.getoption(OPTION), hasattr(config, "workerinput")))
"""


@pytest.fixture
def run(tmp_path, repository, monkeypatch):
    """Runs the tests above; returns what was printed and the names in the file."""
    (tmp_path / "test_few.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    monkeypatch.setenv("PYTHONPATH", str(repository / "tests" / "shared"))
    names = tmp_path / "passed.txt"

    def call(*options: str, **environment: str) -> tuple[str, list[str]]:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--passed", names.name, *options]
        done = subprocess.run([*command, "test_few.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        for name in environment:
            monkeypatch.delenv(name)
        return done.stdout, names.read_text().splitlines() if names.exists() else []

    return call


def name_of(i: int) -> str:
    return f"test_few.py::test_one[{i}]"


def test_a_run_that_is_cut_off_says_so_and_the_next_one_goes_on(run):
    printed, names = run(CUT="4")
    assert "2 of 6 tests did not run" in printed
    assert names == [name_of(i) for i in range(4)]
    printed, names = run()
    assert "did not run" not in printed and "2 passed, 4 deselected" in printed
    assert names == [name_of(i) for i in range(6)]


def test_tests_that_fail_run_again(run):
    printed, names = run(FAIL="1")
    assert "1 failed, 5 passed" in printed and "did not run" not in printed
    assert name_of(1) not in names and len(names) == 5
    assert "1 passed, 5 deselected" in run()[0]


def test_several_processes_write_each_name_once(run):
    printed, names = run("-n", "2")
    assert "6 passed" in printed and "did not run" not in printed
    assert sorted(names) == [name_of(i) for i in range(6)]
    assert "6 deselected" in run("-n", "2")[0] or "no tests ran" in run("-n", "2")[0]
