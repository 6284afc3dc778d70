"""Protocols against a simulated queue, rows, summaries, tables and figures."""

import itertools
import json
import math
import statistics
from dataclasses import replace

import pytest
import torch
from simulated_queue import SimulatedQueue
from typer.testing import CliRunner

from flash_hopper.cli.main import app
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.reference import naive
from flash_hopper.testing import bench_run, timing
from flash_hopper.testing.bench_rows import (
    BenchRow,
    compare,
    deterministic_costs,
    read_rows,
    relative_rates,
    summarise,
    write_rows,
)
from flash_hopper.testing.bench_run import Settings, default_providers, measure
from flash_hopper.testing.bench_suites import DIRECTIONS, SUITES, BenchShape, Selection, bench_suite
from flash_hopper.testing.clocks import ClockSampler, Sample, parse_nvidia_smi
from flash_hopper.testing.environment import environment
from flash_hopper.testing.plots import plot_rows
from flash_hopper.testing.provider_base import Prepared, make_inputs
from flash_hopper.testing.providers import MAKERS
from flash_hopper.testing.tables import render_table, render_tables, update_tables
from flash_hopper.testing.timing import burst, host_cost, rested, steady


def test_burst_measures_each_call_alone_with_a_flush_before_it():
    queue = SimulatedQueue()
    calls = {"a": queue.kernel("a", 10.0), "b": queue.kernel("b", 25.0), "c": queue.kernel("c", 40.0)}
    timings = burst(calls, queue, rounds=7, pause_s=0.0)
    assert {name: t.us for name, t in timings.items()} == pytest.approx({"a": 10.0, "b": 25.0, "c": 40.0})
    assert all(len(t.samples) == 7 for t in timings.values())
    launched = queue.log[queue.log.index("hold") :]
    for before, after in itertools.pairwise(launched):
        assert after not in calls or before == "flush"


def test_burst_interleaves_the_providers_and_changes_who_is_first():
    queue = SimulatedQueue()
    calls = {name: queue.kernel(name, 1.0) for name in "abc"}
    burst(calls, queue, rounds=6, pause_s=0.0)
    order = [name for name in queue.log[queue.log.index("hold") :] if name in calls]
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 6
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert [r[0] for r in rounds] == ["a", "b", "c", "a", "b", "c"]


def test_burst_rests_and_holds_the_gpu_before_each_group(monkeypatch):
    queue = SimulatedQueue()
    rests = []
    monkeypatch.setattr(timing.time, "sleep", rests.append)
    burst({"a": queue.kernel("a", 1.0)}, queue, rounds=2 * timing.ROUNDS_PER_GROUP + 1, pause_s=0.15)
    assert rests == [0.15] * 3
    assert queue.log.count("hold") == 3


