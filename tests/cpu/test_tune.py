"""`tune` against a simulated GPU: who is compiled, checked, measured and written, and what the command refuses."""

import itertools
import json
from dataclasses import replace
from functools import partial

import pytest
import torch
from simulated_queue import SimulatedQueue
from typer.testing import CliRunner

from flash_hopper.cli import tune as command
from flash_hopper.cli.main import app
from flash_hopper.launch import forward
from flash_hopper.plan import own_tiles
from flash_hopper.plan.candidates import candidates
from flash_hopper.plan.forward import plan_forward
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.errors import ArgumentError, CompileError, DeviceError, FlashHopperError
from flash_hopper.reference import naive
from flash_hopper.testing import tune
from flash_hopper.testing.bench_check import WrongResult
from flash_hopper.testing.provider_base import make_inputs
from flash_hopper.testing.tune import (
    FINALISTS,
    FIRST_LAUNCHES,
    MIN_GAIN,
    PlanCalls,
    Tuning,
    exact_out,
    own_row_of,
    rows_of,
    tune_shape,
    with_lse,
)

ENV = {"gpu": "NVIDIA H20", "date": "2026-11-30T01:02:03+00:00", "commit": "c0ffee"}


class FakeGpu(SimulatedQueue):
    """Runs plans; `us_of` says how long each takes."""

    def __init__(self, us_of):
        super().__init__()
        self.us_of = us_of

    def call_of(self, plan):
        def call():
            self.log.append(plan)
            self.now += self.us_of(plan)

        return call

    @property
    def plans(self):
        """Those that were launched, in order."""
        return [entry for entry in self.log if not isinstance(entry, str)]


def a_shape(**changes):
    options = {
        "dtype": "bf16", "d": 128, "dv": None, "mask": "causal", "seqlen": 4096, "batch": None, "heads": None,
        "heads_k": None, "lengths": None,
    }  # fmt: skip
    return tune_shape(**(options | changes))


PLANS = candidates(a_shape().problem, 40)


def times(plan) -> float:
    """The last of the candidates is the fastest, by half; the tables' plan takes 100."""
    return 100.0 - 50.0 * PLANS.index(plan) / (len(PLANS) - 1)


def quiet(name, done, total):
    assert 0 <= done <= total


def measured(us_of=times, plans=PLANS, rounds=5, progress=quiet, call_of=FakeGpu.call_of, reasons=None):
    gpu, tuning = FakeGpu(us_of), Tuning(plans)
    tuning.leave_out(reasons or {})
    tuning.check(partial(call_of, gpu), quiet)
    tuning.measure(gpu, progress, rounds=rounds, rest_s=0.0)
    return tuning, gpu


def test_the_fastest_candidate_wins_with_its_gain_over_the_tables_plan():
    tuning, _ = measured()
    results = tuning.results()
    assert [m.plan for m in results[:FINALISTS]] == PLANS[: -FINALISTS - 1 : -1]
    best = tuning.winner()
    assert best == results[0] and best.plan == PLANS[-1]
    assert (best.us, best.table_us, best.gain, best.launches) == (50.0, 100.0, 2.0, 5)
    assert {m.plan for m in results} == set(PLANS) and len(results) == len(PLANS)


def test_everybody_is_launched_a_few_times_and_the_best_as_often_as_asked_in_turn_with_the_tables_plan():
    tuning, gpu = measured(rounds=7)
    by_stage = {m.plan: (m.launches, m.is_final) for m in tuning.results()}
    finalists = {PLANS[0], *PLANS[-FINALISTS:]}
    assert by_stage == {plan: ((7, True) if plan in finalists else (FIRST_LAUNCHES, False)) for plan in PLANS}
    assert all(gpu.plans.count(plan) >= by_stage[plan][0] for plan in PLANS)
    last = gpu.plans[-FINALISTS - 1 :]
    assert set(last) == finalists


def test_a_gpu_that_slows_down_over_time_does_not_change_who_wins_the_first_round():
    start = itertools.count()
    tuning, _ = measured(lambda plan: times(plan) * (1 + next(start) / 200), rounds=30)
    assert tuning.winner().plan in PLANS[-3:]


@pytest.mark.parametrize("us", [100.0, 100.0 / (MIN_GAIN - 0.001), 120.0])
def test_what_gains_next_to_nothing_is_no_winner(us):
    tuning, _ = measured(lambda plan: 100.0 if plan == PLANS[0] else us)
    assert tuning.winner() is None


