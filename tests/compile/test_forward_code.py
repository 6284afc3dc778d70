"""The forward kernel as compiled: every tile of every tuning row under every mask, dense and ragged, and every pair of padded
head dims.

What the plan promises is looked up in the machine code: registers, no spills, the matrix instructions, TMA, and the
register hand-over. The launch is recorded in `test_forward_launch.py`.
"""

from itertools import product

import pytest
from compiled_kernels import check_registers

from flash_hopper.compile.presets import ALL_HEAD_DIMS, forward_plans
from flash_hopper.plan.budget import choose_layout
from flash_hopper.plan.forward import HDIM_STEP
from flash_hopper.plan.tables.forward import ANY, CHUNK_MAX_M, ROWS
from flash_hopper.problem.attention import MAX_HEAD_DIM
from flash_hopper.problem.dtypes import DType

BF16 = (DType.BF16,)
MASKS = ("full", "causal", "local", "chunk")
ROW_DIMS = [(row.hdim, row.hdimv) for row in ROWS]
TUNED = forward_plans(ROW_DIMS, lse=(True,))
MASKED = forward_plans(ROW_DIMS, dtypes=BF16, mask=("local", "chunk"), lse=(True,))
RAGGED = forward_plans(ROW_DIMS, dtypes=BF16, mask=MASKS, ragged=(True,), lse=(True,))
# the mask, the log-sum-exp and the dynamic scheduler need most registers
EVERY_PAIR = forward_plans(product(ALL_HEAD_DIMS, ALL_HEAD_DIMS), dtypes=BF16, mask=("causal",), lse=(True,))
# O in the stage of a Q of another size
UNEVEN = [
    p for p in forward_plans([(96, 128), (128, 96)], dtypes=BF16, mask=("local",), lse=(True,)) if p.o_place == "q"
]
FLAGS = forward_plans([(64, 64), (128, 128)], dtypes=BF16, lse=(False, True), negative_scale=(False, True))
FLAGS += forward_plans(
    [(64, 64), (128, 128)], dtypes=(DType.FP16,), mask=("local",), ragged=(True,), lse=(False,), negative_scale=(True,)
)
PLANS = list(dict.fromkeys([*TUNED, *MASKED, *RAGGED, *EVERY_PAIR, *UNEVEN, *FLAGS]))

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)


def test_the_plans_cover_every_tile_of_every_row_every_mask_and_layout_and_every_pair_of_head_dims():
    for row, mask in product(ROWS, MASKS):
        of_row = [p for p in PLANS if (p.tile_hdim, p.tile_hdimv) == (row.hdim, row.hdimv) and p.mask == mask]
        dense, ragged = ({p for p in of_row if p.is_ragged == is_ragged and p.has_lse} for is_ragged in (False, True))
        steps = row.full if mask == "full" else row.masked
        if mask == "local" and row.windows:
            steps = row.windows if row.windows[-1][0] == ANY else (*row.windows, *row.masked)
        wanted = [tile for _, tile in steps if suits(tile, mask)]
        if mask == "full" and row.spare is not None:
            wanted.append(row.spare)
        assert {layout_of(row, tile) for tile in wanted} == {p.layout for p in dense}, (row, mask)
        assert {p.shares_tiles for p in ragged} == {False, True}, (row, mask)
        longest = (row.full if mask == "full" else row.masked)[-1][1]
        for tile in (row.ragged, longest):
            assert tile is None or not suits(tile, mask) or layout_of(row, tile) in {p.layout for p in ragged}, mask
    assert {(p.tile_hdim, p.tile_hdimv) for p in PLANS} == set(product(ALL_HEAD_DIMS, ALL_HEAD_DIMS))
    assert max(ALL_HEAD_DIMS) == MAX_HEAD_DIM and len(ALL_HEAD_DIMS) == MAX_HEAD_DIM // HDIM_STEP
    assert len(UNEVEN) == 2


def suits(tile, mask):
    return mask != "chunk" or tile.m * tile.streams <= CHUNK_MAX_M


def layout_of(row, tile):
    return choose_layout(tile, row.hdim, row.hdimv, 2)


@every_plan
def test_nothing_is_spilled_and_the_registers_of_the_launch_are_shared_out_once(plan, kernels):
    check_registers(plan, kernels.report(plan))


@every_plan
def test_both_products_are_warpgroup_mmas_of_the_tile_with_float32_sums(plan, kernels):
    report = kernels.report(plan)
    kind = "F32.BF16" if plan.dtype is DType.BF16 else "F32"
    scores, values = f"HGMMA.64x{plan.tile_n}x16.{kind}.SS", f"HGMMA.64x{plan.tile_hdimv}x16.{kind}.RS"
    # whole products only: one instruction for 16 elements of the sum
    assert report.count(scores) > 0 and report.count(scores) % (plan.tile_hdim // 16) == 0
    assert report.count(values) > 0 and report.count(values) % (plan.tile_n // 16) == 0
    assert report.count("HGMMA") == report.count(scores) + report.count(values)


@every_plan
def test_all_tiles_travel_by_tma(plan, kernels):
    report = kernels.report(plan)
    rank = "5D" if plan.is_ragged else "4D"
    assert report.count(f"UTMALDG.{rank}") >= 3 and report.count(f"UTMASTG.{rank}") >= 1
    assert report.count("UTMALDG") == report.count(f"UTMALDG.{rank}")
    assert report.count("UTMASTG") == report.count(f"UTMASTG.{rank}")


@every_plan
def test_every_kernel_waits_for_the_previous_one_and_releases_the_next(plan, kernels):
    report = kernels.report(plan)
    writes_table = plan.is_ragged
    assert len(report.kernels) == 1 + writes_table
    assert min(report.counts("ACQBULK")) >= 1 and min(report.counts("PREEXIT")) >= 1


@every_plan
def test_exponentials_and_maxima_are_single_instructions(plan, kernels):
    report = kernels.report(plan)
    # S of one block: tile_n / 2 values a thread, each with one exponential
    assert report.count("MUFU.EX2") >= plan.tile_n // 2
    assert report.count("FMNMX") + report.count("VIMNMX3") > 0


@every_plan
def test_tile_numbers_are_drawn_in_one_place_if_they_are_drawn_at_all(plan, kernels):
    assert kernels.report(plan).count("ATOMG") == (plan.scheduler == "dynamic")
