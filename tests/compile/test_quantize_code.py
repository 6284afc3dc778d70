"""The quantise kernel as compiled: every head dim and every kind of work, without spills, with 16-byte accesses throughout."""

from itertools import product

import pytest

from flash_hopper.geometry.strips import CODE_COLUMNS, STRIP, hadamard_block
from flash_hopper.kernels.quantize.strips import HIGH_BYTES, HIGH_HALVES, LOW_BYTES, LOW_HALVES
from flash_hopper.plan.budget import SMEM_LIMIT_BYTES, SMEM_RESERVED_BYTES
from flash_hopper.plan.quantize import TABLE_BYTES, plan_quantize, reorder_plan
from flash_hopper.problem.dtypes import DType

HEAD_DIMS = tuple(range(16, 257, 16))
MAIN_DIMS = (64, 128, 256)


def plan_of(head_dim, purpose="block", dtype=DType.BF16, **changes):
    return plan_quantize(dtype, head_dim, purpose, **changes)


def transformed(head_dim, purpose="block", dtype=DType.BF16, **changes):
    return plan_of(head_dim, purpose, dtype, hadamard=hadamard_block(head_dim), has_signs=True, **changes)


RAGGED = {"is_ragged": True, "has_seqused": True}
PLAIN = [plan_of(d) for d in HEAD_DIMS] + [plan_of(d, is_transposed=True, **RAGGED) for d in HEAD_DIMS]
TRANSFORMED = [transformed(d) for d in HEAD_DIMS]
PURPOSES = [transformed(d, purpose, **RAGGED) for d, purpose in product(MAIN_DIMS, ("absmax", "scaled"))]
PURPOSES += [transformed(d, "transform") for d in (64, 96, 128, 256)]
TURNED = [
    transformed(d, dtype=dtype, rotary=kind, rotary_dim=part, has_wide_table=wide, has_offsets=True, **RAGGED)
    for (d, part), kind, (dtype, wide) in product(
        ((64, 64), (80, 32), (128, 128), (192, 128), (240, 240), (256, 64)),
        ("interleaved", "halves"),
        ((DType.BF16, False), (DType.FP16, True)),
    )
]
OTHER_DTYPES = [transformed(d, dtype=dtype) for d, dtype in product((16, 80, *MAIN_DIMS), (DType.FP16, DType.FP32))]
OTHER_DTYPES += [plan_of(d, dtype=DType.FP32, is_transposed=True) for d in MAIN_DIMS]
# Angles in float32 leave the fewest registers: ptxas has to turn one piece after the other
FLOAT32_ANGLES = [
    transformed(
        d, purpose, dtype, rotary=kind, rotary_dim=d, has_wide_table=dtype is not DType.FP32, has_offsets=True, **ragged
    )
    for d, purpose, dtype, kind, ragged in (
        (16, "block", DType.BF16, "halves", {}),
        (16, "scaled", DType.FP32, "halves", {}),
        (32, "scaled", DType.BF16, "halves", {}),
        (48, "absmax", DType.FP16, "halves", RAGGED),
        (64, "block", DType.BF16, "halves", {}),
        (64, "absmax", DType.FP32, "halves", RAGGED),
        (128, "scaled", DType.BF16, "halves", RAGGED),
        (256, "absmax", DType.BF16, "halves", RAGGED),
        (256, "scaled", DType.FP32, "halves", RAGGED),
        (256, "block", DType.FP32, "interleaved", {}),
        (256, "scaled", DType.FP32, "interleaved", {}),
    )
]
REORDERED = [reorder_plan(d, is_ragged=False, has_seqused=False) for d in HEAD_DIMS]
REORDERED += [
    reorder_plan(d, ragged, used)
    for d, (ragged, used) in product(MAIN_DIMS, ((True, False), (True, True), (False, True)))
]
PLANS = list(dict.fromkeys([*PLAIN, *TRANSFORMED, *PURPOSES, *TURNED, *FLOAT32_ANGLES, *OTHER_DTYPES, *REORDERED]))

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)


def test_names_are_as_many_as_plans():
    assert len({plan.name for plan in PLANS}) == len(PLANS)