def test_candidates_that_do_not_compile_or_are_wrong_are_counted_and_left_out():
    def call_of(gpu, plan):
        if plan == PLANS[-2]:
            raise WrongResult("out[0] = 1")
        return gpu.call_of(plan)

    tuning, _ = measured(call_of=call_of, reasons={PLANS[-1]: "spills"})
    assert tuning.errors == {PLANS[-1]: "spills", PLANS[-2]: "wrong: out[0] = 1"}
    assert {m.plan for m in tuning.results()} == set(PLANS[:-2])
    rows = rows_of(a_shape(), tuning)
    assert [row.error for row in rows if row.us is None] == ["wrong: out[0] = 1", "spills"]
    assert len(rows) == len(PLANS)


def test_the_tables_plan_must_compile_and_be_right():
    with pytest.raises(CompileError, match=rf"{PLANS[0].name}, which the tables choose.*spills"):
        Tuning(PLANS).leave_out({PLANS[0]: "spills"})

    def wrong(plan):
        raise WrongResult("out[0] = 1")

    with pytest.raises(CompileError, match=r"which the tables choose.*out\[0\] = 1"):
        Tuning(PLANS).check(wrong, quiet)


@pytest.mark.parametrize("after", [1, 2, 4, 5])
def test_an_interrupt_keeps_what_was_measured(after):
    count, tuning, gpu = itertools.count(1), Tuning(PLANS), FakeGpu(times)

    def interrupted(name, done, total):
        if next(count) == after:
            raise KeyboardInterrupt

    tuning.check(gpu.call_of, quiet)
    assert tuning.results() == []
    with pytest.raises(KeyboardInterrupt):
        tuning.measure(gpu, interrupted, rounds=9, rest_s=0.0)
    results = tuning.results()
    assert len(results) == min(1 + after * tune.TOGETHER, len(PLANS))
    assert PLANS[0] in {m.plan for m in results}
    assert any(m.is_final for m in results) == (after > 4)
    order = [(not m.is_final, -m.gain) for m in results]
    assert order == sorted(order)
    assert {row.error for row in rows_of(a_shape(), tuning) if row.us is None} <= {"not measured"}


def test_a_single_candidate_is_the_tables_plan_and_no_winner():
    tuning, _ = measured(plans=PLANS[:1])
    assert [(m.plan, m.gain) for m in tuning.results()] == [(PLANS[0], 1.0)]
    assert tuning.winner() is None


def test_a_candidate_needs_the_kernel_with_log_sum_exp_too(monkeypatch):
    asked = []

    def fill(plans, jobs, progress):
        asked.extend(plans)
        return {with_lse(PLANS[3]): "spills with lse", PLANS[4]: "spills"}

    monkeypatch.setattr(tune, "toolkit", lambda: None)
    monkeypatch.setattr(tune, "default_store", lambda: type("Store", (), {"packs": [set(PLANS[:2])]}))
    monkeypatch.setattr(tune, "fill_cache_as_far_as_possible", fill)
    assert tune.left_out(PLANS) == {PLANS[3]: "spills with lse", PLANS[4]: "spills"}
    assert set(asked) == {*PLANS, *map(with_lse, PLANS)} - set(PLANS[:2])


def test_without_a_compiler_the_candidates_of_the_packs_are_measured(monkeypatch):
    def no_toolkit():
        raise tune.MissingDependencyError("no DSL")

    ready = PLANS[:5]
    monkeypatch.setattr(tune, "toolkit", no_toolkit)
    packs = [set(ready), set(map(with_lse, ready[:4]))]
    monkeypatch.setattr(tune, "default_store", lambda: type("Store", (), {"packs": packs}))
    assert set(tune.left_out(PLANS)) == set(PLANS[4:])
    assert all("in no pack" in reason and "no DSL" in reason for reason in tune.left_out(PLANS).values())
    assert tune.left_out(PLANS[:4]) == {}


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"mask": "full"}, (128, 128, "full", False, 2049, 4096)),
        ({"seqlen": 4097}, (128, 128, "causal", False, 4097, 8192)),
        ({"seqlen": 1}, (128, 128, "full", False, 1, 1)),
        ({"d": 72, "dv": 40}, (96, 64, "causal", False, 2049, 4096)),
        ({"mask": "window:1000", "seqlen": 16_384}, (128, 128, "local", False, 513, 1024 + 0)),
        ({"mask": "window:4096"}, (128, 128, "causal", False, 2049, 4096)),
        ({"lengths": "zipf", "batch": 9, "seqlen": 3000}, (128, 128, "causal", True, 2049, 4096)),
    ],
    ids=str,
)
def test_a_row_is_for_the_shape_s_kind_and_lengths_between_powers_of_two_on_this_gpu(
    options, where, tmp_path, monkeypatch
):
    shape = a_shape(**options)
    plans = candidates(shape.problem, 30)
    tuning, _ = measured(lambda plan: 100.0 - plans.index(plan), plans)
    row = own_row_of(shape, tuning.winner(), ENV["gpu"], "2026-11-30")
    assert (*row.place[:-1], row.rows_from, row.rows_to) == where
    assert row.gpu == "NVIDIA H20"
    for part in ("NVIDIA H20", "2026-11-30", str(shape), "71.0 us", "100.0", "5 launches"):
        assert part in row.why
    own_tiles.add_row(tmp_path / "tiles.json", row)
    monkeypatch.setenv("FLASH_HOPPER_TILES", str(tmp_path / "tiles.json"))
    assert plan_forward(shape.problem, "NVIDIA H20") == plans[-1]
    assert plan_forward(shape.problem, "NVIDIA H200") == plans[0]
    assert candidates(shape.problem, 30) == plans


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "e4m3"}, "dtype must be one of bf16, fp16"),
        ({"mask": "window"}, "mask must be full, causal or window:N"),
        ({"mask": "causal:5"}, "mask must be"),
        ({"mask": "window:-5"}, "mask must be"),
        ({"mask": "both"}, "mask must be"),
        ({"d": 0}, "head_dim"),
        ({"d": 264}, "head_dim"),
        ({"heads": 4, "heads_k": 3}, "multiple"),
        ({"seqlen": 0}, "seqlen must be at least 1"),
        ({"lengths": "wild"}, "lengths must be numbers"),
        ({"lengths": "empty_all"}, "leave nothing to measure"),
        ({"lengths": "1.2", "batch": 3}, "lengths '1.2'"),
    ],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused_by_name(changes, message):
    with pytest.raises(FlashHopperError, match=message):
        a_shape(**changes)


