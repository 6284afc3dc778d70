"""Layouts that no row of the tables has, but that `tune` may try: they compile to what their plan says."""

import pytest

from flash_hopper.plan.budget import Layout
from flash_hopper.plan.candidates import candidates
from flash_hopper.plan.forward import plan_with
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.tune import with_lse

DENSE = BenchShape("tune", DType.BF16, 64, 64, True, 4096, 4096, 1, 1, 1)
PACKED = BenchShape("tune", DType.BF16, 128, 128, False, 4096, 4096, 1, 1, 1, lengths="equal")
# one warpgroup with the widest and with the narrowest steps, the most stages, O in the stages of Q where there would be room, three
# stages of keys with one of queries
UNUSUAL = [
    (DENSE, Layout(64, 256, False, 2, 2, "apart")),
    (DENSE, Layout(64, 32, False, 1, 8, "q")),
    (DENSE, Layout(128, 64, True, 2, 2, "q")),
    (PACKED, Layout(128, 80, True, 1, 3, "apart")),
]
PLANS = [with_lse(plan_with(shape.problem, layout)) for shape, layout in UNUSUAL]

every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)


def test_the_plans_are_candidates():
    for (shape, _), plan in zip(UNUSUAL, PLANS, strict=True):
        assert plan in map(with_lse, candidates(shape.problem))


@every_plan
def test_nothing_is_spilled_and_both_products_are_those_of_the_tile(plan, kernels):
    report = kernels.report(plan)
    assert report.ptxas.faults == []
    assert report.count("LDL") == report.count("STL") == 0
    scores, values = f"HGMMA.64x{plan.tile_n}x16.F32.BF16.SS", f"HGMMA.64x{plan.tile_hdimv}x16.F32.BF16.RS"
    assert report.count(scores) > 0 and report.count(values) > 0
    assert report.count("HGMMA") == report.count(scores) + report.count(values)
