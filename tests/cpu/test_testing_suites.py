"""The suites: what they cover, how large they are, and how many kernels they need."""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product

import pytest
from typer.testing import CliRunner

from flash_hopper.cli.main import app
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.tiles import shares
from flash_hopper.plan.backward import BackwardDkdvPlan, BackwardDqPlan, PostprocessPlan, PreprocessPlan
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing import suites
from flash_hopper.testing.backward_cases import SWEPT, tiles
from flash_hopper.testing.cases import DLSES, DOUTS, HINTS, LAYOUTS, VALUES, Case
from flash_hopper.testing.forward_cases import SWEPT_DIMS, tile_rows
from flash_hopper.testing.lengths import WORDS
from flash_hopper.testing.ragged_cases import ONE_SIDED, SIDES
from flash_hopper.testing.suites import backward_plans_of, plan_of, plans_of, sample, suite
from flash_hopper.testing.window_cases import HARMFUL, settings_with


@pytest.fixture(scope="module")
def forward():
    return suite("forward")


@pytest.fixture(scope="module")
def backward():
    return suite("backward")


@pytest.fixture(scope="module")
def ragged():
    return suite("ragged")


@pytest.fixture(scope="module")
def planned(backward):
    """(case, plan) for every backward kernel of every case."""
    return [(case, plan) for case in backward for plan in backward_plans_of(case)]


@pytest.mark.parametrize("name", suites.names())
def test_every_case_is_valid_unique_and_replayable(name):
    cases = suite(name)
    assert len({str(case) for case in cases}) == len(cases)
    for case in cases:
        case.problem()
        assert Case.parse(str(case)) == case


def test_sizes_of_the_suites(forward, backward):
    # every tile of the tables is swept; an H200 takes 38 s for 3,281 cases of the forward and 45 s for 1,960 of the backward
    assert 2000 <= len(forward) <= 3300
    assert 1600 <= len(backward) <= 2000
    for smoke, sanitizer in (("smoke", "sanitizer"), ("backward-smoke", "backward-sanitizer")):
        assert 50 <= len(suite(smoke)) <= 80
        assert 8 <= len(suite(sanitizer)) <= 12
        assert all(c.seqlen_q * c.seqlen_k * c.heads * c.batch < 200_000 for c in suite(smoke) + suite(sanitizer))


def test_each_suite_has_one_direction():
    for name in suites.names():
        both = name.startswith(("ragged", "window"))
        wanted = {False, True} if both else {name.startswith(("backward", "accumulate"))}
        assert {c.is_backward for c in suite(name)} == wanted


def test_the_number_of_kernels_stays_moderate(forward, backward, ragged):
    assert len(plans_of(forward)) < 110
    assert len(plans_of(backward)) <= 155
    assert len(plans_of(ragged)) <= 165
    assert plans_of(ragged) == plans_of(suite("ragged", seed=3))
    assert len(plans_of(suite("sanitizer"))) == len(suite("sanitizer"))
    assert plans_of(forward) == plans_of(suite("forward", seed=3))


def test_plans_are_those_of_the_cases_once_each(forward, backward, planned):
    assert set(plans_of(forward)) == {plan for plan in map(plan_of, forward) if plan is not None}
    found = plans_of(backward)
    assert len(set(found)) == len(found) == len({plan.name for plan in found})
    wanted = {plan for plan in map(plan_of, backward) if plan is not None} | {plan for _, plan in planned}
    assert set(found) == wanted
    assert all(plan.has_lse for plan in map(plan_of, backward) if plan is not None)
    assert not any(map(backward_plans_of, forward))
    assert all((plan_of(case) is None) == (not backward_plans_of(case)) for case in backward)
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
            if dims == 96 and (tile_m, tile_n) in tile_rows(128, causal):
                continue  # swept at d = 128
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
        assert {c.values for c in chosen} == set(VALUES) - {"gated"}  # which is about the gradient of out
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
    with pytest.raises(
        ArgumentError,
        match="forward, smoke, sanitizer, backward, backward-smoke, backward-sanitizer, ragged, window, ragged-smoke, ragged-sanitizer, accumulate",
    ):
        suite("sideways")