@pytest.mark.parametrize("lengths", [None, "zipf", "5.0.33.5", "empty_first"])
@pytest.mark.parametrize("mask", ["full", "causal", "window:9"])
def test_the_expected_values_are_those_of_every_sequence_alone(lengths, mask):
    shape = a_shape(d=32, seqlen=33, batch=4, heads=4, heads_k=2, mask=mask, lengths=lengths)
    inputs = make_inputs(shape, "cpu")
    want, allowed = exact_out(shape, inputs)
    assert want.shape == allowed.shape == inputs.out.shape
    start = 0
    for i, (length, _) in enumerate(shape.sequences):
        if not length:
            continue
        part = (i,) if lengths is None else slice(start, start + length)
        q, k, v = (x[part].double().reshape(1, length, *x.shape[-2:]) for x in (inputs.q, inputs.k, inputs.v))
        alone, _ = naive.attention(q, k, v, softmax_scale=32**-0.5, mask=shape.problem.mask)
        assert torch.allclose(want[part].reshape(alone.shape), alone, atol=1e-12)
        start += length
    assert bool((allowed > 0).all()) and float(allowed.max()) < 0.1


def test_a_plan_s_result_is_compared_everywhere_before_it_is_timed(kernels):
    shape = a_shape(d=32, seqlen=40, batch=2, heads=2, mask="full")
    calls, plans = PlanCalls(shape, "cpu"), candidates(shape.problem, 3)
    launched = []

    def right(q, k, v, out, lse, *rest):
        launched.append(out.isnan().all().item())
        out.copy_(naive.attention(q.double(), k.double(), v.double(), softmax_scale=32**-0.5)[0])

    def wrong_in_one_place(*given):
        right(*given)
        given[3][1, 7, 1, 3] += 0.5

    kernels["forward"] = right
    calls(plans[1])()
    assert launched == [True, False]
    kernels["forward"] = wrong_in_one_place
    with pytest.raises(WrongResult, match=r"out\[1, 7, 1, 3\] .* 1 of"):
        calls(plans[1])
    kernels["forward"] = lambda *given: None
    with pytest.raises(WrongResult, match="nan"):
        calls(plans[2])

    def crash(*given):
        raise RuntimeError("an illegal memory access was encountered\nmore")

    kernels["forward"] = crash
    with pytest.raises(DeviceError, match=rf"{plans[2].name} failed on the GPU: .*illegal memory access"):
        calls(plans[2])


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["tune", *arguments], env={"COLUMNS": "200"})
    if isinstance(result.exception, FlashHopperError):
        raise result.exception
    assert result.exit_code == code, result.output + str(result.exception)
    return result.output


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    """A GPU for the command: its clock, the machine's facts, and kernels that are there and right."""
    fake = FakeGpu(times)
    monkeypatch.setattr(command, "require_hopper", lambda *_: None)
    monkeypatch.setattr("flash_hopper.testing.environment.environment", lambda commit: ENV)
    monkeypatch.setattr("flash_hopper.testing.timing.GpuQueue", lambda: fake)
    monkeypatch.setattr("flash_hopper.testing.timing.time.sleep", lambda seconds: None)
    monkeypatch.setattr(tune, "left_out", lambda plans, progress: {PLANS[7]: "spills", PLANS[8]: "in no pack, and"})
    monkeypatch.setattr(tune, "PlanCalls", lambda shape: fake.call_of)
    return fake


