"""`tune` on the GPU: layouts of every kind give right results, and a row is what calls take."""

import json

import pytest
import torch
from typer.testing import CliRunner

import flash_hopper
from flash_hopper.cli.main import app
from flash_hopper.compile.parallel import fill_cache_as_far_as_possible
from flash_hopper.compile.target import toolkit
from flash_hopper.launch import attention
from flash_hopper.launch.device import device_facts
from flash_hopper.plan.candidates import candidates
from flash_hopper.plan.forward import plan_forward, table_layout
from flash_hopper.plan.own_tiles import OwnRow, add_row
from flash_hopper.problem.errors import MissingDependencyError
from flash_hopper.testing.tune import Measured, PlanCalls, own_row_of, tune_shape

SAMPLE = 10  # layouts of each shape, spread over all candidates


@pytest.fixture(autouse=True, scope="module")
def compiler():
    try:
        toolkit()
    except MissingDependencyError as missing:
        pytest.skip(f"candidates are in no pack of the tests and cannot be compiled here: {missing}")


def shape(d=128, mask="causal", seqlen=700, batch=3, heads=4, heads_k=2, lengths=None, dtype="bf16"):
    return tune_shape(dtype, d, None, mask, seqlen, batch, heads, heads_k, lengths)


@pytest.mark.parametrize(
    "asked",
    [
        shape(64),
        shape(64, "full", dtype="fp16"),
        shape(128),
        shape(128, "full"),
        shape(128, "window:100"),
        shape(256),
        shape(64, "causal", lengths="zipf"),
        shape(128, "full", lengths="edges"),
        shape(128, "window:100", lengths="empty_every", batch=9),
    ],
    ids=str,
)
def test_layouts_of_every_kind_are_right_everywhere_and_the_same_each_time(asked):
    every = candidates(asked.problem)
    plans = every[:: max(1, len(every) // SAMPLE)]
    failures = fill_cache_as_far_as_possible(plans)
    able = [plan for plan in plans if plan not in failures]
    assert plans[0] in able and len(able) > SAMPLE // 2
    calls = PlanCalls(asked)
    for plan in able:
        call = calls(plan)
        first = call()[0].clone()
        assert all(torch.equal(call()[0], first) for _ in range(20)), plan.name


@pytest.mark.alone
def test_the_command_measures_every_candidate_and_stores_it(tmp_path):
    rows, tiles = tmp_path / "rows.json", tmp_path / "tiles.json"
    given = ["--d", "64", "--seqlen", "1k", "--batch", "2", "--heads", "8", "--most", "6", "--rounds", "3"]
    result = CliRunner().invoke(app, ["tune", *given, "--json", str(rows), "--write", str(tiles)])
    assert result.exit_code == 0, result.output + str(result.exception)
    stored = json.loads(rows.read_text())["rows"]
    assert len(stored) == 6 and all(row["us"] or row["error"] for row in stored)
    assert next(row for row in stored if row["is_table"])["us"] > 0
    assert not any((row["error"] or "").startswith("wrong") for row in stored)


def test_a_call_takes_the_row_of_this_gpu_and_no_other(tmp_path, monkeypatch, device):
    name = device_facts(device.index).name
    asked = shape(64, seqlen=1024, heads=2, heads_k=2)
    other = next(plan for plan in candidates(asked.problem) if plan.layout != table_layout(asked.problem))
    launched = []
    monkeypatch.setattr(
        "flash_hopper.launch.forward.get_kernel", lambda plan: launched.append(plan) or (lambda *_: None)
    )
    q = torch.zeros(1, 1024, 2, 64, dtype=torch.bfloat16, device=device)
    for i, gpu in enumerate(("another GPU", name)):
        path = tmp_path / f"tiles{i}.json"
        add_row(path, _named(asked, other, gpu))
        monkeypatch.setenv("FLASH_HOPPER_TILES", str(path))
        attention._prepared.clear()
        flash_hopper.flash_attn_func(q, q, q, causal=True)
    attention._prepared.clear()
    monkeypatch.delenv("FLASH_HOPPER_TILES")
    assert launched == [plan_forward(asked.problem), other]


def _named(asked, plan, gpu) -> OwnRow:
    return own_row_of(asked, Measured(plan, 1.0, 2.0, 3, True), gpu, "2026-11-30")
