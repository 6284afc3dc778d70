"""`examples/train_tiny.py` on a GPU in bf16: the loss curve of the kernels agrees with float32."""

import importlib.util
import sys
from pathlib import Path

import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_tiny.py"


def test_a_small_transformer_learns_the_same(device):
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    sys.modules["train_tiny"] = example  # dataclasses look their module up
    spec.loader.exec_module(example)
    result = example.compare(200, device, torch.bfloat16, example.Sizes())
    assert result["agrees"], (result["gap"], result["gap_of_math"])
    curve = result["losses"]["flash_hopper"]
    assert curve[-1] < curve[0] - 1.5, "nothing was learned"