@pytest.mark.parametrize("name", ["sanitizer", "backward-sanitizer", "ragged-sanitizer"])
def test_the_compile_command_takes_all_kernels_of_a_suite(name, monkeypatch, tmp_path):
    taken = []

    def fill_cache(plans, jobs, progress):
        taken.extend(plans)
        return [tmp_path / plan.name for plan in plans]

    monkeypatch.setattr("flash_hopper.compile.parallel.fill_cache", fill_cache)
    result = CliRunner().invoke(app, ["compile", "--suite", name])
    assert result.exit_code == 0, result.output
    assert taken == plans_of(suite(name))
    assert f"{len(taken)} kernels in {tmp_path}" in result.output


def test_backward_plans_are_what_the_launch_binds(backward):
    """Which kernels a subset of gradients, a gradient of lse and determinism need."""
    for case in backward:
        plans = backward_plans_of(case)
        if not plans:
            continue
        kinds = [type(plan) for plan in plans]
        assert kinds[0] is PreprocessPlan
        assert plans[0].has_dlse == (case.dlse != "none")
        adds_dq = any(isinstance(plan, BackwardDkdvPlan) and plan.adds_dq for plan in plans)
        assert (BackwardDqPlan in kinds) == ("q" in case.grads and not adds_dq)
        assert (BackwardDkdvPlan in kinds) == (case.grads != "q")
        assert (PostprocessPlan in kinds) == adds_dq
        assert not (adds_dq and case.deterministic)


