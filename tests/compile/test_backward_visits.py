"""Which blocks the backward's consumers visit, and which of them without a mask: their loops as plain Python.

`Consumer.tile` and `FusedConsumer.tile` of the key-parallel kernel and `Consumer.tile` of the query-parallel one run as they are;
a step only takes notes.
"""

import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from simt import copies

from flash_hopper.geometry.masks import Lengths, MaskBounds, visible_keys
from flash_hopper.geometry.tiles import TileCoord
from flash_hopper.plan.backward import BackwardRequest, plan_backward
from flash_hopper.problem.mask import Mask
from flash_hopper.testing.cases import case_of

sequences, schedule, prompt, fused, by_rows = copies(
    "flash_hopper.device.sequences",
    "flash_hopper.kernels.backward_dkdv.schedule",
    "flash_hopper.kernels.backward_dkdv.consumer",
    "flash_hopper.kernels.backward_dkdv.fused_consumer",
    "flash_hopper.kernels.backward_dq.consumer",
)
BAND = 64  # keys or rows of a warpgroup
MASKS = {
    "full": (Mask(), MaskBounds("full")),
    "causal": (Mask(right=0), MaskBounds("causal")),
    "local": (Mask(70, 130), MaskBounds("local", 70, 130, 0)),
    "chunk": (Mask(right=0, chunk=100), MaskBounds("chunk", 2**29, 0, 100)),
}
LENGTHS = [(1, 1), (64, 64), (128, 128), (300, 300), (513, 257), (257, 640), (500, 0), (0, 90), (700, 700)]
every_mask = pytest.mark.parametrize("kind", MASKS)
every_size = pytest.mark.parametrize("lengths", [Lengths(*pair) for pair in LENGTHS], ids=str)


@pytest.fixture(autouse=True)
def plain_python(monkeypatch) -> None:
    cutlass = SimpleNamespace(
        range=lambda *bounds, unroll: range(*bounds), select_=lambda condition, a, b: a if condition else b
    )
    swaps = {"cutlass": cutlass, "cute": MagicMock(), "Int32": int, "warpgroup": MagicMock(), "const_expr": bool}
    for module in (sequences, schedule, prompt, fused, by_rows):
        for name, value in vars(module).copy().items():
            if name in swaps:
                monkeypatch.setattr(module, name, swaps[name])
                continue
            if name.startswith(("issue", "await", "read_")):
                monkeypatch.setattr(module, name, MagicMock())
                continue
            for owner, key, item in [(module, name, value), *members(value, module)]:
                if hasattr(item, "__wrapped__") and hasattr(item, "_dsl_cls"):
                    monkeypatch.setattr(owner, key, item.__wrapped__)


def members(value, module):
    is_own = isinstance(value, type) and value.__module__ == module.__name__
    return [(value, key, item) for key, item in vars(value).copy().items()] if is_own else []


def plans(dim, kind, is_deterministic, heads):
    problem = replace(case_of((dim, dim), (1024, 1024), False, heads=heads).problem(), mask=MASKS[kind][0])
    return plan_backward(problem, BackwardRequest(True, True, False, is_deterministic))


def arguments(kind, lengths, heads):
    """Kernel arguments as far as the loops look at them."""
    q, k = SimpleNamespace(shape=(lengths.q, 0, heads[0], 1)), SimpleNamespace(shape=(lengths.k, 0, heads[1], 1))
    return SimpleNamespace(mQ=q, mK=k, mask=lambda _: MASKS[kind][1])


def hidden(rows, keys, kind, lengths):
    """True if a mask hides one of these keys from one of these rows."""
    return any(
        not (seen.first <= key < seen.end)
        for row in rows
        for seen in [visible_keys(row, lengths, MASKS[kind][1])]
        for key in (keys[0], keys[-1])
    )


def visits_of_keys(plan, args, block, band) -> list[tuple[int, bool]]:
    """(query block, masked) in the order in which the warpgroup of a band visits them."""
    notes = []
    module, kind = (fused, fused.FusedConsumer) if plan.adds_dq else (prompt, prompt.Consumer)
    consumer = object.__new__(kind)
    consumer.plan, consumer.is_ahead = plan, plan.tile_m > 64
    at = SimpleNamespace(q=MagicMock(), do=MagicMock(), ahead=lambda: at)
    resources = args, MagicMock(), MagicMock(), MagicMock()
    tile = TileCoord(block, 0, 0)
    if module is fused:

        def step(resources, scores, grads, dq, view, at, m_block, i, has_next, is_masked, wg, thread):
            assert i == len(notes)
            notes.append((m_block, is_masked, has_next))
            return at

        consumer.step = step
        consumer.tile(resources, MagicMock(), MagicMock(), MagicMock(), tile, at, band, 0)
        assert [has_next for *_, has_next in notes] == [True] * (len(notes) - 1) + [False]
        return [(m_block, is_masked) for m_block, is_masked, _ in notes]

    def noted(resources, scores, grads, view, at, order, i, is_masked):
        notes.append((order.start + i, is_masked))
        return at

    def first(resources, scores, grads, view, at, m_block):
        notes.append((m_block, prompt.needs_mask(plan, view, m_block)))

    consumer.step = consumer.step_deferred = noted
    consumer.first_deferred = first
    consumer.tile(resources, MagicMock(), MagicMock(), tile, at, band, 0)
    return notes


