"""Two tiles in a CTA on the GPU: right values, and the bits of the same tile in one stream, whatever streams do to each other."""

from dataclasses import replace

import pytest
import torch

from flash_hopper.compile.target import toolkit
from flash_hopper.plan.forward import plan_forward
from flash_hopper.problem.errors import MissingDependencyError
from flash_hopper.testing.tune import PlanCalls, tune_shape

TILE = {"tile_m": 128, "tile_n": 64, "q_stages": 2, "o_place": "apart", "streams": 1}
LAYOUTS = [(4, True), (4, False), (3, True), (3, False)]  # stages of K and V, turns


@pytest.fixture(autouse=True, scope="module")
def compiler():
    try:
        toolkit()
    except MissingDependencyError as missing:
        pytest.skip(f"the tile in one stream is in no pack of the tests and cannot be compiled here: {missing}")


def shape(mask, seqlen, batch=2, heads=6, heads_k=2, lengths=None, dtype="bf16"):
    return tune_shape(dtype, 64, None, mask, seqlen, batch, heads, heads_k, lengths)


# one tile, so that a stream has none; fewer tiles than SMs; several waves; a table in memory, few sequences, tiles that heads share
SHAPES = [
    shape("full", 100, batch=1, heads=1, heads_k=1),
    shape("causal", 700),
    shape("full", 1000, batch=40),
    shape("causal", 1100, batch=40, dtype="fp16"),
    shape("window:100", 3000, batch=8),
    shape("causal", 900, batch=60, lengths="zipf"),
    shape("full", 900, batch=20, lengths="edges"),
    shape("full", 100, batch=300, lengths="zipf"),
    shape("causal", 120, batch=20, lengths="empty_every"),
]


@pytest.mark.parametrize(("kv_stages", "turns"), LAYOUTS)
@pytest.mark.parametrize("asked", SHAPES, ids=str)
def test_values_are_right_and_the_bits_those_of_one_stream_in_calls_that_follow_each_other_at_once(
    asked, kv_stages, turns, device
):
    plan = replace(plan_forward(asked.problem), **TILE, kv_stages=kv_stages, has_pingpong=turns)
    calls = PlanCalls(asked)
    expected = calls(plan)()[0].clone()
    call, wrong = calls(replace(plan, streams=2)), torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(10):
        for _ in range(30):
            wrong += (call()[0] != expected).any()
        torch.cuda.synchronize(device)
    assert wrong.item() == 0
