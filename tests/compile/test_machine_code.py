"""Reading the machine code of many kernels at once gives what the package finds in each."""

from machine_code import count, lines_of
from standin_kernels import ScalePlan, trace

from flash_hopper.compile.build import build
from flash_hopper.compile.inspect import examine
from flash_hopper.compile.presets import forward_plans
from flash_hopper.problem.dtypes import DType


def test_kernels_read_together_have_the_instructions_of_kernels_read_one_by_one():
    plans = forward_plans([(32, 32)], dtypes=(DType.BF16,), mask=("causal",), ragged=(False, True), lse=(True,))
    one_kernel, two_kernels = (next(p for p in plans if p.is_ragged == is_ragged) for is_ragged in (False, True))
    kernels = [build(ScalePlan(3), trace, artifacts=True)]
    kernels += [build(plan, artifacts=True) for plan in (one_kernel, two_kernels)]
    kernels.append(build(ScalePlan(4, "spill"), trace, artifacts=True, strict=False))
    codes = lines_of([built.cubin for built in kernels])
    found = [{name: count(lines) for name, lines in code.items()} for code in codes]
    assert found == [examine(built).kernels for built in kernels]
