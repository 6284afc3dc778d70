"""Reading the machine code of many kernels at once gives what the package finds in each."""

from machine_code import instructions_of
from standin_kernels import ScalePlan, trace

from flash_hopper.compile.build import build
from flash_hopper.compile.inspect import examine
from flash_hopper.compile.presets import forward_plans
from flash_hopper.problem.dtypes import DType


def test_kernels_read_together_have_the_instructions_of_kernels_read_one_by_one():
    (plan, *_) = forward_plans([(32, 32)], dtypes=(DType.BF16,), mask=("causal",), lse=(True,))
    kernels = [build(ScalePlan(3), trace, artifacts=True), build(plan, artifacts=True)]
    kernels.append(build(ScalePlan(4, "spill"), trace, artifacts=True, strict=False))
    assert instructions_of([built.cubin for built in kernels]) == [examine(built).instructions for built in kernels]
