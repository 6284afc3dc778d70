"""Every request gets a plan that fits shared memory, registers and barriers."""

import dataclasses
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.plan.budget import (
    SMEM_BARRIER_BYTES,
    SMEM_LIMIT_BYTES,
    SMEM_RESERVED_BYTES,
    choose_buffers,
    forward_smem_bytes,
)
from flash_hopper.plan.forward import HDIM_STEP, ForwardPlan, plan_forward
from flash_hopper.plan.roles import REGISTER_FILE, REGISTERS, WARPGROUP, Roles, forward_pipelines, roles_of
from flash_hopper.plan.tables.forward import ROWS, Tile, choose_tile
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import CompileError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.tensor import TensorSpec

HEAD_DIMS = range(8, 257, 8)
LENGTHS = (1, 64, 128, 129, 192, 1024, 16_384)


def problem(d, dv, *, seqlen_q=1024, seqlen_k=1024, dtype=DType.BF16, **options) -> AttentionProblem:
    def spec(name, seqlen, dim):
        return TensorSpec(name, (2, seqlen, 4, dim), (seqlen * 4 * dim, 4 * dim, dim, 1), dtype, str(dtype), "cuda:0")

    q, k, v = spec("q", seqlen_q, d), spec("k", seqlen_k, d), spec("v", seqlen_k, dv)
    return attention_problem(q, k, v, AttentionOptions(**options), dtypes=KERNEL_DTYPES)


def every_plan() -> set[ForwardPlan]:
    """One plan for each choice that the head dims, the mask and the length lead to."""
    return {
        plan_forward(problem(d, dv, seqlen_q=seqlen, causal=causal))
        for d, dv, causal, seqlen in product(HEAD_DIMS, HEAD_DIMS, (False, True), LENGTHS)
    }


@pytest.fixture(scope="module")
def plans():
    return every_plan()


def test_every_head_dim_pair_fits_shared_memory(plans):
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES
    for plan in plans:
        tile, size = Tile(plan.tile_m, plan.tile_n), plan.dtype.itemsize
        used = forward_smem_bytes(
            tile, plan.tile_hdim, plan.tile_hdimv, size, plan.q_stages, plan.kv_stages, plan.o_aliases_q
        )
        assert used <= room, plan
        # two K/V stages are what lets the next block load during this one
        assert plan.kv_stages >= 2, plan


def test_every_plan_fits_the_register_file(plans):
    for plan in plans:
        roles = roles_of(plan)
        pool = REGISTER_FILE // roles.threads // 8 * 8 * roles.threads
        asked = WARPGROUP * (roles.producer_registers + roles.consumer_warpgroups * roles.consumer_registers)
        assert asked <= pool, plan
        assert roles.producer_registers % 8 == 0, plan
        assert roles.consumer_registers % 8 == 0, plan
        # S and P of a step and O live in registers: fp32 scores, their 16-bit copy, fp32 output
        held = plan.tile_n // 2 + plan.tile_n // 4 + plan.tile_hdimv // 2
        assert held < roles.consumer_registers, plan


def test_tiles_are_what_the_instructions_can_do(plans):
    for plan in plans:
        assert plan.tile_m % 64 == 0, plan
        assert plan.tile_n % 16 == 0, plan
        assert plan.tile_n <= 256, plan
        assert plan.tile_hdim % HDIM_STEP == 0, plan
        assert plan.tile_hdimv % HDIM_STEP == 0, plan


def test_padding_covers_the_head_dims_and_stays_below_one_step():
    for d, dv in product(HEAD_DIMS, HEAD_DIMS):
        plan = plan_forward(problem(d, dv))
        assert d <= plan.tile_hdim < d + HDIM_STEP
        assert dv <= plan.tile_hdimv < dv + HDIM_STEP


def test_names_are_unique_identifiers(plans):
    names = {plan.name for plan in plans}
    assert len(names) == len(plans)
    assert all(name.isidentifier() and name.isascii() for name in names)


