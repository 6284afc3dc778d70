"""The backward kernels as compiled: every padded head dim, full and causal, on both routes, head dims that differ, and
windows, chunks, ragged batches and sums in float32 with the largest head dims of every row of the tables.

What the plans promise is looked up in the machine code: registers, no spills, the matrix instructions, TMA, bulk
additions, the register hand-over, and the waits of programmatic launches. Shared memory is checked against the
limit while a kernel is compiled (`budget.check_shared_memory`), and here from the plan.
"""

from dataclasses import replace
from itertools import product

import pytest

from flash_hopper.compile.presets import ALL_HEAD_DIMS
from flash_hopper.kernels.backward_dkdv import storage as dkdv_storage
from flash_hopper.kernels.backward_dq import storage as dq_storage
from flash_hopper.plan.backward import (
    BackwardDkdvPlan,
    BackwardDqPlan,
    BackwardRequest,
    PostprocessPlan,
    PreprocessPlan,
    plan_backward,
)
from flash_hopper.plan.budget import SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.roles import REGISTER_FILE, backward_dkdv_pipelines, backward_dq_pipelines, roles_of
from flash_hopper.plan.tables.backward import DKDV_ROWS, DQ_ROWS, FUSED_ROWS
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged
from flash_hopper.testing.cases import case_of

SAME = [(d, d) for d in ALL_HEAD_DIMS]
# the corners, multi-head latent attention, and pairs that meet another row of a table than either head dim alone
DIFFERENT = [(192, 128), (64, 128), (128, 64), (64, 256), (256, 64), (32, 256), (256, 32), (64, 224), (160, 192)]
HALF = [(64, 64), (128, 128), (256, 256)]
ROWS = [(64, 64), (128, 128), (192, 192), (256, 256)]
MASKS = {"full": Mask(), "causal": Mask(right=0), "local": Mask(200, 100), "chunk": Mask(right=0, chunk=256)}


def backward_plans(dims, kind, *, dtype=DType.BF16, has_dlse=False, is_ragged=False, accumulates=False):
    """The plans of both routes, with equal and with grouped heads."""
    found = []
    ragged = Ragged(True, True, False, False, 2048, 2048, None, None) if is_ragged else None
    for is_deterministic, heads in product((False, True), ((2, 2), (2, 1))):
        request = BackwardRequest(True, True, has_dlse, is_deterministic, accumulates)
        problem = case_of(dims, (1024, 1024), False, heads=heads, dtype=dtype).problem()
        found += plan_backward(replace(problem, mask=MASKS[kind], ragged=ragged), request).kernels()
    return found


def every_plan():
    found = [plan for dims, kind in product(SAME, ("full", "causal")) for plan in backward_plans(dims, kind)]
    for dims in ROWS:
        found += backward_plans(dims, "local")
        found += backward_plans(dims, "chunk", is_ragged=True)
        found += backward_plans(dims, "causal", is_ragged=True, accumulates=True)
    for dims, kind in product(ROWS[:2], ("full", "causal")):
        found += backward_plans(dims, kind, is_ragged=True)
    found += backward_plans(ROWS[0], "local", accumulates=True)
    found += [plan for dims in DIFFERENT for plan in backward_plans(dims, "causal")]
    found += [plan for dims in HALF for plan in backward_plans(dims, "causal", dtype=DType.FP16)]
    with_dlse = [plan for dims in SAME for plan in backward_plans(dims, "full", has_dlse=True)]
    found += [plan for plan in with_dlse if isinstance(plan, PreprocessPlan)]
    return list(dict.fromkeys(found))


PLANS = every_plan()
DKDV, DQ, PRE, POST = (
    [plan for plan in PLANS if isinstance(plan, kind)]
    for kind in (BackwardDkdvPlan, BackwardDqPlan, PreprocessPlan, PostprocessPlan)
)


def each(plans):
    return pytest.mark.parametrize("plan", plans, ids=lambda p: p.name)


