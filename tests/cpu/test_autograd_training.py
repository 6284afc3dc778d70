"""A few steps of `examples/train_tiny.py` on the CPU: with our attention a model learns what it learns with PyTorch's."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sizes(example):
    return example.Sizes(heads=2, heads_k=1, head_dim=32, seqlen=40, batch=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loss_curves_agree(example, sizes, dtype):
    result = example.compare(12, torch.device("cpu"), dtype, sizes)
    assert result["agrees"], result
    curves = result["losses"]
    assert list(curves) == ["flash_hopper", "math", "math_float32"]
    assert all(len(curve) == 12 for curve in curves.values())
    assert curves["flash_hopper"][-1] < curves["flash_hopper"][0] - 0.5, "nothing was learned"
    if dtype == torch.float32:
        assert result["gap"] < 1e-5


@pytest.mark.parametrize("lost", ["q", "k", "v"])
def test_a_missing_gradient_would_be_seen(example, sizes, monkeypatch, lost):
    """The comparison is no formality: it notices in a few steps that one gradient is gone."""

    def forgetful(**tensors):
        return example.math_attention(*(x.detach() if name == lost else x for name, x in tensors.items()))

    monkeypatch.setattr(example, "flash_attention", lambda q, k, v: forgetful(q=q, k=k, v=v))
    assert not example.compare(12, torch.device("cpu"), torch.float32, sizes)["agrees"]


def test_the_command_shows_and_stores_the_curves(example, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "Sizes", lambda: sizes)
    app = typer.Typer()
    app.command()(example.main)
    stored = tmp_path / "curves.json"
    options = ["--steps", "4", "--device", "cpu", "--dtype", "bfloat16", "--json", str(stored)]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "agrees" in result.output
    content = json.loads(stored.read_text())
    assert content["dtype"] == "bfloat16"
    assert content["env"]["torch"]
    assert {name: len(curve) for name, curve in content["losses"].items()} == {
        "flash_hopper": 4,
        "math": 4,
        "math_float32": 4,
    }
    assert CliRunner().invoke(app, ["--dtype", "int8"]).exit_code == 2


def test_the_text_ships_with_the_example():
    text = EXAMPLE.with_suffix(".txt").read_text()
    assert 2000 < len(text) < 8000
    assert text.isascii()