@every_mask
@every_size
@pytest.mark.parametrize(
    ("dim", "is_deterministic", "heads"),
    [(64, False, (2, 2)), (64, False, (4, 2)), (128, False, (2, 2)), (64, True, (4, 2)), (128, True, (6, 2))],
)
def test_a_band_of_keys_meets_every_query_block_once_a_head_and_those_that_a_mask_cuts_with_it(
    dim, is_deterministic, heads, lengths, kind
):
    plan = plans(dim, kind, is_deterministic, heads).dkdv
    args = arguments(kind, lengths, heads)
    visited_heads = 1 if plan.adds_dq else heads[0] // heads[1]
    for block in range(-(-lengths.k // plan.tile_n)):
        order = schedule.query_schedule(plan, args, TileCoord(block, 0, 0))
        for band in range(plan.tile_n // BAND):
            found = visits_of_keys(plan, args, block, band)
            expected = [order.first]
            for _ in range(order.count * visited_heads - 1):
                expected.append(order.after(expected[-1]))
            assert [m_block for m_block, _ in found] == expected
            first = block * plan.tile_n + band * BAND
            existing = range(first, min(first + BAND, lengths.k))
            is_whole = len(existing) == BAND or not plan.adds_dq
            for m_block, is_masked in found:
                rows = range(m_block * plan.tile_m, min((m_block + 1) * plan.tile_m, lengths.q))
                needs = not is_whole or (len(existing) > 0 and hidden(rows, existing, kind, lengths))
                assert is_masked or not needs, (block, band, m_block)
                if kind in ("full", "causal") and is_whole and len(existing) > 0 and rows:
                    assert is_masked == needs, "a mask that hides nothing"


@every_mask
@every_size
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_band_of_rows_meets_every_key_block_that_it_sees_once_and_those_that_a_mask_cuts_with_it(dim, lengths, kind):
    plan = plans(dim, kind, True, (2, 2)).dq
    args = arguments(kind, lengths, (2, 2))
    consumer = object.__new__(by_rows.Consumer)
    consumer.plan = plan
    for block in range(-(-lengths.q // plan.tile_m)):
        turns = []
        for band in range(plan.tile_m // BAND):
            notes = []

            def step(args, atoms, pipes, frags, view, k_state, v_state, wg, n_block, is_masked, notes=notes):
                notes.append((n_block, is_masked))
                return k_state, v_state

            def skip(pipes, k_state, v_state, wg, notes=notes):
                notes.append(None)
                return k_state, v_state

            consumer.step, consumer.skip = step, skip
            view = SimpleNamespace(lengths=lengths)
            consumer.tile(args, None, None, MagicMock(), view, TileCoord(block, 0, 0), None, None, band)
            turns.append(len(notes))
            visits = [note for note in notes if note is not None]
            assert all(one[0] == other[0] + 1 for one, other in pairwise(visits))
            first = block * plan.tile_m + band * BAND
            rows = range(first, min(first + BAND, lengths.q))
            keys = {
                key
                for row in rows
                for seen in [visible_keys(row, lengths, MASKS[kind][1])]
                for key in range(max(seen.first, 0), seen.end)
            }
            assert {key // plan.tile_n for key in keys} <= {n_block for n_block, _ in visits}
            for n_block, is_masked in visits if rows else ():
                of_block = range(n_block * plan.tile_n, (n_block + 1) * plan.tile_n)
                assert is_masked or not hidden(rows, of_block, kind, lengths), (block, band, n_block)
        assert len(set(turns)) == 1, "each warpgroup takes as many turns"


def test_random_lengths_leave_no_block_out():
    draw = random.Random(7)
    for _ in range(60):
        kind, lengths = draw.choice(list(MASKS)), Lengths(draw.randint(1, 900), draw.randint(1, 900))
        plan = plans(draw.choice((64, 128)), kind, draw.random() < 0.5, (2, 2)).dkdv
        args = arguments(kind, lengths, (2, 2))
        for block in range(-(-lengths.k // plan.tile_n)):
            order = schedule.query_schedule(plan, args, TileCoord(block, 0, 0))
            for band in range(plan.tile_n // BAND):
                visited = [m_block for m_block, _ in visits_of_keys(plan, args, block, band)]
                assert sorted(visited) == list(range(order.start, order.end))
