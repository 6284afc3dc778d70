"""`examples/varlen.py` on the CPU: packed, padded and jagged batches give the same numbers, and a wrong one is noticed."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "varlen.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("varlen", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["varlen"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(example, *arguments):
    app = typer.Typer()
    app.command()(example.main)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("texts", [(), ("a",), ("", "some text", "", "é", "another text, longer than these")], ids=str)
@pytest.mark.parametrize("window", ["-1", "0", "8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_three_ways_agree(example, texts, window, dtype):
    result = run(example, *texts, "--window", window, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert all(f"{name}" in result.output for name in example.WAYS)


def test_tokens_lie_one_behind_the_other(example):
    batch = example.batch_of(("ab", "", "c"), torch.device("cpu"))
    assert batch.tokens.tolist() == [97, 98, 99]
    assert (batch.lengths, batch.offsets, batch.longest) == ((2, 0, 1), [0, 2, 2, 3], 2)


def test_a_way_that_takes_rows_for_used_that_are_not_is_noticed(example, monkeypatch):
    def unaware(layer, batch, window):
        one = example.Batch(batch.tokens, (len(batch.tokens),))
        return example.packed(layer, one, window)

    monkeypatch.setitem(example.WAYS, "padded", unaware)
    assert run(example, "two", "texts").exit_code == 1