@every_plan
def test_nothing_is_spilled_and_ptxas_objects_to_nothing(plan, kernels):
    report = kernels.report(plan)
    assert report.ptxas.faults == []
    assert report.count("LDL") == report.count("STL") == 0


@every_plan
def test_the_ctas_of_an_sm_have_the_registers_and_the_memory(plan, kernels):
    assert kernels.report(plan).ptxas.registers * plan.threads * plan.ctas_per_sm <= 65536
    assert (
        plan.ctas_per_sm * (plan.stages * plan.block_bytes + TABLE_BYTES + SMEM_RESERVED_BYTES)
        <= SMEM_LIMIT_BYTES + 1024
    )


@pytest.mark.parametrize("plan", [p for p in (*PLAIN, *TRANSFORMED) if p.strip == STRIP], ids=lambda p: p.name)
def test_registers_are_left_for_a_ptxas_of_another_version(plan, kernels):
    """One that hoisted more out of the loop spilled 8 to 48 bytes where this one used all 128."""
    limit = 65536 // (plan.threads * plan.ctas_per_sm)
    assert kernels.report(plan).ptxas.registers <= min(limit, 128) - 14


@every_plan
def test_the_input_is_loaded_and_the_result_stored_16_bytes_at_a_time(plan, kernels):
    report = kernels.report(plan)
    chunks = plan.strip * plan.dtype.itemsize // 16
    assert report.count("LDGSTS") == report.count("LDGSTS.128") == chunks * max(plan.stages, 1)
    wide = {"absmax": 0, "transform": chunks}.get(plan.purpose, plan.strip // 16)
    assert report.count("STG.128") == wide
    passes_over = plan.is_ragged and not plan.is_transposed  # blocks without rows, which have a scale all the same
    assert report.count("STG") <= wide + 1 + passes_over


@pytest.mark.parametrize("plan", [*TRANSFORMED, *PLAIN], ids=lambda p: p.name)
def test_the_transform_takes_its_sums_and_no_more_shuffles_than_lanes_share_a_block(plan, kernels):
    report = kernels.report(plan)
    lanes = max(1, plan.hadamard // plan.strip)
    reduction = 5  # of the largest magnitude over a warp
    each = plan.strip // 2 if plan.exchanges else plan.strip
    assert report.count("SHFL.BFLY") == each * (lanes.bit_length() - 1) + reduction
    assert report.count("F2FP.E4M3") == plan.strip // 2
    if plan.hadamard:
        own = min(plan.hadamard, plan.strip).bit_length() - 1
        multiplying = 1 + plan.exchanges  # the first step by 1 / n, the last one before an exchange by signs
        assert report.count("FADD") >= plan.strip * (own - multiplying)
        assert report.count("FADD") + report.count("FFMA") >= plan.strip * (plan.hadamard.bit_length() - 1)


@pytest.mark.parametrize("plan", REORDERED, ids=lambda p: p.name)
def test_codes_are_moved_and_never_computed(plan, kernels):
    report = kernels.report(plan)
    assert report.count("F2FP") == report.count("FMUL") == report.count("FADD") == report.count("FFMA") == 0
    assert report.count("STS") >= CODE_COLUMNS and report.count("LDS.128") >= STRIP // CODE_COLUMNS


def permuted(low, high, selector):
    """prmt of two words, each a list of bytes."""
    return [(low + high)[selector >> 4 * i & 7] for i in range(4)]


def test_four_permutations_gather_the_bytes_of_each_column():
    words = [[(key, column) for column in range(4)] for key in "abcd"]
    for j, pairs in ((0, LOW_BYTES), (2, HIGH_BYTES)):
        low, high = permuted(*words[:2], pairs), permuted(*words[2:], pairs)
        for i, halves in ((0, LOW_HALVES), (1, HIGH_HALVES)):
            assert permuted(low, high, halves) == [(key, j + i) for key in "abcd"]


@every_plan
def test_it_waits_for_the_kernel_before_and_releases_the_next(plan, kernels):
    report = kernels.report(plan)
    assert report.count("ACQBULK") == report.count("PREEXIT") == 1
