"""Quantisation through the launcher without a GPU: every kernel accepts what it is given, with as many CTAs as there are blocks.

The kernels' host code is real and checks shapes, strides, dtypes and what is absent; tensors lie in host memory and only
claim to lie on a GPU, and launches are recorded.
"""

from itertools import product

import pytest
import torch
from launch_recorder import Recorder, gpu_tensor

from flash_hopper.launch import fp8_values
from flash_hopper.launch import quantize as launch
from flash_hopper.launch.sequences import sequences_of
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.fp8 import Fp8Values
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged

SM_COUNT = 132
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32", torch.float8_e4m3fn: "e4m3"}
CU_SEQLENS = torch.tensor([0, 7, 7, 800], dtype=torch.int32)
MODES = {
    "plain": {},
    "values": {"values": True},
    "hadamard": {"hadamard": True},
    "turned": {"hadamard": True, "cos": torch.ones(1000, 32), "sin": torch.ones(1000, 32), "offsets": 5},
    "shifted": {
        "cos": torch.ones(1000, 32, dtype=torch.bfloat16),
        "sin": torch.ones(1000, 32, dtype=torch.bfloat16),
        "offsets": torch.tensor([1, 2, 3], dtype=torch.int32),
    },
}
CASES = [
    *product(MODES, ("head", "block"), ("dense", "ragged")),
    ("plain", "tensor", "used"),
    ("hadamard", "tensor", "ragged"),
]


def call(mode, granularity, layout, head_dim=128):
    options = {
        "cu_seqlens": None, "seqused": None, "qhead_per_kvhead": 2 if granularity == "head" else 1, "hadamard": False,
        "signs": None, "cos": None, "sin": None, "rotary_interleaved": False, "offsets": 0, "values": False,
    } | MODES[mode]  # fmt: skip
    x = torch.zeros(3, 300, 4, head_dim, dtype=torch.bfloat16)
    if layout == "ragged":
        x, options["cu_seqlens"] = x.flatten(0, 1), CU_SEQLENS
    if layout != "dense":
        options["seqused"] = torch.tensor([5, 0, 100], dtype=torch.int32)
    return launch.quantize(x, granularity, **options)


ROWS = [*product(("dense", "used", "ragged", "ragged used"), ("plain", "strided", "expanded"))]
USED = torch.tensor([5, 0, 100], dtype=torch.int32)
MARGIN = 100  # SMs that are left alone


def reorder(layout, strides, head_dim=128):
    """v in rows through its launcher: 3 sequences, 4 heads."""
    packed, used = "ragged" in layout, "used" in layout
    shape = (900, 4, head_dim) if packed else (3, 300, 4, head_dim)
    wide = torch.zeros(*shape[:-1], 2 * head_dim).to(torch.float8_e4m3fn)
    v = {
        "plain": lambda: wide[..., :head_dim].contiguous(),
        "strided": lambda: wide[..., head_dim:],
        "expanded": lambda: wide[..., :1, :head_dim].expand(shape),
    }[strides]()
    sequences = ragged = None
    if packed or used:
        sequences = sequences_of(None, CU_SEQLENS if packed else None, None, USED if used else None, None, None)
        ragged = Ragged(False, packed, False, used, 3, 900, None, None)
    rows = 900 if packed else 300
    p = AttentionProblem(DType.E4M3, 3, 1, rows, 4, 4, 64, head_dim, 1.0, Mask(), MARGIN, frozenset(), ragged)
    return fp8_values.prepare_reordering(p, SM_COUNT).run(v, sequences)


def on_gpu(argument):
    if isinstance(argument, tuple):
        return tuple(map(on_gpu, argument))
    if not isinstance(argument, torch.Tensor):
        return argument
    address = 0x7F00_0000_0000 + argument.data_ptr() % 64
    return gpu_tensor(tuple(argument.shape), DTYPES[argument.dtype], argument.stride(), address)


class Launches:
    """Stands for `get_kernel`: remembers the plans, then runs their host code."""

    def __init__(self, kernels, folder) -> None:
        self.kernels, self.folder, self.plans, self.recorder, self.seen = kernels, folder, {}, None, []

    def get_kernel(self, plan):
        self.plans[plan.name] = plan
        return lambda *arguments: self.run(plan, arguments)

    def run(self, plan, arguments) -> None:
        if self.recorder is not None:
            self.recorder.function(plan.name)(*map(on_gpu, arguments))
            self.seen.append((plan, self.recorder.launch))


@pytest.fixture(scope="module")
def launches(kernels, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    found = Launches(kernels, tmp_path_factory.mktemp("recorded"))
    facts = type("Facts", (), {"sm_count": SM_COUNT})
    patch.setattr(launch, "get_kernel", found.get_kernel)
    patch.setattr(fp8_values, "get_kernel", found.get_kernel)
    patch.setattr(launch, "device_facts", lambda index: facts)
    patch.setattr(launch, "_prepared", {})
    patch.setattr(launch, "on_cpu", lambda x: False)
    patch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    for case in CASES:
        call(*case)
    for case in ROWS:
        reorder(*case)
    found.recorder = Recorder([kernels.object_file(plan) for plan in found.plans.values()], found.folder)
    yield found
    patch.undo()


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_each_kernel_takes_its_arguments_and_gets_ctas_for_its_blocks(case, launches):
    launches.seen.clear()
    mode, granularity, layout = case
    codes, descale = call(*case)
    assert [plan.purpose for plan, _ in launches.seen] == (
        ["block"] if granularity == "block" else ["absmax", "scaled"]
    )
    columns = (900 // 128 + 4) if layout == "ragged" else 3
    for plan, recorded in launches.seen:
        assert recorded.pdl and recorded.block == (plan.threads, 1, 1)
        assert recorded.grid == (min(SM_COUNT * plan.ctas_per_sm, columns * 4 * (1 if layout == "ragged" else 3)), 1, 1)
        assert (recorded.smem + 1024) * plan.ctas_per_sm <= 228 * 1024
    if isinstance(codes, Fp8Values):
        assert codes.codes.shape == ((4, 128, columns * 128) if layout == "ragged" else (3, 4, 128, 384))
    else:
        assert codes.shape == ((900, 4, 128) if layout == "ragged" else (3, 300, 4, 128))
    assert descale.dtype == torch.float32 and codes is not None and mode in MODES


@pytest.mark.parametrize("case", ROWS, ids="-".join)
def test_rows_of_codes_are_reordered_by_one_launch_into_the_codes_of_transposed_values(case, launches):
    launches.seen.clear()
    codes = reorder(*case)
    ((plan, recorded),) = launches.seen
    packed = "ragged" in case[0]
    columns = 900 // 128 + 4 if packed else 3
    assert codes.dtype == torch.float8_e4m3fn and codes.is_contiguous()
    assert codes.shape == ((4, 128, columns * 128) if packed else (3, 4, 128, columns * 128))
    assert (plan.purpose, plan.is_ragged, plan.has_seqused) == ("reorder", packed, "used" in case[0])
    assert recorded.pdl and recorded.block == (plan.threads, 1, 1)
    blocks = columns * 4 * (1 if packed else 3)
    assert recorded.grid == (min((SM_COUNT - MARGIN) * plan.ctas_per_sm, blocks), 1, 1)
