"""The fp8 suite of `bench`: its shapes, its kernels, and its providers on small shapes in host memory."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import flash_hopper
from flash_hopper.cli.main import app
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing import fp8_accuracy, fp8_providers
from flash_hopper.testing.bench_plans import plans_of
from flash_hopper.testing.bench_rows import BenchRow, write_rows
from flash_hopper.testing.bench_run import default_providers
from flash_hopper.testing.bench_suites import QUANTISE, BenchShape, Selection, bench_suite
from flash_hopper.testing.fp8_accuracy import AccuracyRow
from flash_hopper.testing.providers import FP8, MAKERS, Prepared, ProviderAbsent, WrongResult, make_inputs, prepare
from flash_hopper.testing.tables import render_tables

SMALL = BenchShape("fp8", DType.E4M3, 64, 64, True, 150, 150, 2, 4, 2)
QUANTISED = replace(SMALL, direction=QUANTISE, causal=False)


def test_the_suite_has_the_main_cells_and_a_quantisation_for_each_head_dim():
    shapes = bench_suite("fp8", Selection())
    forward = [s for s in shapes if s.direction == "forward"]
    assert {(s.d, s.causal, s.seqlen_q) for s in forward} == {
        (d, causal, n) for d in (64, 128, 256) for causal in (False, True) for n in (1024, 4096, 16_384)
    }
    assert all(s.batch * s.seqlen_q == 16_384 and s.heads * s.d == 2048 and s.dtype is DType.E4M3 for s in shapes)
    quantised = [s for s in shapes if s.direction == QUANTISE]
    assert [s.d for s in quantised] == [64, 128, 256]
    assert all(s.bytes_moved == 3 * 16_384 * 2048 and s.flops == 0 for s in quantised)
    assert forward[0].flops == replace(forward[0], dtype=DType.BF16).flops > 0
    assert forward[0].bytes_moved == 5 * 16_384 * 2048  # a byte of each of q, k and v, two of out
    assert default_providers(forward[0])[0] == default_providers(quantised[0])[0] == "ours"
    assert set(default_providers(forward[0])) <= set(FP8)
    for options in ({"direction": "backward"}, {"direction": "both"}):
        with pytest.raises(ArgumentError, match="no backward"):
            bench_suite("fp8", Selection(), **options)
    with pytest.raises(ArgumentError, match="bf16"):
        bench_suite("fp8", Selection(DType.FP16))


def test_its_pack_holds_both_forms_of_descales_the_16_bit_kernel_and_quantisation():
    plans = plans_of(bench_suite("fp8", Selection()))
    assert len({plan.name for plan in plans}) == len(plans)
    fp8 = [plan for plan in plans if plan.kind == "forward_fp8"]
    assert {(p.tile_hdim, p.mask, p.descales) for p in fp8} == {
        (d, mask, form) for d in (64, 128, 256) for mask in ("full", "causal") for form in ("scalar", "block")
    }
    assert len([plan for plan in plans if plan.kind == "forward"]) >= 6
    of_quantise = {
        (p.head_dim, p.purpose, p.is_transposed, p.hadamard > 0, p.rotary) for p in plans if p.kind == "quantize"
    }
    for d in (64, 128, 256):
        for transposed in (False, True):
            assert {(d, purpose, transposed, False, "none") for purpose in ("absmax", "scaled", "block")} <= of_quantise
        assert {(d, "block", False, True, "none"), (d, "block", False, True, "halves")} <= of_quantise


@pytest.mark.parametrize("name", ["ours", "ours-block", "ours-rows", "ours-fast"])
def test_our_providers_are_right_and_a_wrong_result_is_found(name, monkeypatch):
    inputs = make_inputs(SMALL, "cpu")
    assert inputs.q.dtype is torch.bfloat16
    out = prepare(name, SMALL, inputs).call()
    assert out.shape == (2, 150, 4, 64)
    monkeypatch.setitem(
        FP8, name, lambda *given: Prepared(lambda: 1.3 * out, compared_with=FP8["ours"](*given).compared_with)
    )
    if name != "ours":
        with pytest.raises(WrongResult):
            prepare(name, SMALL, inputs)


def test_fa3_gets_codes_and_descales_of_key_heads(monkeypatch):
    seen = {}

    def function(q, k, v, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None):
        seen.update(q=q, descale=q_descale)
        return flash_hopper.flash_attn_func(
            q, k, v, softmax_scale, causal=causal, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale
        )

    monkeypatch.setattr(fp8_providers, "function_of", lambda module, name: function)
    prepare("fa3", SMALL, make_inputs(SMALL, "cpu"))
    assert seen["q"].dtype is torch.float8_e4m3fn and seen["descale"].shape == (2, 2)
    monkeypatch.setattr(fp8_providers, "function_of", lambda module, name: lambda q, k, v, softmax_scale, causal: q)
    with pytest.raises(ProviderAbsent, match="does not take"):
        prepare("fa3", SMALL, make_inputs(SMALL, "cpu"))


@pytest.mark.parametrize("name", MAKERS[QUANTISE])
@pytest.mark.parametrize("d", [64, 96, 128])
def test_quantisation_is_right_and_wrong_codes_are_found(name, d, monkeypatch):
    shape = replace(QUANTISED, d=d, dv=d)
    inputs = make_inputs(shape, "cpu")
    codes = prepare(name, shape, inputs).call()
    if name == "copy":
        assert codes.numel() * 2 == shape.bytes_moved
        return
    wrong = codes[0], codes[1] * 1.3
    monkeypatch.setitem(MAKERS[QUANTISE], name, lambda *given: Prepared(lambda: wrong))
    with pytest.raises(WrongResult, match="stands for"):
        prepare(name, shape, inputs)


def test_accuracy_rows_show_what_scales_and_the_transform_give(tmp_path):
    """Small sizes on the CPU: the order of the forms, and an error that does not grow with the number of keys."""
    rows = list(fp8_accuracy.outlier_rows(64, 1024, "cpu", batch=1, heads=1))
    rmse = {row.form: row.rmse for row in rows if row.provider == "ours"}
    assert (
        rmse["float16"]
        < rmse["bfloat16"]
        < rmse["block scales + Hadamard"]
        < rmse["block scales"]
        < rmse["a scale a tensor"]
    )
    lengths = [next(fp8_accuracy.length_rows(64, n, "cpu", rows=8)) for n in (256, 8192)]
    assert all(row.relative < 0.01 for row in lengths)
    assert lengths[1].relative < 1.5 * lengths[0].relative
    rows += [*lengths, *fp8_accuracy.length_rows(64, 256, "cpu", rows=8)]
    assert {row.error for row in rows if row.provider == "fa3"} == {"absent: fa3_fwd_interface is not installed"}
    fp8_accuracy.write_rows(tmp_path / "rows.json", {"gpu": "none"}, rows)
    assert fp8_accuracy.read_rows(tmp_path / "rows.json") == ({"gpu": "none"}, rows)
    assert "| flash-hopper, block scales + Hadamard |" in fp8_accuracy.render(rows)
    shown = CliRunner().invoke(
        app,
        [
            "bench",
            "--suite",
            "fp8-accuracy",
            "--from-json",
            str(tmp_path / "rows.json"),
            "--plot",
            str(tmp_path / "a.svg"),
        ],
    )
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")


def test_tables_of_stored_rows_name_what_is_not_e4m3_and_show_rates_of_copies(tmp_path):
    base = {"suite": "fp8", "dtype": "e4m3", "d": 64, "dv": 64, "causal": False, "batch": 1, "heads": 32, "heads_k": 32}
    sizes = {"seqlen_q": 1024, "seqlen_k": 1024, "protocol": "burst", "us": 10.0, "tbps": 2.38}
    rows = [
        BenchRow(**base, **sizes, direction="forward", provider="ours", tflops=900.0),
        BenchRow(**base, **sizes, direction="forward", provider="sdpa-cudnn", tflops=500.0),
        BenchRow(**base, **sizes, direction="quantise", provider="ours-values"),
    ]
    env = {"gpu": "H200", "torch": "2.11", "date": "2026-11-30"}
    write_rows(tmp_path / "rows.json", env, rows)
    forward, quantise = (
        render_tables(f"<!-- bench: rows.json burst {direction} -->\n<!-- /bench -->", tmp_path)
        for direction in ("forward", "quantise")
    )
    assert "| 64 | full | flash-hopper | **900** |" in forward
    assert "| 64 | full | SDPA cuDNN, bf16 | **500** |" in forward
    assert "| head dim | mask | TB/s | 1k |" in quantise
    assert "| 64 | - | flash-hopper, V transposed | **2.38** |" in quantise


def test_a_document_holds_tables_of_errors(tmp_path):
    rows = [
        AccuracyRow("outliers", "ours", "block scales", d, n, rmse=1e-2 * d / 64, relative=0.1)
        for d in (128, 64)
        for n in (1024, 8192)
    ]
    rows += [AccuracyRow("length", "ours", "a scale a head", 64, 1024 << i, 1e-3, 2e-3, 0.0) for i in (0, 7)]
    rows += [AccuracyRow("length", "fa3", "a scale a head", 64, 1024, error="absent: not installed")]
    fp8_accuracy.write_rows(tmp_path / "rows.json", {"gpu": "H200", "torch": "2.11", "date": "2026-11-30T01:00"}, rows)

    def shown(experiment):
        return render_tables(f"<!-- bench: rows.json {experiment} -->\n<!-- /bench -->\n", tmp_path).splitlines()

    lines = shown("outliers")
    assert lines[1] == "| RMSE, outliers | d 64, 1k | d 64, 8k | d 128, 1k | d 128, 8k |"
    assert lines[3] == "| flash-hopper, block scales | 1.00e-02 | 1.00e-02 | 2.00e-02 | 2.00e-02 |"
    assert lines[-2:] == ["H200, torch 2.11, 2026-11-30.", "<!-- /bench -->"]
    lines = shown("length")
    assert lines[1] == "| relative error, v of one sign | 1k keys | 128k keys |"
    assert lines[3] == "| flash-hopper, d 64 | 0.20 % | 0.20 % |"
    assert not any("FA3" in line for line in lines)
    fp8_accuracy.write_rows(tmp_path / "rows.json", {}, rows[4:])
    with pytest.raises(ArgumentError, match="no row of the experiment outliers"):
        shown("outliers")


def test_the_accuracy_suite_names_its_kernels_once():
    plans = fp8_accuracy.plans_of()
    assert len({plan.name for plan in plans}) == len(plans)
    assert {plan.kind for plan in plans} == {"forward", "forward_fp8", "quantize"}
