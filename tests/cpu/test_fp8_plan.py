"""Every e4m3 request gets a plan that fits shared memory, registers and barriers, with the tile that was measured for it."""

from dataclasses import replace
from itertools import product

import pytest
from fp8_plans import MASKS, fp8_plan, fp8_plans, fp8_problem

from flash_hopper.plan.budget import SMEM_BARRIER_BYTES, SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.forward_fp8 import SUM_COLUMNS, ForwardFp8Plan, padded_head_dim, plan_forward_fp8
from flash_hopper.plan.roles import REGISTER_FILE, WARPGROUP, forward_pipelines, roles_of
from flash_hopper.plan.tables.forward_fp8 import OVERLAP, ROWS, TILE_N, Fp8Demand, choose_fp8_tile
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import CompileError
from flash_hopper.problem.fp8 import FP8_BLOCK, FP8_HEAD_DIM_STEP

HEAD_DIMS = range(FP8_HEAD_DIM_STEP, 257, FP8_HEAD_DIM_STEP)
LENGTHS = (1, 128, 129, 1024, 8192, 16_384)
COLUMN_REGISTERS = 0.5  # of a thread, for a column of 64 float32 sums


@pytest.fixture(scope="module")
def plans():
    found = fp8_plans(product(HEAD_DIMS, HEAD_DIMS), (16_384,), masks=("full", "local"))
    dims = [(row.hdimv, row.hdimv) for row in ROWS]
    found += fp8_plans(dims, LENGTHS) + fp8_plans(dims, LENGTHS, lse=False)
    found += fp8_plans(dims, (16_384,), accumulation="plain") + fp8_plans(dims, (1024,), out=DType.FP16)
    return list(dict.fromkeys(found))


def buffer_bytes(plan: ForwardFp8Plan) -> int:
    """What the tensors of a plan take."""
    q, o = plan.tile_m * plan.tile_hdim, plan.tile_m * plan.tile_hdimv * plan.out_dtype.itemsize
    rows = max(q, o) * plan.q_stages if plan.o_place == "q" else q * plan.q_stages + o
    keys = plan.tile_n * (plan.tile_hdim + plan.value_rows) * plan.kv_stages
    return rows + keys + SUM_COLUMNS * plan.tile_n * plan.has_ones_apart


def test_every_pair_of_head_dims_fits_shared_memory(plans):
    for plan in plans:
        assert buffer_bytes(plan) <= SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES, plan.name
        assert plan.kv_stages >= 2, plan.name


def test_every_plan_fits_the_register_file(plans):
    for plan in plans:
        roles = roles_of(plan)
        asked = WARPGROUP * (roles.producer_registers + roles.consumer_warpgroups * roles.consumer_registers)
        assert asked <= REGISTER_FILE // roles.threads // 8 * 8 * roles.threads, plan.name
        piece = plan.value_rows / plan.pieces * plan.is_two_level
        sums = piece * min(plan.pieces, 2) + SUM_COLUMNS * plan.has_ones_apart
        scores, weights = plan.tile_n * COLUMN_REGISTERS, plan.tile_n // 8
        beside = sums * COLUMN_REGISTERS + weights  # products of weights
        held = scores + beside if plan.overlaps else max(scores, beside)
        held += plan.tile_hdimv * COLUMN_REGISTERS
        assert held < roles.consumer_registers, plan.name


def test_barriers_count_the_bytes_of_each_load(plans):
    for plan in plans:
        specs = forward_pipelines(plan)
        assert specs["q"].tx_bytes == plan.tile_m * plan.tile_hdim, plan.name
        assert specs["k"].tx_bytes == plan.tile_n * plan.tile_hdim, plan.name
        assert specs["v"].tx_bytes == plan.tile_n * plan.tile_hdimv, plan.name


def test_a_key_block_has_one_descale_and_one_row_of_the_widest_swizzle(plans):
    assert TILE_N == FP8_BLOCK == 128
    assert {plan.tile_n for plan in plans} == {TILE_N}


def test_a_warpgroups_rows_lie_in_one_block_of_query_descales(plans):
    assert FP8_BLOCK % 64 == 0
    assert all(plan.tile_m % 64 == 0 for plan in plans)


