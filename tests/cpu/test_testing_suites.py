"""The suites: what they cover, how large they are, and how many kernels they need."""

from collections import defaultdict

import pytest

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing import suites
from flash_hopper.testing.cases import LAYOUTS, VALUES, Case
from flash_hopper.testing.suites import SWEPT_DIMS, plan_of, plans_of, sample, suite, tile_rows


@pytest.fixture(scope="module")
def forward():
    return suite("forward")


@pytest.mark.parametrize("name", suites.names())
def test_every_case_is_valid_unique_and_replayable(name):
    cases = suite(name)
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        case.problem()
        assert Case.parse(str(case)) == case


def test_sizes_of_the_suites(forward):
    assert 2000 <= len(forward) <= 3200
    assert 50 <= len(suite("smoke")) <= 80
    assert 8 <= len(suite("sanitizer")) <= 12
    assert all(c.seqlen_q * c.seqlen_k * c.heads * c.batch < 200_000 for c in suite("smoke") + suite("sanitizer"))


def test_the_number_of_kernels_stays_moderate(forward):
    assert len(plans_of(forward)) < 110
    assert len(plans_of(suite("sanitizer"))) == len(suite("sanitizer"))
    assert plans_of(forward) == plans_of(suite("forward", seed=3))


def test_plans_are_those_of_the_cases_once_each(forward):
    assert set(plans_of(forward)) == {plan for plan in map(plan_of, forward) if plan is not None}
    assert all(plan_of(case) is None for case in forward if 0 in case.shape("q") or case.seqlen_k == 0)


@pytest.mark.parametrize("dims", SWEPT_DIMS, ids=str)
def test_every_residue_of_every_tile_is_met(forward, dims):
    d, dv = dims if isinstance(dims, tuple) else (dims, dims)
    rows, keys = defaultdict(set), defaultdict(set)
    for case in forward:
        plan = plan_of(case)
        if (case.d, case.dv) == (d, dv) and plan is not None:
            tile = plan.tile_m, plan.tile_n
            rows[tile].add((case.seqlen_q % plan.tile_m, case.causal))
            keys[tile].add((case.seqlen_k % plan.tile_n, case.causal))
    for causal in (False, True):
        for (tile_m, tile_n), lengths in tile_rows(dims, causal).items():
            if dims == 96 and tile_m == 128:
                continue  # this tile is swept at d = 128
            tile = tile_m, tile_n
            assert {residue for residue, _ in rows[tile]} >= {length % tile_m for length in lengths}
            assert {residue for residue, _ in keys[tile]} == set(range(tile_n))
            assert len({residue for residue, mask in keys[tile] if mask == causal}) >= tile_n // 2
            if dims in (64, 128) and len(lengths) == tile_m:
                assert {residue for residue, mask in rows[tile] if mask == causal} == set(range(tile_m))


def test_every_head_dim_ratio_layout_and_kind_of_values_is_met(forward):
    for causal in (False, True):
        chosen = [c for c in forward if c.causal == causal]
        assert {c.d for c in chosen if c.d == c.dv} == set(range(8, 257, 8))
        assert {(192, 128), (64, 256), (256, 64), (128, 64), (40, 200)} <= {(c.d, c.dv) for c in chosen}
        assert {1, 2, 3, 4, 5, 6, 7, 8, 16, 32} <= {c.heads // c.heads_k for c in chosen if c.heads_k}
        assert {c.layout for c in chosen} == set(LAYOUTS)
        assert {c.values for c in chosen} == set(VALUES)
        assert {c.dtype for c in chosen} == {DType.BF16, DType.FP16}
        assert {c.return_lse for c in chosen} == {c.give_out for c in chosen} == {False, True}


def test_each_layout_is_met_by_each_operand_alone(forward):
    met = {(c.layout, c.strided) for c in forward}
    for layout in set(LAYOUTS) - {"bshd", "packed"}:
        for operand in "qkv" if layout.startswith("expand") else "qkvo":
            assert (layout, operand) in met
    assert {("packed", "kv"), ("packed", "qkv")} <= met
    # v of another head dim beside k in one buffer
    assert any(c.layout == "packed" and c.d != c.dv for c in forward)


def test_scales_lengths_and_empty_sizes_are_met(forward):
    assert {None, 0.0} <= {c.scale for c in forward}
    assert any(c.scale is not None and c.scale < 0 for c in forward)
    causal = [c for c in forward if c.causal]
    assert all(any(check(c) for c in causal) for check in (
        lambda c: c.seqlen_q < c.seqlen_k,
        lambda c: c.seqlen_q == c.seqlen_k,
        lambda c: c.seqlen_q > c.seqlen_k > 0,
        lambda c: c.seqlen_q > 2 * c.seqlen_k + 256 > 256,
    ))  # fmt: skip
    for name in ("batch", "seqlen_q", "seqlen_k", "heads"):
        assert any(getattr(c, name) == 0 for c in forward)
    assert max(c.seqlen_q for c in forward) >= 8192
    assert max(c.seqlen_k for c in forward) >= 32_768
    assert max(c.batch for c in forward) > 65_535
    assert max(c.heads for c in forward) > 65_535


def test_a_seed_changes_all_random_numbers_and_nothing_else(forward):
    other = suite("forward", seed=1)
    assert not {c.seed for c in forward} & {c.seed for c in other}
    assert [str(c).split(",seed=")[0] for c in forward] == [str(c).split(",seed=")[0] for c in other]


@pytest.mark.parametrize("limit", [1, 7, 100, 2000])
def test_a_sample_is_spread_over_the_suite(forward, limit):
    chosen = sample(forward, limit)
    assert len(chosen) == limit
    positions = [forward.index(case) for case in chosen]
    assert positions == sorted(set(positions))
    gaps = [b - a for a, b in zip([*positions], [*positions[1:], len(forward)], strict=True)]
    assert max(gaps) - min(gaps) <= 1


def test_a_sample_of_everything_is_the_suite(forward):
    assert sample(forward, None) == sample(forward, 10**6) == forward


def test_an_unknown_suite_is_refused():
    with pytest.raises(ArgumentError, match="forward, smoke, sanitizer"):
        suite("backward")
