"""What `tune` may try: every layout that fits, each once, the tables' own first. That each could run is claimed in `test_plan.py`."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_hopper.plan.budget import O_PLACES, Layout, choose_layout, layout_fault
from flash_hopper.plan.candidates import HEIGHTS, KV_STAGES, WIDTHS, candidates
from flash_hopper.plan.forward import choice_of, plan_forward, table_layout
from flash_hopper.plan.tables.forward import Tile, choose_row
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.testing.bench_suites import BenchShape


def shape(d=128, dv=None, seqlen=4096, *, causal=True, left=None, lengths=None, dtype=DType.BF16) -> BenchShape:
    return BenchShape("tune", dtype, d, dv or d, causal, seqlen, seqlen, 2, 4, 2, left=left, lengths=lengths)


shapes = st.builds(
    shape,
    d=st.integers(1, 32).map(lambda i: 8 * i),
    dv=st.integers(1, 32).map(lambda i: 8 * i),
    seqlen=st.sampled_from([1, 100, 129, 1024, 4096, 16_384]),
    causal=st.booleans(),
    left=st.sampled_from([None, 0, 100, 1024]),
    lengths=st.sampled_from([None, "equal", "zipf"]),
    dtype=st.sampled_from(KERNEL_DTYPES),
)


@settings(max_examples=40, deadline=None)
@given(shapes, st.booleans())
def test_the_plan_of_the_tables_is_the_first_and_every_other_differs_from_it_in_its_layout_only(asked, return_lse):
    problem = asked.requested(return_lse=return_lse)
    plans = candidates(problem)
    assert plans[0] == plan_forward(problem)
    assert len(set(plans)) == len(plans)
    first, hdim, hdimv, mask = plans[0], plans[0].tile_hdim, plans[0].tile_hdimv, plans[0].mask
    for plan in plans:
        layout = plan.layout
        same = replace(
            plan, tile_m=first.tile_m, tile_n=first.tile_n, q_stages=first.q_stages, kv_stages=first.kv_stages,
            o_place=first.o_place, has_pingpong=first.has_pingpong, streams=first.streams,
        )  # fmt: skip
        assert same == first
        assert layout_fault(layout, hdim, hdimv, 2, mask) is None


@settings(max_examples=20, deadline=None)
@given(shapes)
def test_every_layout_that_fits_is_there_and_no_other(asked):
    problem = asked.problem
    choice = choice_of(problem)
    every = product(range(0, 400, 32), range(0, 300, 8), (False, True), range(4), range(10), O_PLACES, range(4))
    wanted = {Layout(*x) for x in every if layout_fault(Layout(*x), choice.hdim, choice.hdimv, 2, choice.mask) is None}
    assert {plan.layout for plan in candidates(problem)} == wanted


def test_the_order_is_the_same_every_time_and_a_limit_cuts_its_end_off():
    problem = shape().problem
    every = candidates(problem)
    assert every == candidates(problem)
    for most in (1, 2, 50):
        assert candidates(problem, most) == every[:most]


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_tiles_that_the_tables_use_for_other_lengths_and_masks_are_tried_early(d):
    early = {plan.layout for plan in candidates(shape(d).problem, 10)}
    assert {choose_layout(tile, d, d, 2) for tile in choose_row(d, d).tiles.values()} <= early


def test_layouts_that_the_tables_would_not_choose_for_their_tile_come_last():
    problem = shape(64).problem
    found = [plan.layout for plan in candidates(problem)]
    usual = {
        choose_layout(Tile(x.m, x.n, x.has_pingpong, stages, x.streams), 64, 64, 2)
        for x in found
        for stages in KV_STAGES
    }
    usual |= {choose_layout(tile, 64, 64, 2) for tile in choose_row(64, 64).tiles.values()}
    usual |= {x for x in found if x.o_place == "v" and x.q_stages == 2}
    flags = [plan.layout in usual for plan in candidates(problem)]
    assert flags == sorted(flags, reverse=True)
    assert 0 < sum(flags) < len(flags)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(96, 64, False, 1, 2, "apart"), "m "),
        (Layout(0, 64, False, 1, 2, "apart"), "m "),
        (Layout(320, 64, False, 1, 2, "apart"), "m "),
        (Layout(128, 24, False, 1, 2, "apart"), "n "),
        (Layout(128, 16, False, 1, 2, "apart"), "n "),
        (Layout(64, 272, False, 1, 2, "apart"), "n "),
        (Layout(64, 64, True, 1, 2, "apart"), "has_pingpong "),
        (Layout(128, 64, True, 0, 2, "apart"), "q_stages "),
        (Layout(128, 64, True, 3, 2, "apart"), "q_stages "),
        (Layout(128, 64, True, 1, 1, "apart"), "kv_stages "),
        (Layout(128, 64, True, 1, 9, "apart"), "kv_stages "),
        (Layout(128, 64, True, 2, 6, "apart"), "kv_stages "),
        (Layout(256, 64, True, 1, 2, "apart"), "n "),
        (Layout(192, 64, True, 1, 2, "apart", 2), "m "),
        (Layout(64, 64, True, 1, 2, "apart", 2), "has_pingpong "),
        (Layout(128, 64, True, 1, 2, "apart", 2), "n "),
        (Layout(64, 64, False, 2, 3, "apart", 2), "kv_stages "),
        (Layout(64, 64, False, 1, 2, "apart", 0), "streams "),
        (Layout(64, 64, False, 1, 2, "apart", 3), "streams "),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused_with_the_field_first(layout, field):
    fault = layout_fault(layout, 128, 128, 2, "causal")
    assert fault is not None and fault.startswith(field)


def test_the_bounds_of_chunks_need_registers_that_four_warpgroups_do_not_have():
    layout = Layout(256, 48, True, 1, 2, "apart")
    assert layout_fault(layout, 64, 64, 2, "causal") is None
    assert "chunks" in layout_fault(layout, 64, 64, 2, "chunk")
    of_streams = Layout(128, 48, True, 1, 2, "apart", 2)
    assert layout_fault(of_streams, 64, 64, 2, "causal") is None
    assert "chunks in 2 streams" in layout_fault(of_streams, 64, 64, 2, "chunk")


def test_the_steps_cover_what_a_layout_may_be():
    assert HEIGHTS == [64, 128, 192, 256]
    assert (min(WIDTHS), max(WIDTHS), len(WIDTHS)) == (32, 256, 15)
    assert table_layout(shape(256).problem) in {plan.layout for plan in candidates(shape(256).problem)}