def test_pieces_are_whole_steps_of_the_instruction(plans):
    for plan in plans:
        assert plan.value_rows % plan.pieces == 0, plan.name
        assert plan.value_rows // plan.pieces % 8 == 0, plan.name
        assert plan.value_rows // plan.pieces <= 256, plan.name


def test_row_sums_are_as_short_as_the_sums_of_values(plans):
    for plan in plans:
        assert plan.has_sum_columns == plan.is_two_level, plan.name
        assert plan.has_ones_apart == (plan.is_two_level and plan.pieces > 1), plan.name


def test_pieces_that_overlap_are_refused():
    plan = fp8_plan(256)
    assert plan.pieces > 1
    with pytest.raises(CompileError, match="pieces"):
        replace(plan, overlaps=True)


def test_weights_ahead_of_a_pv_that_does_not_overlap_are_refused(plans):
    assert any(plan.weights_ahead for plan in plans)
    for plan in plans:
        assert plan.overlaps or not plan.weights_ahead, plan.name
        assert 0 <= plan.weights_ahead < 16, plan.name
        if not plan.overlaps:
            with pytest.raises(CompileError, match="ahead"):
                replace(plan, weights_ahead=4)


def test_head_dims_are_padded_to_whole_instructions():
    for size in HEAD_DIMS:
        padded = padded_head_dim(size)
        assert padded % 32 == 0 and padded >= max(size, 64)
        assert padded - size < 32 or padded == 64


def test_names_tell_plans_apart(plans):
    assert len({plan.name for plan in plans}) == len(plans)


def demand(mask="full", seqlen_q=16_384, *, is_ragged=False, has_units=False, is_lean=True) -> Fp8Demand:
    return Fp8Demand(mask, seqlen_q, is_ragged, has_units, is_lean)


def test_lean_full_attention_takes_the_row_s_tile_for_it_unless_it_pads_too_much():
    row = ROWS[0]
    assert choose_fp8_tile(64, 64, demand()) == row.full
    assert choose_fp8_tile(64, 64, demand(seqlen_q=row.full.m)) == row.full
    assert choose_fp8_tile(64, 64, demand(seqlen_q=row.full.m // 2)) == row.causal
    assert choose_fp8_tile(64, 64, demand(seqlen_q=row.full.m + 1)) == row.causal


@pytest.mark.parametrize("mask", MASKS)
def test_everything_else_takes_the_row_s_tiles_by_length(mask):
    row = ROWS[0]
    for is_ragged, is_lean in product((False, True), repeat=2):
        if mask == "full" and is_lean and not is_ragged:
            continue
        short = demand(mask, row.causal_to, is_ragged=is_ragged, is_lean=is_lean)
        assert choose_fp8_tile(64, 64, short) == row.causal
        assert choose_fp8_tile(64, 64, short._replace(seqlen_q=row.causal_to + 1)) == row.tile


def test_windows_are_measured_by_what_they_reach():
    assert fp8_plan(64, mask="local", length=1024, lse=False).tile_m == ROWS[0].causal.m
    assert fp8_plan(64, mask="local", length=16_384, lse=False).tile_m == ROWS[0].tile.m


@pytest.mark.parametrize("mask", MASKS)
def test_ragged_batches_with_block_descales_at_head_dim_128_do_not_overlap(mask):
    for is_ragged, has_units in product((False, True), repeat=2):
        tile = choose_fp8_tile(128, 128, demand(mask, is_ragged=is_ragged, has_units=has_units))
        assert tile.overlaps == (not (is_ragged and has_units))
        assert replace(tile, overlaps=True, weights_ahead=0) == OVERLAP
        assert bool(tile.weights_ahead) == (not has_units)


def test_plain_accumulation_sums_in_the_tensor_core():
    plan = fp8_plan(256, accumulation="plain")
    assert not plan.is_two_level and not plan.has_sum_columns and plan.value_rows == plan.tile_hdimv
    assert plan.overlaps and plan.pieces == 1


def test_what_the_caller_asked_is_in_the_plan():
    p = fp8_problem(128, mask="causal", ragged=True, negated=True)
    plan = plan_forward_fp8(p, DType.FP16, "block")
    assert (plan.out_dtype, plan.descales, plan.mask) == (DType.FP16, "block", "causal")
    assert plan.is_ragged and plan.has_lse and plan.negates_scores and plan.scheduler == "dynamic"
    assert not plan.shares_tiles and not plan.has_pingpong