@pytest.mark.parametrize(("dims", "deterministic", "causal", "is_whole"), SWEPT, ids=str)
def test_half_of_the_residues_of_backward_tiles_are_met_with_each_mask(backward, dims, deterministic, causal, is_whole):
    d, dv = dims if isinstance(dims, tuple) else (dims, dims)
    chosen = [c for c in backward if (c.d, c.dv, c.deterministic, c.causal) == (d, dv, deterministic, causal)]
    rows, keys = tiles(dims, deterministic, causal)
    for sizes, lengths in ((rows, [c.seqlen_q for c in chosen]), (keys, [c.seqlen_k for c in chosen])):
        for size in sizes:
            met = {length % size for length in lengths}
            assert len(met) >= (size if is_whole else size // 2), (size, len(met))


def test_both_routes_meet_every_residue_of_their_tiles_with_one_mask_or_the_other(planned):
    met = defaultdict(set)
    for case, plan in planned:
        if isinstance(plan, BackwardDkdvPlan | BackwardDqPlan):
            adds_dq = isinstance(plan, BackwardDkdvPlan) and plan.adds_dq
            key = plan.kind, adds_dq, max(plan.tile_hdim, plan.tile_hdimv) > 64, plan.tile_m, plan.tile_n
            met[key, "q"].add(case.seqlen_q % plan.tile_m)
            met[key, "k"].add(case.seqlen_k % plan.tile_n)
    assert len(met) >= 2 * 8
    for (key, axis), residues in met.items():
        size = key[-2] if axis == "q" else key[-1]
        assert residues == set(range(size)), (key, axis, set(range(size)) - residues)


def test_the_backward_meets_every_head_dim_ratio_layout_and_kind_of_values(backward):
    for causal in (False, True):
        chosen = [c for c in backward if c.causal == causal]
        for deterministic in (False, True):
            same = {c.d for c in chosen if c.d == c.dv and c.deterministic == deterministic}
            assert same >= set(range(8, 129, 8))
        assert {c.d for c in chosen if c.d == c.dv} == set(range(8, 257, 8))
        assert {(192, 128), (64, 128), (128, 64), (256, 64), (64, 256), (40, 200)} <= {(c.d, c.dv) for c in chosen}
        assert any((c.d, c.dv) == (192, 128) and c.heads == 6 * c.heads_k // 2 for c in chosen)
        assert {1, 2, 3, 4, 5, 6, 7, 8, 16, 40} <= {c.heads // c.heads_k for c in chosen if c.heads_k}
        assert {c.layout for c in chosen} == set(LAYOUTS)
        assert {c.values for c in chosen} == set(VALUES)
        assert {c.dout for c in chosen} == set(DOUTS)
        assert {c.dlse for c in chosen} == set(DLSES)
        assert {c.grads for c in chosen} == {"q", "k", "v", "qk", "qv", "kv", "qkv"}
        assert {c.dtype for c in chosen} == {DType.BF16, DType.FP16}
        assert {c.return_lse for c in chosen} == {c.deterministic for c in chosen} == {False, True}


def test_grouped_and_equal_heads_meet_most_residues_of_the_key_parallel_tiles(planned):
    """Their kernels may differ: the query heads of a key head are added up in registers or in memory."""
    met = defaultdict(set)
    for case, plan in planned:
        if isinstance(plan, BackwardDkdvPlan):
            key = plan.adds_dq, max(plan.tile_hdim, plan.tile_hdimv) > 64, case.heads > case.heads_k
            met[key, plan.tile_m].add(case.seqlen_q % plan.tile_m)
            met[key, -plan.tile_n].add(case.seqlen_k % plan.tile_n)
    assert len(met) >= 2 * 6
    for (key, size), residues in met.items():
        assert len(residues) > abs(size) // 2, (key, size, len(residues))


def test_harmful_values_meet_padded_keys_and_rows_on_both_routes_in_both_dtypes(planned):
    """All logits far below zero: a padded key that is not masked has a probability beyond the largest number."""
    met = set()
    for case, plan in planned:
        if isinstance(plan, BackwardDkdvPlan) and case.seqlen_k % plan.tile_n and case.seqlen_q % plan.tile_m:
            met.add((case.values, plan.adds_dq, plan.dtype, case.causal, case.heads > case.heads_k))
    both = (False, True)
    wanted = product(("negative", "extreme", "samesign"), both, (DType.BF16, DType.FP16), both, both)
    assert set(wanted) <= met


def test_the_backward_meets_scales_lengths_and_empty_sizes(backward):
    assert {None, 0.0, 20.0} <= {c.scale for c in backward}
    assert any(c.scale is not None and c.scale < 0 for c in backward)
    for deterministic in (False, True):
        causal = [c for c in backward if c.causal and c.deterministic == deterministic]
        assert any(c.seqlen_q < c.seqlen_k for c in causal)
        assert any(c.seqlen_q == c.seqlen_k for c in causal)
        assert any(c.seqlen_q > 2 * c.seqlen_k > 128 for c in causal)
        # rows without a key, with a gradient through their lse
        assert any(c.seqlen_q > c.seqlen_k > 0 and c.dlse != "none" for c in causal)
    for name in ("batch", "seqlen_q", "seqlen_k", "heads"):
        assert any(getattr(c, name) == 0 for c in backward)
    assert max(c.seqlen_q for c in backward) >= 4096
    assert max(c.seqlen_k for c in backward) >= 4096
    assert max(c.batch for c in backward) > 65_535
    assert max(c.heads for c in backward) > 65_535


def test_the_backward_smoke_suite_cuts_through_all_kinds():
    cases = suite("backward-smoke")
    assert {c.values for c in cases} == set(VALUES)
    assert {c.dout for c in cases} == set(DOUTS)
    assert {c.dlse for c in cases} == set(DLSES)
    assert len({c.grads for c in cases}) == 7
    assert {c.deterministic for c in cases} == {c.causal for c in cases} == {False, True}


def test_the_backward_sanitizer_suite_meets_every_family_of_kernels():
    plans = [plan for plan in plans_of(suite("backward-sanitizer")) if plan.kind != "forward"]
    assert {plan.kind for plan in plans} == {"preprocess", "backward_dkdv", "backward_dq", "postprocess"}
    families = {(p.splits_roles, p.is_deferred, p.adds_dq) for p in plans if isinstance(p, BackwardDkdvPlan)}
    everything = plans_of(suite("backward"))
    assert families == {
        (p.splits_roles, p.is_deferred, p.adds_dq) for p in everything if isinstance(p, BackwardDkdvPlan)
    }
    assert {p.scheduler for p in plans if isinstance(p, BackwardDkdvPlan)} == {"static", "dynamic"}
    assert {(p.tile_m, p.tile_n) for p in plans if isinstance(p, BackwardDqPlan)} == {
        (p.tile_m, p.tile_n) for p in everything if isinstance(p, BackwardDqPlan)
    }


# ---- streams ---------------------------------------------------------------------------------------------------

SMS = 132  # of an H100 or H200, with a CTA each


def tiles_of(case, plan):
    """Tiles of a forward; those of rows that no sequence uses included."""
    if not case.is_ragged:
        return case.batch * case.heads * ceil_div(case.seqlen_q, plan.tile_m)
    side = case.side("q")
    ends = None if side.offsets is None else [*side.offsets, side.rows]
    rows = [side.rows] * case.batch if ends is None else [b - a for a, b in pairwise(ends)]
    if plan.shares_tiles:
        return sum(shares(n, plan.consumer_warpgroups).tiles(case.heads) for n in rows)
    return sum(case.heads * ceil_div(n, plan.tile_m) for n in rows)


def met_by_streams(*names):
    """(case, number of tiles) by kind of plan (mask, is_ragged, shares_tiles), of plans with several streams."""
    met = defaultdict(list)
    for case in (case for name in names for case in suite(name)):
        plan = plan_of(case)
        if plan is not None and plan.streams > 1:
            met[plan.mask, plan.is_ragged, plan.shares_tiles].append((case, tiles_of(case, plan)))
    return met


def test_every_kind_of_plan_with_streams_meets_streams_without_a_tile_with_one_and_with_several():
    """A second stream gets a tile when every CTA has one."""
    met = met_by_streams("forward", "ragged")
    layouts = ((False, False), (True, False), (True, True))
    assert set(met) == {(mask, *layout) for mask, layout in product(("full", "causal", "local"), layouts)}
    for kind, found in met.items():
        counts, crowds = {n for _, n in found}, [case for case, n in found if n > SMS]
        assert 1 in counts and any(1 < n <= SMS for n in counts), kind
        assert max(counts) > 2 * SMS, kind
        assert any(case.seqlen_q % 128 for case in crowds), kind
        assert any(case.heads > case.heads_k > 1 for case in crowds), kind
        assert any(case.heads > case.heads_k == 1 for case in crowds), kind
        if kind[1]:
            assert {case.batch > 31 for case in crowds} == {False, True}, "with and without a table in memory"


def test_tools_that_slow_kernels_down_meet_both_streams_of_a_cta():
    met = met_by_streams("sanitizer", "ragged-sanitizer")
    crowded = {kind for kind, found in met.items() if any(n > 2 * SMS for _, n in found)}
    for seen in (set(met), crowded):
        assert {mask for mask, _, _ in seen} == {"full", "causal", "local"}
        assert {kind[1:] for kind in seen} == {(False, False), (True, False), (True, True)}


def test_tools_that_find_races_meet_every_kernel_with_tiles_in_a_slot_that_held_another():
    """A scheduler warp writes where it has written before when its CTA, or stream, has two tiles: then the end is the third."""
    reused = set()
    for name in ("sanitizer", "backward-sanitizer", "ragged-sanitizer", "fp8-sanitizer"):
        for case in suite(name):
            plan = plan_of(case)
            if tiles_of(case, plan) > SMS * getattr(plan, "streams", 1):
                reused.add((plan.kind, case.is_ragged))
            for p in backward_plans_of(case):
                rows, tile = (case.seqlen_k, "tile_n") if p.kind == "backward_dkdv" else (case.seqlen_q, "tile_m")
                if hasattr(p, "scheduler") and case.batch * case.heads * ceil_div(rows, getattr(p, tile)) > SMS:
                    kind = (p.kind, p.splits_roles, p.adds_dq) if p.kind == "backward_dkdv" else (p.kind,)
                    reused.add((*kind, case.is_ragged))
    assert reused >= {("forward", False), ("forward", True), ("forward_fp8", False)}
    assert reused >= {("backward_dq", False), ("backward_dq", True)}
    # with split roles, or with the warp that writes dQ and reads the tiles as well, or neither
    families = {kind[1:3] for kind in reused if kind[0] == "backward_dkdv"}
    assert families == {(False, False), (False, True), (True, False)}
    assert {kind[-1] for kind in reused if kind[0] == "backward_dkdv"} == {False, True}


# ---- ragged ----------------------------------------------------------------------------------------------------


def test_the_ragged_suite_is_large_and_holds_the_windows(ragged):
    assert 2000 <= len(ragged) <= 3000
    assert len(suite("window")) >= 600
    whole = {replace(case, seed=0, give_out=False) for case in ragged}
    assert {replace(case, seed=0, give_out=False) for case in suite("window")} <= whole
    assert min(sum(c.is_backward == b for c in ragged) for b in (False, True)) > 1000
    assert 14 <= len(suite("ragged-sanitizer")) <= 18
    assert 80 <= len(suite("ragged-smoke")) <= 120


def test_ragged_cases_are_small_enough_for_the_oracle(ragged):
    for case in ragged:
        rows = max(math.prod(case.shape(operand)[:-2]) for operand in "qk")
        assert rows * case.heads * case.d <= 12_000_000, str(case)


def test_every_number_of_sequences_meets_every_mask_and_direction(ragged):
    met = {(c.batch, c.mask.kind, c.is_backward) for c in ragged if c.is_ragged}
    assert met >= set(product((1, 31, 32, 62, 993, 2000), ("full", "causal", "local", "chunk"), (False, True)))
    for batch in (1, 31, 32, 62, 993, 2000):
        assert any(c.deterministic for c in ragged if c.is_backward and c.batch == batch and c.is_ragged)


def test_every_mask_meets_every_kind_of_lengths_side_and_head_dim(ragged):
    for direction in (False, True):
        chosen = [c for c in ragged if c.is_ragged and c.is_backward == direction]
        for kind in ("full", "causal", "local", "chunk"):
            cases = [c for c in chosen if c.mask.kind == kind]
            words = {c.lengths_q.rstrip("0123456789") for c in cases} | {
                c.lengths_k.rstrip("0123456789") for c in cases
            }
            assert words >= set(WORDS)
            sides = {(c.packed, c.used) for c in cases}
            assert sides >= {(s.get("packed", "none"), s.get("used", "none")) for s in (*SIDES, *ONE_SIDED)}
            assert {(c.d, c.dtype) for c in cases} >= {
                (dims[0] if isinstance(dims, tuple) else dims, dtype) for dims, dtype in settings_with(kind)
            }
            assert {c.heads // max(c.heads_k, 1) for c in cases} >= {1, 2, 3, 4}
            assert any(c.slack and c.used != "none" for c in cases)
            assert any(c.slack and c.used == "none" for c in cases)
        assert {c.hint for c in chosen} == set(HINTS)
        assert {c.layout for c in chosen} >= set(LAYOUTS) - {"expand_batch"}
        assert {c.values for c in chosen} >= set(HARMFUL)
        assert any(c.scale is not None and c.scale < 0 for c in chosen)
        for name in ("batch", "seqlen_q", "seqlen_k", "heads"):
            assert any(getattr(c, name) == 0 for c in chosen)
    backward = [c for c in ragged if c.is_ragged and c.is_backward]
    assert {c.dout for c in backward} == set(DOUTS) - {"expand_batch"}
    assert {c.dlse for c in backward} == set(DLSES)
    assert {c.grads for c in backward} == {"q", "k", "v", "qk", "qv", "kv", "qkv"}


def test_empty_sequences_meet_every_mask_on_every_side_also_deterministically(ragged):
    met = set()
    for case in ragged:
        if case.is_ragged and case.batch > 2:
            empty_q, empty_k = (0 in case.lengths(side) for side in ("q", "k"))
            met.add((case.mask.kind, case.is_backward, case.deterministic, empty_q, empty_k))
    wanted = product(("full", "causal", "local", "chunk"), ((False, False), (True, False), (True, True)), (False, True))
    for kind, (is_backward, deterministic), empty_q in wanted:
        assert (kind, is_backward, deterministic, empty_q, not empty_q) in met
    assert all((kind, True, True, True, True) in met for kind in ("full", "causal", "local", "chunk"))


def test_gradients_are_added_on_every_route_and_to_every_kind_of_buffer():
    cases = suite("accumulate")
    assert 60 <= len(cases) <= 120
    assert {c.into for c in cases} == {"zeros", "holes"}
    kernels = [plan for plan in plans_of(cases) if plan.kind in ("backward_dkdv", "backward_dq")]
    assert len(plans_of(cases)) < 120
    routes = {(p.splits_roles, p.is_deferred, p.adds_dq) for p in kernels if isinstance(p, BackwardDkdvPlan)}
    usual = [plan for plan in plans_of(suite("backward")) if isinstance(plan, BackwardDkdvPlan)]
    assert routes == {(p.splits_roles, p.is_deferred, p.adds_dq) for p in usual}
    for is_ragged in (False, True):
        chosen = [c for c in cases if c.is_ragged == is_ragged]
        met = {(c.d, c.deterministic, c.heads > c.heads_k) for c in chosen}
        assert {(64, True), (64, False), (128, True), (128, False)} <= {(d, det) for d, det, _ in met}
        assert {c.mask.kind for c in chosen} == {"full", "causal", "local"}
    assert len({c.grads for c in cases}) == 7


def test_windows_meet_both_ends_bounded_and_not_in_every_relation_of_lengths():
    windows = [c for c in suite("window") if not c.chunk]
    for direction in (False, True):
        cases = [c for c in windows if c.is_backward == direction]
        for relation in (
            lambda c: c.seqlen_q < c.seqlen_k,
            lambda c: c.seqlen_q == c.seqlen_k,
            lambda c: c.seqlen_q > c.seqlen_k,
        ):
            ends = {(c.mask.left is None, c.mask.right is None, c.causal) for c in cases if relation(c)}
            assert ends >= {(False, False, False), (False, True, False), (True, False, False), (False, False, True)}
        assert {0, None} <= {c.left for c in cases} & {c.right for c in cases}
        assert -1 in {c.left for c in cases} | {c.right for c in cases}
        assert any(c.left is not None and c.left > c.seqlen_k for c in cases)
    chunks = [c for c in suite("window") if c.chunk]
    assert {1, 2, 64} <= {c.chunk for c in chunks}
    assert any(c.chunk > c.seqlen_k for c in chunks)
    assert {c.causal for c in chunks} == {c.deterministic for c in chunks} == {False, True}
    assert any(c.chunk and c.left is not None for c in chunks)


def test_the_ragged_sanitizer_suite_meets_every_family_of_ragged_and_windowed_kernels():
    kinds = {(plan.kind, c.mask.kind) for c in suite("ragged-sanitizer") for plan in plans_of([c])}
    backward = {"preprocess", "backward_dkdv", "backward_dq", "postprocess"}
    assert {kind for kind, _ in kinds} == {"forward", *backward}
    for kernel in ("forward", "backward_dkdv"):
        assert {mask for kind, mask in kinds if kind == kernel} == {"full", "causal", "local", "chunk"}
