"""Plans whose CTAs compute two tiles beside each other, as compiled: every mask and layout of the batch, stages, turns, head dims.

The tables have some of them, `tune` tries all. What those of the tables share with other plans is claimed in `test_forward_code.py`; the
launch is recorded in `test_forward_launch.py`, barriers are counted in `test_stream_barriers.py`.
"""

from dataclasses import replace

import pytest
from compiled_kernels import check_registers

from flash_hopper.compile.presets import forward_plans
from flash_hopper.plan.budget import layout_fault
from flash_hopper.plan.candidates import candidates
from flash_hopper.plan.roles import forward_pipelines
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.tune import with_lse

TILE = {"tile_m": 128, "tile_n": 64, "q_stages": 2, "kv_stages": 4, "o_place": "apart", "streams": 2}


def plans_of(mask, is_ragged=False, dtype=DType.BF16, dims=(64, 64), is_negative=False, **changes):
    """Plans with this tile that differ in whether heads share them, if at all."""
    cells = {
        "dtypes": (dtype,),
        "mask": (mask,),
        "ragged": (is_ragged,),
        "lse": (True,),
        "negative_scale": (is_negative,),
    }
    return [replace(plan, **(TILE | changes)) for plan in forward_plans([dims], **cells)]


PLANS = [
    *(p for mask in ("full", "causal", "local") for p in plans_of(mask) + plans_of(mask, True)),
    *plans_of("full", has_pingpong=False, kv_stages=3),
    *plans_of("causal", has_pingpong=False, q_stages=1, kv_stages=5),
    *plans_of("local", dtype=DType.FP16, is_negative=True, kv_stages=3, has_pingpong=True),
    *plans_of("causal", True, DType.FP16, is_negative=True),
    *plans_of("causal", dims=(64, 32)),
    *plans_of("causal", dims=(32, 64)),
    *plans_of("causal", dims=(96, 64), kv_stages=3, o_place="q"),
    *plans_of("chunk", tile_m=64, has_pingpong=False),
    *plans_of("causal", dims=(128, 128), tile_m=64, tile_n=80, q_stages=1, kv_stages=2, has_pingpong=False),
]
PLANS = list(dict.fromkeys(PLANS))
every_plan = pytest.mark.parametrize("plan", PLANS, ids=lambda p: p.name)


def test_the_plans_have_two_streams_fit_and_cover_masks_layouts_and_who_shares_tiles():
    for plan in PLANS:
        assert plan.streams == 2
        assert layout_fault(plan.layout, plan.tile_hdim, plan.tile_hdimv, plan.dtype.itemsize, plan.mask) is None
    tall = {(p.mask, p.is_ragged, p.shares_tiles) for p in PLANS if p.tile_m == 128}
    masks = ("full", "causal", "local")
    assert tall >= {(mask, *kind) for mask in masks for kind in ((False, False), (True, False), (True, True))}


@pytest.mark.parametrize("options", [{}, {"left": 1000}, {"lengths": "zipf"}], ids=str)
def test_tune_tries_them(options):
    problem = BenchShape("tune", DType.BF16, 64, 64, True, 4096, 4096, 1, 1, 1, **options).problem
    tried = list(map(with_lse, candidates(problem)))
    for kv_stages in (3, 4):
        assert replace(tried[0], **(TILE | {"kv_stages": kv_stages})) in tried


@every_plan
def test_nothing_is_spilled_and_the_registers_of_the_launch_are_shared_out_once(plan, kernels):
    check_registers(plan, kernels.report(plan))


@every_plan
def test_each_stream_has_barriers_of_its_own_and_all_are_initialised(plan, kernels):
    stages = sum(spec.stages for spec in forward_pipelines(plan).values())
    of_forward = max(kernels.report(plan).counts("SYNCS.EXCH"))
    assert of_forward == plan.streams * 2 * stages, "a full and an empty one a stage"


@every_plan
def test_the_code_is_that_of_one_stream_and_not_copied_for_each(plan, kernels):
    one, two = (kernels.report(replace(plan, streams=streams)) for streams in (1, 2))
    for op in ("HGMMA", "UTMALDG", "UTMASTG", "ATOMG", "MUFU.EX2"):
        assert two.count(op) == one.count(op), op