def test_the_plans_cover_every_head_dim_with_the_plain_masks_every_mask_and_every_row_of_the_tables():
    for plans in (DKDV, DQ):
        for kind, dims in (("full", SAME), ("causal", SAME), ("local", ROWS), ("chunk", ROWS)):
            met = {(p.tile_hdim, p.tile_hdimv) for p in plans if p.mask == kind and not getattr(p, "adds_dq", False)}
            assert set(dims) <= met
    assert set(DIFFERENT) <= {(p.tile_hdim, p.tile_hdimv) for p in DQ}
    own = {(p.tile_m, p.tile_n, p.q_stages, p.do_stages) for p in DKDV if not p.adds_dq}
    assert own == {(t.m, t.n, t.q_stages, t.do_stages) for *_, t in DKDV_ROWS}
    fused = {(p.tile_m, p.tile_n, p.q_stages, p.do_stages) for p in DKDV if p.adds_dq}
    assert fused == {(t.m, t.n, t.q_stages, t.do_stages) for *_, t in FUSED_ROWS}
    tiles = {(p.tile_m, p.tile_n, p.k_stages, p.v_stages) for p in DQ}
    assert tiles == {(t.m, t.n, t.k_stages, t.v_stages) for *_, full, masked in DQ_ROWS for t in (full, masked)}
    assert {p.has_dlse for p in PRE} == {p.cleared_hdim > 0 for p in PRE} == {False, True}
    assert {(p.tile_m, p.tile_hdim) for p in POST} >= {(p.tile_m, p.tile_hdim) for p in DKDV if p.adds_dq}
    assert {p.ragged_side for p in POST} == {"", "q", "k"}
    for plans in (DKDV, DQ, POST):
        assert {(p.is_ragged, p.accumulates) for p in plans} == set(product((False, True), repeat=2))
    assert {p.adds_dkdv for p in DKDV if p.adds_dq} == {False, True}


@each(PLANS)
def test_nothing_is_spilled_and_ptxas_objects_to_nothing(plan, kernels):
    report = kernels.report(plan)
    assert report.ptxas.faults == []
    assert report.count("LDL") == report.count("STL") == 0


@each(PLANS)
def test_every_kernel_waits_for_the_previous_one_and_releases_the_next(plan, kernels):
    report = kernels.report(plan)
    writes_table = plan.is_ragged and isinstance(plan, PreprocessPlan)
    assert len(report.kernels) == 1 + writes_table
    assert min(report.counts("ACQBULK")) >= 1 and min(report.counts("PREEXIT")) >= 1


@each([*DKDV, *DQ])
def test_the_launch_allocates_the_registers_that_the_roles_share_out(plan, kernels):
    report = kernels.report(plan)
    assert report.ptxas.registers == REGISTER_FILE // roles_of(plan).threads // 8 * 8
    assert report.count("USETMAXREG.DEALLOC") == report.count("USETMAXREG.TRY_ALLOC") == 1


@each([*DKDV, *DQ])
def test_shared_memory_stays_below_the_limit_and_holds_every_stage(plan):
    storage, pipelines = (
        (dkdv_storage, backward_dkdv_pipelines)
        if isinstance(plan, BackwardDkdvPlan)
        else (dq_storage, backward_dq_pipelines)
    )
    size = storage.shared_struct(plan).size_in_bytes()
    stages = sum(spec.stages * spec.tx_bytes for spec in pipelines(plan).values())
    assert stages <= size <= SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES


def products(report):
    """(columns, where the first operand lies) of all warpgroup MMAs with their number; all are 64 rows, k = 16."""
    found = {}
    for op, count in report.instructions.items():
        if op.startswith("HGMMA"):
            shape, operand = op.split(".")[1], op.rsplit(".", 1)[1]
            rows, columns, depth = map(int, shape.split("x"))
            assert (rows, depth) == (64, 16), op
            found[columns, operand] = found.get((columns, operand), 0) + count
    return found


