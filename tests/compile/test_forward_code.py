"""The forward kernel as compiled, for every tuning row, dtype and mask, and for every pair of padded head dims.

What the plan promises is looked up in the machine code: registers, no spills, the matrix instructions, TMA, and the
register hand-over. The launch is recorded in `test_forward_launch.py`.
"""

from itertools import product

import pytest

from flash_hopper.compile.presets import ALL_HEAD_DIMS, forward_plans
from flash_hopper.plan.forward import HDIM_STEP
from flash_hopper.plan.roles import REGISTER_FILE, roles_of
from flash_hopper.plan.tables.forward import ROWS
from flash_hopper.problem.attention import MAX_HEAD_DIM
from flash_hopper.problem.dtypes import DType

BF16 = (DType.BF16,)
TUNED = forward_plans([(row.hdim, row.hdimv) for row in ROWS], lse=(True,))
# the mask, the log-sum-exp and the dynamic scheduler need most registers
EVERY_PAIR = forward_plans(product(ALL_HEAD_DIMS, ALL_HEAD_DIMS), dtypes=BF16, causal=(True,), lse=(True,))
FLAGS = forward_plans([(128, 128)], dtypes=BF16, lse=(False, True), negative_scale=(False, True))
PLANS = list(dict.fromkeys([*TUNED, *EVERY_PAIR, *FLAGS]))

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)


def test_the_plans_cover_every_tile_of_every_row_and_every_pair_of_head_dims():
    tiles = {(p.tile_m, p.tile_n) for p in TUNED}
    assert tiles == {(t.m, t.n) for row in ROWS for t in (row.tile, row.short) if t is not None}
    assert {(p.tile_hdim, p.tile_hdimv) for p in PLANS} == set(product(ALL_HEAD_DIMS, ALL_HEAD_DIMS))
    assert max(ALL_HEAD_DIMS) == MAX_HEAD_DIM and len(ALL_HEAD_DIMS) == MAX_HEAD_DIM // HDIM_STEP


@every_plan
def test_nothing_is_spilled_and_ptxas_objects_to_nothing(plan, kernels):
    report = kernels.report(plan)
    assert report.ptxas.faults == []
    assert report.count("LDL") == report.count("STL") == 0


@every_plan
def test_the_launch_allocates_the_registers_that_the_roles_share_out(plan, kernels):
    threads = roles_of(plan).threads
    assert kernels.report(plan).ptxas.registers == REGISTER_FILE // threads // 8 * 8


@every_plan
def test_producer_and_consumers_reallocate_registers_once_each(plan, kernels):
    report = kernels.report(plan)
    assert report.count("USETMAXREG.DEALLOC") == report.count("USETMAXREG.TRY_ALLOC") == 1


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
    assert report.count("UTMALDG.4D") >= 3 and report.count("UTMASTG.4D") >= 1
    assert report.count("UTMALDG") == report.count("UTMALDG.4D")


@every_plan
def test_the_kernel_waits_for_the_previous_one_and_releases_the_next(plan, kernels):
    report = kernels.report(plan)
    assert report.count("ACQBULK") >= 1 and report.count("PREEXIT") >= 1


@every_plan
def test_exponentials_and_maxima_are_single_instructions(plan, kernels):
    report = kernels.report(plan)
    # S of one block: tile_n / 2 values a thread, each with one exponential
    assert report.count("MUFU.EX2") >= plan.tile_n // 2
    assert report.count("FMNMX") + report.count("VIMNMX3") > 0
