"""The e4m3 forward kernel as compiled: every tile of every tuning row, under every mask, dense and ragged, with either form of
descales, and every output.

What the plan promises is looked up in the machine code: registers, no spills, the matrix instructions, the order in which a
warpgroup waits for them, TMA, and the register hand-over.
"""

import math
from itertools import product

import pytest
from compiled_kernels import check_registers
from fp8_plans import fp8_plan, fp8_plans
from machine_code import lines_of

from flash_hopper.compile.build import build
from flash_hopper.plan.forward_fp8 import SUM_COLUMNS, ForwardFp8Plan
from flash_hopper.plan.tables.forward_fp8 import ROWS
from flash_hopper.problem.dtypes import DType

LENGTHS = (4096, 16_384)
TUNED = [fp8_plan(d, lse=lse) for d, lse in product([row.hdimv for row in ROWS], (False, True))]
# registers are scarcest where masks, a ragged batch, descales of blocks and negated scores meet
HEAVY = fp8_plans([(64, 64), (128, 128), (256, 256)], LENGTHS, masks=("causal", "chunk"), negated=True)
WINDOWED = [fp8_plan(row.hdimv, mask="local", ragged=True, form="block") for row in ROWS]
UNEVEN = [fp8_plan(d, dv, mask="causal") for d, dv in ((64, 256), (256, 64), (192, 128), (112, 48))]
OTHER = [
    fp8_plan(64, lse=False, form="block"),
    fp8_plan(256, out=DType.FP16, form="block"),
    fp8_plan(128, mask="causal", accumulation="plain"),
    fp8_plan(256, accumulation="plain"),
]
PLANS = list(dict.fromkeys([*TUNED, *HEAVY, *WINDOWED, *UNEVEN, *OTHER]))
OVERLAPPING = fp8_plan(128, lse=False)

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)


def mma(columns: int) -> str:
    return f"QGMMA.64x{columns}x32.F32.E4M3.E4M3"


def products_of_a_block(plan: ForwardFp8Plan) -> dict[int, int]:
    """Columns of an instruction -> how many of them a block of keys takes."""
    values = plan.value_rows // plan.pieces
    found = {plan.tile_n: plan.tile_hdim // 32}
    found[values] = found.get(values, 0) + plan.pieces * plan.tile_n // 32
    return found | ({SUM_COLUMNS: plan.tile_n // 32} if plan.has_ones_apart else {})


def tile_of(tile) -> tuple[int, bool, int]:
    return (tile.tile_m if isinstance(tile, ForwardFp8Plan) else tile.m), tile.overlaps, tile.pieces


def test_the_plans_cover_every_tile_of_every_row_and_every_form():
    wanted = {tile_of(tile) for row in ROWS for tile in (row.tile, row.full, row.causal) if tile is not None}
    assert {tile_of(plan) for plan in PLANS} == wanted | {(128, False, 1)}  # head dim 128, ragged, descales of blocks
    forms = {(p.mask, p.is_ragged, p.descales) for p in PLANS}
    assert forms >= set(product(("causal", "chunk"), (False, True), ("scalar", "block")))
    assert {p.accumulation for p in PLANS} == {"two_level", "plain"}
    assert {p.out_dtype for p in PLANS} == {DType.BF16, DType.FP16}


@every_plan
def test_nothing_is_spilled_and_the_registers_of_the_launch_are_shared_out_once(plan, kernels):
    check_registers(plan, kernels.report(plan))


@every_plan
def test_products_are_e4m3_warpgroup_mmas_of_the_tile_with_float32_sums(plan, kernels):
    report = kernels.report(plan)
    found = {n: report.count(mma(n)) for n in products_of_a_block(plan)}
    # whole products only: in any order, as many instructions as a sum has steps
    steps = {n: plan.tile_hdim // 32 if n == plan.tile_n else plan.tile_n // 32 for n in found}
    if plan.value_rows // plan.pieces == plan.tile_n:  # both products are of this shape
        steps[plan.tile_n] = math.gcd(plan.tile_hdim // 32, plan.tile_n // 32)
    assert all(found[n] > 0 and found[n] % steps[n] == 0 for n in found)
    assert report.count("HGMMA") == 0
    assert report.count("QGMMA") == sum(found.values())


@every_plan
def test_a_steady_loop_holds_one_block_s_products(plan, kernels):
    wanted, loops = products_of_a_block(plan), kernels.loops(plan)
    assert loops
    for loop in loops:
        assert {n: sum(c for text, c in loop.items() if text.startswith(mma(n))) for n in wanted} == wanted


def test_values_are_waited_for_behind_the_maxima_of_the_next_scores_and_before_exponentials():
    (lines,) = lines_of([build(OVERLAPPING, artifacts=True).cubin])
    ((_, code),) = lines.items()
    text = [line.text for line in code]
    scores = next(i for i, line in enumerate(text) if "DEPBAR.LE gsb0, 0x1" in line)
    values = next(i for i, line in enumerate(text) if i > scores and "DEPBAR.LE gsb0, 0x0" in line)
    maxima = sum("VIMNMX3" in line for line in text[scores:values])
    assert maxima >= OVERLAPPING.tile_n // 4  # three at a time, of tile_n / 2 scores a thread
    # but for the factors of two rows whose reference moved
    assert sum("MUFU.EX2" in line for line in text[scores:values]) <= 2


@every_plan
def test_weights_are_rounded_four_to_a_register(plan, kernels):
    report = kernels.report(plan)
    assert report.count("F2FP.SATFINITE.E4M3") % (plan.tile_n // 4) == 0
    assert report.count("MUFU.EX2") >= plan.tile_n // 2


@every_plan
def test_all_tiles_travel_by_tma(plan, kernels):
    report = kernels.report(plan)
    rows = "5D" if plan.is_ragged else "4D"  # V^T starts whole blocks apart, and needs no fifth dimension
    assert report.count(f"UTMALDG.{rows}") >= 2 and report.count("UTMALDG.4D") >= 1
    assert report.count(f"UTMASTG.{rows}") == report.count("UTMASTG") >= 1


@every_plan
def test_every_kernel_waits_for_the_previous_one_and_releases_the_next(plan, kernels):
    report = kernels.report(plan)
    assert len(report.kernels) == 1 + plan.is_ragged
    assert min(report.counts("ACQBULK")) >= 1 and min(report.counts("PREEXIT")) >= 1


@every_plan
def test_tile_numbers_are_drawn_in_one_place_if_they_are_drawn_at_all(plan, kernels):
    assert kernels.report(plan).count("ATOMG") == (plan.scheduler == "dynamic")