def float32_sums(plan, report):
    kind = "F32.BF16" if plan.dtype is DType.BF16 else "F32"
    return report.count("HGMMA") == report.count(f"HGMMA.{kind}") > 0


@each(DKDV)
def test_the_products_of_the_key_parallel_kernel_are_whole_warpgroup_mmas(plan, kernels):
    """S and dP from shared memory, dK and dV with the left operand in registers, dQ, if at all, from shared memory; dP like dK
    if V is in registers."""
    report = kernels.report(plan)
    assert float32_sums(plan, report)
    found = products(report)
    scores, dk, dv, dq = (plan.tile_m, "SS"), (plan.tile_hdim, "RS"), (plan.tile_hdimv, "RS"), (64, "SS")
    dp = (plan.tile_m, "RS" if plan.v_in_registers else "SS")
    assert set(found) == {scores, dp, dk, dv} | ({dq} if plan.adds_dq else set())
    depth = {
        "s": plan.tile_hdim // 16,
        "dp": plan.tile_hdimv // 16,
        "grads": plan.tile_m // 16,
        "dq": plan.tile_n // 16,
    }
    assert found[dk] % depth["grads"] == found[dv] % depth["grads"] == 0
    from_shared = found[scores] + (found[dq] if plan.adds_dq and dq != scores else 0)
    expected = depth["s"] + (depth["dq"] if plan.adds_dq else 0)
    if plan.v_in_registers:
        assert dp not in (dk, dv) and found[dp] % depth["dp"] == 0
    else:
        expected += depth["dp"]
    assert from_shared >= expected


