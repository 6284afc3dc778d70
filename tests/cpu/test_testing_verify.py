"""`flash-hopper verify`: the closing line, the exit code, failures that replay, the stored outcome, a lost GPU."""

import json
import re
import shlex
import time

import pytest
import torch
from processes import die
from typer.testing import CliRunner

import flash_hopper
from flash_hopper.cli import verify as verify_module
from flash_hopper.cli.main import app
from flash_hopper.cli.verify import replay_command
from flash_hopper.problem.errors import ArgumentError, DeviceError
from flash_hopper.testing import run, workers
from flash_hopper.testing.cases import Case
from flash_hopper.testing.pulse import Pulse
from flash_hopper.testing.run import CaseResult
from flash_hopper.testing.suites import suite

CASE = "dtype=bf16,b=1,h=2,hk=1,sq=20,sk=30,d=16,dv=16"


def verify(*arguments, code=0):
    result = CliRunner().invoke(app, ["verify", *arguments])
    if isinstance(result.exception, flash_hopper.FlashHopperError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output.splitlines()


@pytest.fixture
def wrong_for_causal(monkeypatch):
    """The public function, wrong for causal calls and raising for empty ones."""

    def function(q, k, v, scale, causal, **options):
        if 0 in q.shape:
            raise RuntimeError("nothing [to] do")
        return flash_hopper.flash_attn_func(q, k, v, scale, causal=False, **options)

    monkeypatch.setattr(run, "flash_attn_func", function)


@pytest.mark.parametrize("name", ["smoke", "backward-smoke"])
def test_the_smoke_suites_pass_on_the_cpu(name):
    lines = verify("--suite", name, "--device", "cpu")
    assert lines[-1] == f"{len(suite(name))} passed, 0 failed"


def test_repeated_deterministic_gradients_must_agree_and_others_be_right(monkeypatch):
    """Gradients that drift by a little: a failure where bits are promised, and only there."""
    calls = []

    def drifting(q, k, v, scale, deterministic=False, **options):
        calls.append(1)
        factor = 1 + 2**-6 * (len(calls) % 2)
        result = flash_hopper.flash_attn_func(q, k, v, scale, **options)
        result[0].register_hook(lambda grad: grad * factor)
        return result

    monkeypatch.setattr(run, "flash_attn_func", drifting)
    monkeypatch.setattr(run, "compare", lambda name, *_: run.Comparison(0.0, 0.0, ""))
    case = f"{CASE},out=0,dir=backward"
    assert verify("--case", case, "--device", "cpu", "--repeat", "3")[-1] == "1 passed, 0 failed"
    lines = verify("--case", f"{case},det=1", "--device", "cpu", "--repeat", "3", code=1)
    assert re.match(r"FAILED d[qkv] of call 2 differs from that of call 1 in \d+ elements", lines[0])
    assert Case.parse(shlex.split(lines[0].partition(" | ")[2])[-1]).deterministic


def test_a_failed_gradient_is_told_with_the_command_that_replays_it(monkeypatch):
    def wrong(q, k, v, scale, **options):
        result = flash_hopper.flash_attn_func(q, k, v, scale, **options)
        result[0].register_hook(lambda grad: -grad)
        return result

    monkeypatch.setattr(run, "flash_attn_func", wrong)
    (failure, closing) = verify("--case", f"{CASE},out=0,dir=backward,grads=kv", "--device", "cpu", code=1)
    assert closing == "0 passed, 1 failed"
    assert failure.startswith("FAILED dk[") and "; dv[" in failure
    assert verify(*shlex.split(failure.partition(" | ")[2])[2:], code=1) == [failure, closing]


@pytest.mark.parametrize("limit", [1, 5])
def test_a_limit_runs_so_many_cases(limit):
    assert verify("--suite", "smoke", "--device", "cpu", "--limit", str(limit))[-1] == f"{limit} passed, 0 failed"


def test_each_failure_is_one_line_with_the_command_that_replays_it(wrong_for_causal):
    lines = verify("--suite", "smoke", "--device", "cpu", code=1)
    closing = re.fullmatch(r"(\d+) passed, (\d+) failed", lines[-1])
    failures = [line for line in lines if line.startswith("FAILED ")]
    assert len(failures) == int(closing[2]) > 10
    assert int(closing[1]) + int(closing[2]) == len(suite("smoke"))
    for line in failures:
        message, _, command = line.partition(" | ")
        assert "out[" in message or "lse[" in message or "RuntimeError: nothing [to] do" in message
        program, *arguments = shlex.split(command)
        assert program == "flash-hopper"
        assert Case.parse(arguments[-1]) in suite("smoke")
    again = verify(*shlex.split(failures[0].partition(" | ")[2])[2:], code=1)
    assert again == [failures[0], "0 passed, 1 failed"]


def test_a_seed_changes_the_inputs_and_the_replay(wrong_for_causal):
    one, other = (verify("--suite", "smoke", "--device", "cpu", "--seed", s, code=1)[0] for s in ("0", "1"))
    assert one != other


def test_repeats_must_agree(monkeypatch):
    def drifting(q, k, v, scale, **options):
        out = flash_hopper.flash_attn_func(q, k, v, scale, **options)[0]
        return out, torch.rand(1, 2, 20)

    monkeypatch.setattr(run, "flash_attn_func", drifting)
    lines = verify("--case", CASE, "--device", "cpu", "--repeat", "3", code=1)
    assert "differs from that of call 1" in lines[0]
    assert "--repeat 3" in lines[0]


def test_the_outcome_is_stored_as_documented(tmp_path, wrong_for_causal):
    path = tmp_path / "made" / "outcome.json"
    lines = verify("--suite", "smoke", "--device", "cpu", "--json", str(path), code=1)
    stored = json.loads(path.read_text())
    assert {"env", "suite", "passed", "failed", "failures"} <= set(stored)
    assert f"{stored['passed']} passed, {stored['failed']} failed" == lines[-1]
    assert len(stored["failures"]) == stored["failed"]
    assert set(stored["failures"][0]) == {"case", "message", "replay"}
    assert stored["not_run"] == 0
    assert stored["env"]["torch"] == torch.__version__


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_run_that_hangs_or_is_cut_off_has_said_and_stored_how_far_it_was(monkeypatch, tmp_path, jobs):
    """The third case waits for what is stored while it runs."""
    path, seen = tmp_path / "outcome.json", []

    def slow(cases, device, **options):
        for i, case in enumerate(cases):
            while i == 2 and not (path.exists() and json.loads(path.read_text())["passed"] == 2):
                time.sleep(0.01)
            if i == 2:
                seen.append(json.loads(path.read_text()))
            yield CaseResult(case, True, "", 0.0, 0.0)

    monkeypatch.setattr(verify_module, "PULSE_SECONDS", 0.02)
    monkeypatch.setattr(workers, "results", slow)
    cases = suite("smoke")
    arguments = ("--suite", "smoke", "--device", "cpu", "--json", str(path), "--jobs", str(jobs))
    result = CliRunner().invoke(app, ["verify", *arguments])
    (stored,) = seen
    running = str(cases[2]) if jobs == 1 else None
    assert (stored["failed"], stored["not_run"], stored["running"]) == (0, len(cases) - 2, running)
    assert f"verify on cpu: 2 of {len(cases)} cases, 0 failed" in result.stderr
    assert (str(cases[2]) in result.stderr) == (jobs == 1)
    assert "verify on cpu" not in result.stdout
    assert json.loads(path.read_text()) == stored | {
        "passed": len(cases), "not_run": 0, "running": None, "closest": {"case": str(cases[0]), "error_to_allowed": 0.0}
    }  # fmt: skip
    assert [file.name for file in tmp_path.iterdir()] == ["outcome.json"]


def test_a_pulse_beats_while_the_block_runs_and_its_error_is_not_lost():
    beats = []

    def beat():
        beats.append(1)
        if len(beats) == 3:
            raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"), Pulse(beat, 0.005):
        while len(beats) < 3:
            time.sleep(0.005)
    assert len(beats) == 3
    with Pulse(lambda: beats.append(1), 60.0):
        pass
    assert len(beats) == 3
    with pytest.raises(ValueError, match="of the block"), Pulse(beat, 0.001):
        time.sleep(0.05)
        raise ValueError("of the block")


def test_a_lost_gpu_ends_the_run_and_is_counted(monkeypatch, tmp_path, wrong_for_causal):
    """As after an illegal address: the first failure is followed by a device that answers nothing."""
    monkeypatch.setattr(workers, "lost_device", lambda device: "an illegal memory access was encountered")
    path = tmp_path / "outcome.json"
    lines = verify("--suite", "smoke", "--device", "cpu", "--json", str(path), code=1)
    stored = json.loads(path.read_text())
    assert stored["failed"] == 1
    assert stored["not_run"] == len(suite("smoke")) - stored["passed"] - 1 > 0
    assert any(f"{stored['not_run']} cases were not run" in line for line in lines)
    assert lines[-1] == f"{stored['passed']} passed, 1 failed"


def test_processes_run_every_case_once_and_lose_no_failure():
    good = suite("smoke")[:30]
    bad = [Case.parse(f"{CASE.replace('d=16', 'd=264')},seed={i}") for i in range(10)]
    found = list(workers.results([*bad, *good], "cpu", jobs=2))
    assert sorted(str(result.case) for result in found) == sorted(map(str, [*bad, *good]))
    assert {result.case for result in found if not result.passed} == set(bad)


def test_a_gpu_that_is_lost_in_a_process_ends_the_run():
    cases = suite("smoke")[:24]
    found = []
    with pytest.raises(workers.DeviceLost):
        found.extend(workers.results(cases, f"cuda:{torch.cuda.device_count()}", jobs=2))


def test_a_process_that_dies_ends_the_run_and_its_cases_are_counted(monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "_run", die)
    path = tmp_path / "outcome.json"
    lines = verify("--suite", "smoke", "--device", "cpu", "--jobs", "2", "--json", str(path), code=1)
    stored = json.loads(path.read_text())
    assert (stored["passed"], stored["failed"], stored["not_run"]) == (0, 0, len(suite("smoke")))
    assert any("a process died" in line for line in lines)


def test_the_cpu_is_never_lost():
    assert run.lost_device("cpu") is None


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        (("--suite", "nothing"), ArgumentError, "smoke"),
        (("--case", "dtype=bf16"), ArgumentError, "lacks"),
        (("--device", "tpu"), ArgumentError, "tpu"),
        (("--device", "cuda:x"), ArgumentError, "cuda:x"),
        (("--device", "cuda:99"), DeviceError, "cuda:99"),
    ],
)
def test_a_wrong_argument_is_named(arguments, error, named):
    with pytest.raises(error, match=named):
        verify(*arguments)


def test_the_replay_command_is_one_shell_line():
    command = replay_command(Case.parse(CASE), "cuda:1", repeat=2)
    assert shlex.split(command) == [
        "flash-hopper", "verify", "--device", "cuda:1", "--repeat", "2", "--case", CASE,
    ]  # fmt: skip