def test_the_command_shows_the_best_first_and_the_tables_choice_stores_rows_and_writes_one(gpu, tmp_path):
    rows, tiles = tmp_path / "rows.json", tmp_path / "tiles.json"
    shown = run("--most", "40", "--rounds", "6", "--json", str(rows), "--write", str(tiles))
    lines = [line for line in shown.splitlines() if " x " in line and "keys" not in line]
    assert len(lines) == command.SHOWN
    assert "50.0" in lines[0] and "2.000" in lines[0]
    assert ["the tables' choice" in line for line in lines].count(True) == 1
    assert "40 candidates, 38 measured, 1 left out by the compiler, 1 in no pack, 0 with wrong results" in shown
    stored = json.loads(rows.read_text())
    assert stored["env"] == ENV
    assert len(stored["rows"]) == 40 and stored["rows"][0]["us"] == 50.0
    assert sum(row["is_table"] for row in stored["rows"]) == 1
    (row,) = own_tiles.read_rows(tiles)
    assert row.layout == PLANS[-1].layout and row.gpu == "NVIDIA H20"
    assert f"FLASH_HOPPER_TILES={tiles}" in shown.replace("\n", "")


def test_the_command_writes_no_row_without_a_gain(gpu, tmp_path):
    gpu.us_of = lambda plan: 100.0
    assert "no row, as nothing gains 1%" in run("--most", "40", "--write", str(tmp_path / "tiles.json"))
    assert not (tmp_path / "tiles.json").exists()


def test_an_interrupted_command_shows_and_stores_what_it_has_and_writes_no_row(gpu, tmp_path):
    rows, tiles = tmp_path / "rows.json", tmp_path / "tiles.json"

    def us_of(plan):
        if len(gpu.plans) > 200:
            raise KeyboardInterrupt
        return times(plan)

    gpu.us_of = us_of
    shown = run("--most", "40", "--json", str(rows), "--write", str(tiles), code=command.INTERRUPTED)
    assert "interrupted" in shown and "the tables' choice" in shown
    stored = json.loads(rows.read_text())["rows"]
    assert any(row["us"] for row in stored) and any(row["error"] for row in stored)
    assert not tiles.exists()


def test_a_file_that_cannot_take_the_row_is_refused_before_anything_is_measured(gpu, tmp_path):
    tiles = tmp_path / "tiles.json"
    run("--most", "40", "--rounds", "1", "--write", str(tiles))
    (row,) = own_tiles.read_rows(tiles)
    run("--most", "40", "--rounds", "1", "--write", str(tiles))  # the same place: replaced
    assert len(own_tiles.read_rows(tiles)) == 1
    tiles.unlink()
    own_tiles.add_row(tiles, replace(row, rows_from=4000, rows_to=5000))
    gpu.log.clear()
    with pytest.raises(ArgumentError, match=r"tiles\.json, row 0: .*overlap"):
        run("--most", "40", "--write", str(tiles))
    tiles.write_text("{}")
    own_tiles.read_rows.cache_clear()
    with pytest.raises(ArgumentError, match=r"tiles\.json must hold"):
        run("--most", "40", "--write", str(tiles))
    assert gpu.plans == []


def test_without_a_hopper_gpu_the_command_says_so_and_what_goes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"tune measures on a GPU of compute capability 9\.0.*--pack"):
        run()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(DeviceError, match=r"this one has \(8, 0\)"):
        run()


def test_a_pack_holds_every_candidate_that_compiles_and_needs_no_gpu(monkeypatch, tmp_path):
    packed = []

    def build(plans, out, jobs, progress, *, failures):
        packed.append((plans, out))
        failures[with_lse(plans[2])] = "spills"
        progress(plans[0].name, 1, len(plans))

    monkeypatch.setattr("flash_hopper.compile.pack.build_pack", build)
    out = tmp_path / "tune.so"
    shown = run("--d", "64", "--most", "20", "--pack", str(out))
    ((plans, where),) = packed
    wanted = candidates(a_shape(d=64).problem, 20)
    assert where == out and set(plans) == {*wanted, *map(with_lse, wanted)}
    assert "19 candidates, 1 left out by the compiler" in shown
    assert f"FLASH_HOPPER_PACK={out}" in shown.replace("\n", "")


def test_a_call_on_a_gpu_asks_for_the_rows_of_that_gpu(kernels, monkeypatch):
    asked = []
    monkeypatch.setattr("flash_hopper.launch.forward.plan_forward", lambda problem, gpu: asked.append(gpu) or PLANS[0])
    q = torch.zeros(1, 8, 1, 16, dtype=torch.bfloat16)
    forward.prepare(q, q, q, AttentionOptions(), None)
    forward.prepare(q, q, q, AttentionOptions(), None, None, PLANS[1])
    assert asked == ["stand-in"]