@each(DQ)
def test_the_products_of_the_query_parallel_kernel_are_whole_warpgroup_mmas(plan, kernels):
    report = kernels.report(plan)
    assert float32_sums(plan, report)
    found = products(report)
    scores, dq = (plan.tile_n, "SS"), (plan.tile_hdim, "RS")
    assert set(found) == {scores, dq}
    assert found[scores] % ((plan.tile_hdim + plan.tile_hdimv) // 16) == 0
    assert found[dq] % (plan.tile_n // 16) == 0


@each(DKDV)
def test_tiles_and_statistics_of_the_key_parallel_kernel_travel_by_tma(plan, kernels):
    report = kernels.report(plan)
    assert report.count("UTMALDG") >= 6  # Q, dO, K, V, LSE, D
    # the end of a sequence is one dimension more, but for the statistics
    assert report.count("UTMALDG.4D") + report.count("UTMALDG.5D") == report.count("UTMALDG")
    assert (report.count("UTMALDG.5D") >= 4) == plan.is_ragged
    assert report.count(f"UTMASTG.{4 + plan.is_ragged}D") == report.count("UTMASTG")
    assert (report.count("UTMASTG") >= 2) != (plan.adds_dkdv or plan.accumulates)
    assert report.count("UBLKCP") == 0
    # a bulk addition for each warpgroup's piece of dQ, and one for each 64 columns of its dK and dV
    pieces = plan.adds_dq + (plan.tile_hdim + plan.tile_hdimv) // 64 * plan.adds_dkdv
    assert report.count("UBLKRED.ADD.F32") == report.count("UBLKRED") == 2 * pieces
    assert report.count("UTMAREDG") == 0


@each(DQ)
def test_tiles_of_the_query_parallel_kernel_travel_by_tma_and_nothing_is_added_in_memory(plan, kernels):
    report = kernels.report(plan)
    dimensions = 4 + plan.is_ragged
    assert report.count(f"UTMALDG.{dimensions}D") == report.count("UTMALDG") >= 4
    assert report.count(f"UTMASTG.{dimensions}D") == report.count("UTMASTG")
    assert (report.count("UTMASTG") >= 1) != plan.accumulates
    assert report.count("UBLKRED") == report.count("UTMAREDG") == 0


@each([*DKDV, *DQ])
def test_the_only_atomic_is_that_of_the_dynamic_scheduler(plan, kernels):
    report = kernels.report(plan)
    assert report.count("ATOMG") == (1 if plan.scheduler == "dynamic" else 0)
    assert report.count("RED") == report.count("ATOM") == 0


@each([*DKDV, *DQ, *POST])
def test_values_that_a_caller_sums_up_are_loaded_and_stored_once_each_by_their_thread(plan, kernels):
    report = kernels.report(plan)
    finished = 64 if isinstance(plan, PostprocessPlan) else plan.tile_hdim
    finished += plan.tile_hdimv if isinstance(plan, BackwardDkdvPlan) else 0
    values = finished // 2 if plan.accumulates else 0  # half a value of each column a thread
    resets = getattr(plan, "scheduler", "static") == "dynamic" and not plan.is_ragged  # of the counter of tiles
    assert report.count("STG") == values + resets
    assert report.count("LDG") >= values
    assert report.count("REDG") == 0


@each([*DKDV, *DQ, *POST])
def test_arithmetic_does_not_take_subnormal_numbers_for_zero(plan, kernels):
    instructions = kernels.report(plan).instructions
    assert not [op for op in instructions if op.split(".")[0] in ("FADD", "FMUL", "FFMA") and "FTZ" in op.split(".")]


@each([*DKDV, *DQ])
def test_each_probability_takes_one_exponential(plan, kernels):
    report = kernels.report(plan)
    columns = plan.tile_n if isinstance(plan, BackwardDqPlan) else plan.tile_m
    # 64 x columns values a warpgroup; the code of a block is there up to three times: the first, masked ones, the others
    assert report.count("MUFU.EX2") in (columns // 2, columns, columns // 2 * 3)


def has(loop, *parts):
    """Instructions of a loop whose mnemonics have these parts."""
    return sum(n for op, n in loop.items() if set(parts) <= set(op.split(".")))


@each([*DKDV, *DQ])
def test_what_a_failed_wait_does_is_in_no_inner_loop(plan, kernels):
    loops = kernels.loops(plan)
    assert loops and not any(has(loop, "NANOSLEEP") for loop in loops)


@each([plan for plan in [*DKDV, *DQ] if not getattr(plan, "splits_roles", False)])
def test_the_loop_over_whole_blocks_comes_first_and_has_no_mask(plan, kernels):
    """First, because ptxas makes the 64-bit descriptors of a later one from halves, with a carry."""
    loop, *others = kernels.loops(plan)
    assert has(loop, "FSEL") == 0
    masked = 1 if isinstance(plan, BackwardDqPlan) or plan.adds_dq or plan.mask != "full" else 0
    assert len(others) == masked and all(has(other, "FSEL") > 0 for other in others)
    assert all(has(loop, "UIADD3", "X") <= has(other, "UIADD3", "X") for other in others)


@each(PRE)
def test_preprocess_reads_and_clears_16_bytes_at_a_time_and_needs_no_matrix_instruction(plan, kernels):
    report = kernels.report(plan)
    assert report.count("LDG.128") >= 2  # out and dout
    stores = dict(zip(report.kernels, report.counts("STG.128"), strict=True))
    (own,) = (count for name, count in stores.items() if "ScheduleKernel" not in name)
    assert (own > 0) == (plan.cleared_hdim > 0)
    assert report.count("HGMMA") == report.count("USETMAXREG") == report.count("UTMALDG") == 0
    assert report.count("SHFL") > 0


@each(POST)
def test_postprocess_reads_16_bytes_at_a_time_and_stores_by_tma(plan, kernels):
    report = kernels.report(plan)
    assert report.count("LDG.128") >= 8  # 32 values a thread
    assert report.count("UTMASTG") == (0 if plan.accumulates else 1)
    assert report.count(f"UTMASTG.{4 + plan.is_ragged}D") == report.count("UTMASTG")
    assert report.count("HGMMA") == report.count("USETMAXREG") == report.count("UTMALDG") == 0