def test_from_rest_every_launch_is_alone_behind_a_rest_and_a_flush_and_rounds_differ_in_their_order(monkeypatch):
    queue = SimulatedQueue()
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: queue.log.append(f"rest {seconds:.3f}"))
    calls = {name: queue.kernel(name, us) for name, us in (("a", 10.0), ("b", 25.0), ("c", 40.0))}
    timings = rested(calls, queue, launches=9, rest_s=0.012)
    assert {name: t.us for name, t in timings.items()} == pytest.approx({"a": 10.0, "b": 25.0, "c": 40.0})
    assert all(len(t.samples) == 9 for t in timings.values())
    log = queue.log[queue.log.index("rest 0.120") + 1 :]  # behind the warm-up
    steps = [log[i : i + 5] for i in range(0, len(log), 5)]
    assert {(rest, hold, flush, end) for rest, hold, flush, _, end in steps} == {
        ("rest 0.012", "hold", "flush", "synchronize")
    }
    order = [step[3] for step in steps]
    rounds = [tuple(order[i : i + 3]) for i in range(0, 27, 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds) and len(set(rounds)) > 2


def test_burst_reports_the_median():
    queue = SimulatedQueue()
    durations = iter([1.0] * 4 + [5.0, 100.0, 7.0, 6.0, 8.0])  # warm-up and sizing come first

    def call():
        queue.now += next(durations)

    assert burst({"a": call}, queue, rounds=5, pause_s=0.0)["a"].us == 7.0


def test_steady_averages_the_settled_loop_and_reads_clock_and_power():
    queue = SimulatedQueue()
    result = steady(queue.kernel("a", 20.0), queue, seconds=0.4)
    assert result.us == pytest.approx(20.0)
    assert (result.mhz, result.watt) == (1500.0, 690.0)
    assert queue.log.count("a") > len(result.samples) > 1
    assert "flush" not in queue.log


def test_host_cost_is_measured_behind_a_full_queue_or_an_empty_one():
    for behind_queue in (True, False):
        queue = SimulatedQueue()
        result = host_cost(queue.kernel("a", 1.0), queue, behind_queue=behind_queue, calls=120)
        assert len(result.samples) == 120
        assert 0 < result.us == statistics.median(result.samples) < 1e4
        assert queue.log.count("hold") == (3 if behind_queue else 0)
        if not behind_queue:
            assert queue.log.count("synchronize") > 120


def test_clock_samples_after_the_mark_count():
    readings = itertools.count(1)
    with ClockSampler(lambda: Sample(float(next(readings)), 700.0)) as sampler:
        while len(sampler.samples) < 2:
            pass
        sampler.mark()
        while not sampler.samples:
            pass
    middle = sampler.median()
    assert middle is not None
    assert middle.mhz >= 3
    assert middle.watt == 700.0
    assert parse_nvidia_smi("1755, 689.21\n") == Sample(1755.0, 689.21)


def test_the_paper_suite_is_16k_tokens_of_hidden_2048():
    shapes = bench_suite("paper", Selection())
    assert len(shapes) == 36
    assert len(bench_suite("paper", Selection(seqlens=(1024, 4096, 16_384)))) == 18
    for shape in shapes:
        assert shape.batch * shape.seqlen_q == 16_384
        assert shape.heads * shape.d == 2048
        assert shape.problem.flops == pytest.approx(
            4 * 16_384 * shape.seqlen_q * 2048 / (2 if shape.causal else 1), rel=0.002
        )
    assert {shape.dtype for shape in bench_suite("paper", Selection(dtype=DType.FP16))} == {DType.FP16}


def test_the_train_suite_is_causal_layers_of_16k_tokens_in_both_directions():
    shapes = bench_suite("train", Selection())
    assert [shape.direction for shape in shapes] == ["forward"] * 10 + ["backward"] * 10
    assert {(s.d, s.dv, s.heads // s.heads_k) for s in shapes} == {
        (128, 128, 4), (128, 128, 8), (192, 128, 1), (96, 96, 1), (192, 192, 1)
    }  # fmt: skip
    assert {(s.heads, s.heads_k) for s in shapes if s.d == 128} == {(32, 8), (64, 8)}
    for shape in shapes:
        assert shape.causal
        assert shape.seqlen_q == shape.seqlen_k
        assert shape.seqlen_q in (4096, 8192)
        assert shape.batch * shape.seqlen_q == 16_384


@pytest.mark.parametrize("name", ["paper", "train", "host", "ragged"])
def test_a_direction_chooses_what_of_each_shape_is_measured(name):
    forward, backward, both = (bench_suite(name, Selection(), d) for d in ("forward", "backward", "both"))
    assert both == forward + backward
    assert [replace(shape, direction="forward") for shape in backward] == forward
    for there, back in zip(forward, backward, strict=True):
        assert back.flops == 2.5 * there.flops == 2.5 * there.problem.flops_of(there.sequences)
        assert back.bytes_moved == 2 * there.bytes_moved
        assert str(back) != str(there)
        assert set(default_providers(back)) <= set(MAKERS["backward"])
        assert set(default_providers(there)) <= set(MAKERS["forward"])
        assert default_providers(back)[:2] == ("ours", "ours-det")


@pytest.mark.parametrize("name", ["paper", "train", "ragged"])
def test_a_pack_for_a_bench_holds_the_kernels_of_its_directions(monkeypatch, tmp_path, name):
    packed = []
    monkeypatch.setattr("flash_hopper.compile.pack.build_pack", lambda plans, out, *_: packed.append((out, plans)))
    for direction in DIRECTIONS:
        path = str(tmp_path / direction)
        result = CliRunner().invoke(app, ["bench", "--suite", name, "--direction", direction, "--pack", path])
        assert result.exit_code == 0, result.output
    (out, forward), (_, backward) = packed
    assert str(out) == str(tmp_path / "forward")
    assert {plan.kind for plan in forward} == {"forward"}
    of_gradients = {"preprocess", "backward_dkdv", "backward_dq", "postprocess"}
    assert {plan.kind for plan in backward} == {"forward"} | of_gradients
    assert not any(plan.has_lse for plan in forward if plan.kind == "forward")
    assert all(plan.has_lse for plan in backward if plan.kind == "forward")
    dims = {(-(-s.d // 32) * 32, -(-s.dv // 32) * 32) for s in SUITES[name](DType.BF16)}
    for plans, kind in ((forward, "forward"), (backward, "backward_dq"), (backward, "backward_dkdv")):
        assert {(p.tile_hdim, p.tile_hdimv) for p in plans if p.kind == kind} >= dims
        assert len({p.name for p in plans if p.kind == kind}) == len([p for p in plans if p.kind == kind])


def test_the_ragged_suite_sets_packed_batches_beside_dense_ones_and_windows_beside_none():
    shapes = bench_suite("ragged", Selection(), "forward")
    for d, causal in itertools.product((64, 128), (False, True)):
        group = [s for s in shapes if (s.d, s.causal) == (d, causal) and s.seqlen_q < 16_384]
        assert all(s.heads * s.d == 2048 and s.heads == s.heads_k for s in group)
        dense, equal, zipf, one_long, tiny = group
        assert not dense.is_ragged
        assert dense.sequences == equal.sequences == ((2048, 2048),) * 8
        assert dense.flops == equal.flops
        assert dense.bytes_moved == equal.bytes_moved
        assert len(zipf.sequences) == 64
        for shape in (equal, zipf, one_long):
            assert sum(n for n, _ in shape.sequences) == pytest.approx(16_384, rel=0.01)
        assert sorted(one_long.sequences)[-2:] == [(64, 64), (8192, 8192)]
        assert one_long.sequences.count((64, 64)) == 128
        assert tiny.sequences == ((8, 8),) * 2000
    for d in (64, 128):
        windows = [s for s in shapes if s.d == d and s.seqlen_q == 16_384]
        assert [s.left for s in windows] == [None, 128, 1024, 4096]
        assert all(s.causal and s.batch == 1 for s in windows)
        for shape in windows[1:]:
            scores = sum(min(row, shape.left) + 1 for row in range(16_384))
            assert shape.flops == 4 * shape.heads * shape.d * scores
            assert (shape.problem.mask.left, shape.problem.mask.right) == (shape.left, 0)
    assert {s.direction for s in bench_suite("ragged", Selection())} == {"forward", "backward"}


@pytest.mark.parametrize("name", SUITES)
def test_suites_hold_different_shapes_that_are_checked_requests(name):
    shapes = bench_suite(name, Selection())
    assert len({str(shape) for shape in shapes}) == len(shapes)
    assert all(shape.problem.batch == shape.batch and shape.suite == name for shape in shapes)


SMALL = BenchShape("paper", DType.BF16, 32, 48, True, 40, 56, 2, 4, 2)


def exact(inputs, shape):
    out, _ = naive.attention(inputs.q, inputs.k, inputs.v, softmax_scale=shape.d**-0.5, mask=shape.problem.mask)
    return out.to(inputs.q.dtype)


def exact_gradients(inputs, shape):
    leaves = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    out, _ = naive.attention(*leaves, softmax_scale=shape.d**-0.5, mask=shape.problem.mask)
    return tuple(g.to(inputs.q.dtype) for g in torch.autograd.grad(out, leaves, inputs.dout.double()))


RIGHT = {"forward": exact, "backward": exact_gradients}


def wrong(inputs, shape):
    right = RIGHT[shape.direction](inputs, shape)
    return 2 * right if shape.direction == "forward" else tuple(2 * gradient for gradient in right)


@pytest.fixture
def measured_on_cpu(monkeypatch):
    """`measure` with a simulated clock: the time of a provider is made up, the rest is real."""
    queue = SimulatedQueue()

    def provider(us, result):
        def make(shape, inputs):
            made = result(inputs, shape)

            def call():
                queue.now += us
                return made

            return Prepared(call)

        return make

    for direction, right in RIGHT.items():
        times = {"ours": (100.0, right), "fa3": (125.0, right), "fa4": (1.0, wrong), "ours-det": (150.0, right)}
        for name, (us, result) in times.items():
            monkeypatch.setitem(MAKERS[direction], name, provider(us, result))
    monkeypatch.setattr(bench_run, "make_inputs", lambda shape, device: make_inputs(shape, "cpu"))
    return queue


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rows_hold_times_rates_and_reasons(measured_on_cpu, direction):
    settings = Settings(("ours", "fa3", "fa4", "sdpa-flash"), ("burst", "host-idle"), rounds=3, pause_s=0.0)
    shape = replace(SMALL, direction=direction)
    rows = {(r.provider, r.protocol): r for r in measure(shape, settings, measured_on_cpu)}
    assert len(rows) == 8
    assert {r.direction for r in rows.values()} == {direction}
    ours = rows["ours", "burst"]
    assert ours.us == pytest.approx(100.0)
    flops = SMALL.problem.flops * (2.5 if direction == "backward" else 1)
    assert ours.tflops == pytest.approx(flops / 100.0 * 1e-6, abs=0.01)
    assert ours.tbps == pytest.approx(shape.bytes_moved / 100.0 * 1e-6, abs=1e-4)
    assert rows["ours", "host-idle"].tflops is None
    assert rows["fa4", "burst"].us is None
    assert rows["fa4", "burst"].error.startswith("wrong: out[" if direction == "forward" else "wrong: d")
    assert rows["sdpa-flash", "burst"].error.startswith("absent: ")
    assert [s.geometric_mean for s in summarise(list(rows.values())) if s.protocol == "burst"] == [pytest.approx(1.25)]


def test_the_default_providers_of_the_backward_include_the_deterministic_mode(measured_on_cpu):
    shape = replace(SMALL, direction="backward")
    rows = list(measure(shape, Settings(None, ("burst",), rounds=3, pause_s=0.0), measured_on_cpu))
    assert [r.provider for r in rows] == list(default_providers(shape))
    (summary,) = summarise(rows)
    assert summary.geometric_mean == pytest.approx(1.25)  # against fa3, not against ours-det
    assert summary.deterministic_mean == pytest.approx(1.5)


def row(provider, us, *, seqlen=1024, protocol="burst", d=128, causal=False, direction="forward", heads_k=16, **more):
    sizes = {"d": d, "dv": d, "causal": causal, "seqlen_q": seqlen, "seqlen_k": seqlen}
    sizes |= {"batch": 16, "heads": 16, "heads_k": heads_k}
    rate = None if us is None or protocol not in bench_run.GPU_PROTOCOLS else 1e5 / us
    return BenchRow(
        "paper", direction, "bf16", **sizes, provider=provider, protocol=protocol, us=us, tflops=rate, **more
    )


def test_ours_is_compared_with_the_fastest_peer_of_the_same_cell():
    rows = [
        row("ours", 100.0),
        row("fa3", 90.0),
        row("sdpa-cudnn", 120.0),
        row("ours", 100.0, seqlen=4096),
        row("fa3", 160.0, seqlen=4096),
        row("ours-out", 10.0, seqlen=4096),
        row("ours", 100.0, causal=True),
        row("fa4", None, causal=True, error="absent"),
        row("ours", 50.0, protocol="steady"),
        row("fa3", 100.0, protocol="steady"),
    ]
    assert sorted(c.ratio for c in compare(rows)) == [0.9, 1.6, 2.0]
    burst_summary, steady_summary = summarise(rows)
    assert burst_summary.geometric_mean == pytest.approx(math.sqrt(0.9 * 1.6))
    assert (burst_summary.cells, burst_summary.unmatched) == (2, 1)
    assert burst_summary.worst.other.provider == "fa3"
    assert burst_summary.worst.ratio == pytest.approx(0.9)
    assert steady_summary.geometric_mean == 2.0
    assert summarise([row("ours", 1.0)]) == []


def test_directions_are_summarised_apart_and_determinism_is_a_cost_and_no_peer():
    rows = [
        row("ours", 100.0),
        row("fa3", 110.0),
        row("ours", 300.0, direction="backward"),
        row("ours-det", 330.0, direction="backward"),
        row("fa3", 270.0, direction="backward"),
        row("ours", 100.0, direction="backward", d=256),
        row("ours-det", 90.0, direction="backward", d=256),
    ]
    assert [c.other.provider for c in compare(rows)] == ["fa3", "fa3"]
    assert [c.ratio for c in deterministic_costs(rows)] == pytest.approx([1.1, 0.9])
    forward, backward = summarise(rows)
    assert (forward.direction, backward.direction) == DIRECTIONS
    assert forward.geometric_mean == pytest.approx(1.1)
    assert forward.deterministic_worst is None
    assert backward.geometric_mean == pytest.approx(0.9)
    assert (backward.cells, backward.unmatched) == (1, 1)
    assert backward.deterministic_mean == pytest.approx(math.sqrt(1.1 * 0.9))
    assert backward.deterministic_worst.ours.d == 128
    (alone,) = summarise(rows[-2:])
    assert alone.worst is None
    assert alone.deterministic_worst.ratio == pytest.approx(0.9)


def test_rates_of_ragged_and_windowed_cells_are_set_against_the_dense_ones():
    packed = replace(row("ours", 200.0, seqlen=3455, causal=True), lengths="zipf", batch=64)
    windowed = replace(row("ours", 50.0, seqlen=16_384, causal=True), left=1024, batch=1)
    rows = [
        replace(row("ours", 100.0, seqlen=2048, causal=True), batch=8),
        replace(row("ours", 1.0, seqlen=2048), batch=8),
        packed,
        replace(row("ours", 25.0, seqlen=16_384, causal=True), batch=1),
        windowed,
        replace(packed, provider="fa3"),
        replace(packed, direction="backward"),
    ]
    found = relative_rates(rows)
    assert [(rate.row, rate.base) for rate in found] == [(packed, rows[0]), (windowed, rows[3])]
    assert [rate.ratio for rate in found] == pytest.approx([0.5, 0.5])
    assert packed.cell != replace(packed, lengths="equal").cell != replace(packed, lengths=None).cell
    assert packed.where == "d128 causal s64x3455, zipf"
    assert windowed.where == "d128 causal s16k w1024"
    table = render_table(ENV, [r for r in rows if r.direction == "forward"])
    assert "| 2k | 16k | 64x3455, zipf | 16k w1024 |" in table.splitlines()[0]


def test_stored_rows_come_back_equal_and_damage_is_named(tmp_path):
    path = tmp_path / "results" / "rows.json"
    rows = [row("ours", 123.456), row("fa3", None, error='absent: "quoted"')]
    env = environment(commit="abc")
    write_rows(path, env, rows)
    assert read_rows(path) == (env, rows)
    assert json.loads(path.read_text())["env"]["commit"] == "abc"
    assert [p.name for p in path.parent.iterdir()] == ["rows.json"]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ArgumentError, match=r"rows\.json holds no bench rows"):
        read_rows(path)


ENV = {"gpu": "H200", "driver": "580", "torch": "2.11", "date": "2026-11-29T00:00:00"}


def paper_rows():
    for d, causal, seqlen in itertools.product((64, 128), (False, True), (512, 1024)):
        yield row("ours", 100.0, d=d, causal=causal, seqlen=seqlen)
        yield row("fa3", 80.0 if seqlen == 512 else 200.0, d=d, causal=causal, seqlen=seqlen)
        yield row("fa4", None, d=d, causal=causal, seqlen=seqlen, error="absent")


def test_a_table_has_a_line_per_provider_and_marks_the_best():
    lines = render_table(ENV, list(paper_rows())).splitlines()
    assert lines[0] == "| head dim | mask | TFLOP/s | 512 | 1k |"
    assert lines[2] == "| 64 | full | flash-hopper | 1000 | **1000** |"
    assert lines[3] == "| 64 | full | FA3 C++ | **1250** | 500 |"
    assert len([line for line in lines if line.startswith("|")]) == 2 + 8
    assert "FA4" not in "".join(lines)
    assert lines[-1] == "H200, driver 580, torch 2.11, 2026-11-29, forward, protocol burst, bf16."
    host = render_table(ENV, [row("ours", 12.34, protocol="host-idle")])
    assert "| us | 1k |" in host
    assert "**12.3**" in host


def test_marked_tables_of_a_document_follow_their_files(tmp_path):
    write_rows(tmp_path / "rows.json", ENV, list(paper_rows()))
    document = tmp_path / "README.md"
    document.write_text("before\n<!-- bench: rows.json burst -->\nold\n<!-- /bench -->\nafter\n")
    assert update_tables(document, tmp_path)
    text = document.read_text()
    assert "old" not in text
    assert "| 64 | full | flash-hopper | 1000 | **1000** |" in text
    assert text.startswith("before\n<!-- bench: rows.json burst -->\n|")
    assert text.endswith("<!-- /bench -->\nafter\n")
    assert not update_tables(document, tmp_path)
    with pytest.raises(ArgumentError, match=r"absent\.json"):
        render_tables("<!-- bench: absent.json burst -->\n<!-- /bench -->", tmp_path)
    with pytest.raises(ArgumentError, match="no row"):
        render_tables("<!-- bench: rows.json steady -->\n<!-- /bench -->", tmp_path)


def test_a_table_shows_one_direction_and_names_shared_heads(tmp_path):
    rows = [row("ours", 100.0), row("ours", 200.0, direction="backward"), row("ours", 50.0, heads_k=4)]
    write_rows(tmp_path / "rows.json", ENV, rows)
    with pytest.raises(ArgumentError, match="both directions"):
        render_tables("<!-- bench: rows.json burst -->\n<!-- /bench -->", tmp_path)
    text = render_tables("<!-- bench: rows.json burst backward -->\n<!-- /bench -->", tmp_path)
    assert "| 128 | full | flash-hopper | **500** |" in text
    assert "backward, protocol burst" in text
    text = render_tables("<!-- bench: rows.json burst forward -->\n<!-- /bench -->", tmp_path)
    assert "| 128 h16/4 | full | flash-hopper | **2000** |" in text


def test_the_same_rows_give_the_same_figure(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the plot extra")
    for name in ("a", "b"):
        plot_rows(ENV, list(paper_rows()), tmp_path / f"{name}.svg")
    first = (tmp_path / "a.svg").read_text()
    assert first == (tmp_path / "b.svg").read_text()
    assert first.lstrip().startswith("<?xml")
    for other in ({"protocol": "steady"}, {"direction": "backward"}):
        with pytest.raises(ArgumentError, match="one protocol and direction"):
            plot_rows(ENV, [row("ours", 1.0), row("ours", 1.0, **other)], tmp_path / "c.svg")
    with pytest.raises(ArgumentError, match="none"):
        plot_rows(ENV, [row("ours", None)], tmp_path / "c.svg")
    plot_rows(ENV, list(paper_rows()), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_stored_rows_are_shown_summarised_and_drawn_without_a_gpu(tmp_path):
    pytest.importorskip("matplotlib", reason="figures need the plot extra")
    stored = tmp_path / "rows.json"
    steady_rows = [replace(r, protocol="steady", mhz=1500.0, watt=690.0) for r in paper_rows()]
    backward = [row(name, us, direction="backward", heads_k=4) for name, us in (("ours", 100.0), ("ours-det", 125.0))]
    write_rows(stored, ENV, [*paper_rows(), *steady_rows, *backward])

    def shown(*arguments):
        result = CliRunner().invoke(app, ["bench", "--from-json", str(stored), *arguments], env={"COLUMNS": "200"})
        assert result.exit_code == 0, result.output
        return result.output

    output = shown("--plot", str(tmp_path / "fig.svg"))
    assert "burst forward: ours / best peer, geometric mean of 8 cells: 1.265" in output
    assert "worst 0.800 (d64 full s512, fa3)" in output
    assert "1500 MHz, 690 W" in output
    assert "deterministic 1.25x the time" in output
    assert (
        "burst backward: deterministic mode, time over ours, geometric mean: 1.250; worst 1.250 (d128 h16/4 full s1k)"
        in output
    )
    assert sorted(p.name for p in tmp_path.glob("*.svg")) == [
        "fig-burst-backward.svg", "fig-burst-forward.svg", "fig-steady-forward.svg"
    ]  # fmt: skip
    output = shown("--plot", str(tmp_path / "fig.svg"), "--protocol", "burst", "--direction", "forward")
    assert "steady" not in output
    assert "backward" not in output
    assert (tmp_path / "fig.svg").exists()