@given(st.data())
def test_sizes_that_are_run_time_values_do_not_change_the_plan(data):
    d, dv = data.draw(st.sampled_from(HEAD_DIMS)), data.draw(st.sampled_from(HEAD_DIMS))
    causal = data.draw(st.booleans())
    seqlen_q = data.draw(st.integers(1, 20_000))
    first, second = (
        plan_forward(
            dataclasses.replace(
                problem(d, dv, seqlen_q=seqlen_q, seqlen_k=seqlen_q, causal=causal),
                batch=data.draw(st.integers(1, 100)),
                heads=8 * data.draw(st.integers(1, 8)),
                heads_k=data.draw(st.sampled_from([1, 2, 4, 8])),
                seqlen_k=data.draw(st.integers(1, 20_000)),
                softmax_scale=data.draw(st.floats(0, 10)),
            )
        )
        for _ in range(2)
    )
    assert first == second


def test_lengths_choose_among_few_tiles():
    for d, causal in product(HEAD_DIMS, (False, True)):
        assert len({plan_forward(problem(d, d, seqlen_q=n, causal=causal)) for n in range(1, 2000)}) <= 2


def test_flags_that_the_kernel_is_compiled_for_are_in_the_plan():
    base = problem(128, 128)
    assert not plan_forward(base).has_lse
    assert plan_forward(problem(128, 128, return_lse=True)).has_lse
    assert plan_forward(problem(128, 128, causal=True)).is_causal
    assert plan_forward(problem(128, 128, softmax_scale=-1.0)).negates_scores
    assert Feature.NEGATIVE_SCALE not in problem(128, 128, softmax_scale=0.0).features
    assert plan_forward(problem(128, 128, dtype=DType.FP16)).dtype is DType.FP16


def test_pipelines_count_one_arrival_a_consumer_warp_and_whole_stages(plans):
    for plan in plans:
        pipelines, size = forward_pipelines(plan), plan.dtype.itemsize
        assert set(pipelines) == {"q", "k", "v", "tile"}
        assert pipelines["q"].tx_bytes == plan.tile_m * plan.tile_hdim * size
        assert pipelines["k"].tx_bytes == plan.tile_n * plan.tile_hdim * size
        assert pipelines["v"].tx_bytes == plan.tile_n * plan.tile_hdimv * size
        for spec in pipelines.values():
            assert spec.consumer_arrivals == 4 * plan.consumer_warpgroups, plan
            assert spec.stages >= 1


def test_a_tile_that_cannot_fit_is_refused_with_the_arithmetic():
    with pytest.raises(CompileError, match=r"192x256.*more than \d+ bytes.*Q stages"):
        choose_buffers(Tile(192, 256), 256, 256, 2)


def test_a_register_sum_that_would_hang_the_gpu_is_refused_with_the_arithmetic():
    for warpgroups, (_, consumer) in REGISTERS.items():
        threads = WARPGROUP * (1 + warpgroups)
        at_launch = REGISTER_FILE // threads // 8 * 8
        most = at_launch * (1 + warpgroups) - consumer * warpgroups
        Roles(warpgroups, most, consumer).check_registers()
        with pytest.raises(CompileError, match=rf"registers wanted.*the launch allocates {at_launch} x {threads}"):
            Roles(warpgroups, most + 8, consumer).check_registers()


def test_rows_of_the_table_are_in_order_say_why_and_end_with_the_largest_head_dims():
    assert (ROWS[-1].hdim, ROWS[-1].hdimv) == (256, 256)
    areas = [row.hdim * row.hdimv for row in ROWS]
    assert areas == sorted(areas)
    assert all(row.why for row in ROWS)


def test_the_short_tile_is_taken_only_where_it_pads_fewer_rows_or_the_diagonal_weighs_more():
    for row, causal in product(ROWS, (False, True)):
        for seqlen in range(1, 6000):
            tile = choose_tile(row.hdim, row.hdimv, causal, seqlen)
            assert tile in (row.tile, row.short)
            if causal and row.short is not None and seqlen <= row.causal_short_to:
                assert tile == row.short
            elif tile == row.short:
                assert -(-seqlen // row.short.m) * row.short.m < -(-seqlen // row.tile.m) * row.tile.m
