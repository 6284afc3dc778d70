"""The same bits every time, and for a sequence wherever it stands in a batch and whatever stands beside it."""

import random
from dataclasses import replace

import pytest
import torch
from backward_calls import assert_same
from ragged_steps import attention, of_case, step

from flash_hopper.testing.cases import case_of
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.ragged_cases import SIDES, ragged_case
from flash_hopper.testing.run import run_case
from flash_hopper.testing.window_cases import as_backward

# several waves of tiles, lengths that end within a tile, sequences without work
FORWARD = [
    replace(case_of(64, (1500, 1700), batch=4, heads=(8, 2)), left=300, right=100),
    replace(case_of(128, (2500, 2500), heads=(16, 4)), left=400, causal=True),
    replace(case_of(128, (1000, 1500), batch=2, heads=(8, 8)), chunk=300),
    ragged_case(64, (700, 700), "causal", batch=40, heads=(8, 2), lengths_q="zipf", lengths_k="zipf1"),
    ragged_case(64, (900, 900), "causal", batch=20, heads=(8, 2), lengths_q="zipf", lengths_k="zipf1"),
    ragged_case(128, (900, 900), "full", batch=20, heads=(8, 4), **SIDES[2]),
    ragged_case(128, (2000, 2000), "causal", batch=60, heads=(8, 2), lengths_q="one_long", lengths_k="one_long"),
    ragged_case(64, (8, 8), "full", batch=2000, heads=(4, 4), lengths_q="tiny", lengths_k="tiny"),
    ragged_case(256, (500, 700), "local", 3, batch=12, heads=(4, 2), **SIDES[7]),
    ragged_case(64, (600, 600), "chunk", batch=33, heads=(8, 2), lengths_q="empty_every"),
]
BACKWARD = [as_backward(case, deterministic=True, dlse="bhs") for case in FORWARD]


@pytest.mark.parametrize("case", [*FORWARD, *BACKWARD], ids=str)
def test_hundreds_of_calls_give_the_same_bits(case, device):
    result = run_case(case, device, repeat=200)
    assert result.passed, result.message


@pytest.mark.parametrize("case", [*FORWARD, *BACKWARD], ids=str)
def test_calls_that_follow_each_other_at_once_give_the_same_bits(case, device):
    """No synchronisation between calls: each overlaps with the end of the one before it."""
    inputs = make_inputs(case, device)
    first = of_case(case, inputs)
    torch.cuda.synchronize(device)
    for _ in range(5):
        burst = [of_case(case, inputs) for _ in range(20)]
        torch.cuda.synchronize(device)
        for results in burst:
            assert_same(results, first, case)


@pytest.mark.parametrize("case", [c for c in (*FORWARD, *BACKWARD) if c.is_ragged][::2], ids=str)
def test_other_work_on_the_gpu_does_not_change_the_bits(case, device):
    inputs = make_inputs(case, device)
    other = torch.cuda.Stream(device)
    matrix = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    torch.cuda.synchronize(device)
    want = of_case(case, inputs)
    torch.cuda.synchronize(device)
    for _ in range(20):
        with torch.cuda.stream(other):
            busy = matrix @ matrix
        got = of_case(case, inputs)
        torch.cuda.synchronize(device)
        assert_same(got, want, case)
        del busy


class Sequences:
    """Sequences with values of their own, to be put into batches in any order."""

    LENGTHS = ((300, 400), (0, 50), (129, 64), (1, 700), (64, 64), (500, 0), (257, 255), (63, 1), (400, 401), (5, 9))

    def __init__(self, device, heads=(4, 2), d=64):
        generator = torch.Generator().manual_seed(5)

        def rows(number, of_heads):
            return torch.randn(number, of_heads, d, generator=generator).to(device, torch.bfloat16)

        self.device = device
        self.parts = [
            (rows(n, heads[0]), rows(m, heads[1]), rows(m, heads[1]), rows(n, heads[0])) for n, m in self.LENGTHS
        ]

    def batch(self, order):
        """q, k, v, dout and the offsets of a packed batch."""
        tensors = [torch.cat([self.parts[i][operand] for i in order]) for operand in range(4)]
        lengths = {}
        for side, at in (("q", 0), ("k", 1)):
            ends = torch.tensor([0] + [self.LENGTHS[i][at] for i in order]).cumsum(0)
            lengths[f"cu_seqlens_{side}"] = ends.to(self.device, torch.int32)
        return tensors, lengths

    def pieces(self, order, results):
        """Results by sequence: out, lse (rows first), dq, dk, dv of each."""
        found, row, key = {}, 0, 0
        for i in order:
            n, m = self.LENGTHS[i]
            rows, keys = slice(row, row + n), slice(key, key + m)
            out, lse, *gradients = results
            parts = [out[rows], lse[:, rows]]
            if gradients:
                parts += [gradients[0][rows], gradients[1][keys], gradients[2][keys]]
            found[i] = parts
            row, key = row + n, key + m
        return found


MASKS = [{}, {"causal": True}, {"left": 100, "right": 60}, {"left": 130, "causal": True}, {"chunk": 128}]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("d", [64, 128])
def test_a_sequence_gives_the_same_bits_wherever_it_stands_and_alone(d, mask, backward, device):
    """With the same max_seqlen; gradients in deterministic mode."""
    sequences = Sequences(device, d=d)
    everything = list(range(len(sequences.LENGTHS)))
    draw = random.Random(1)
    orders = [everything, everything[::-1], *(draw.sample(everything, len(everything)) for _ in range(4))]
    orders += [[i] for i in everything] + [[i, j, i] for i, j in ((0, 2), (8, 5), (6, 1))]
    wanted = {}
    for order in orders:
        # a case only for the options: its own lengths are not used
        case = replace(case_of(d, (700, 800), heads=(4, 2)), packed="qk", hint="exact", deterministic=backward, **mask)
        (q, k, v, dout), lengths = sequences.batch(order)
        if backward:
            results = step(case, [x.requires_grad_() for x in (q, k, v)], lengths, dout)
        else:
            results = attention(case, (q, k, v), lengths)
        for i, parts in sequences.pieces(order, results).items():
            for name, got, want in zip(
                ("out", "lse", "dq", "dk", "dv"), parts, wanted.setdefault(i, parts), strict=False
            ):
                assert torch.equal(got, want), f"{name} of sequence {i} differs in batch {order}"
