"""A whole backward through the launcher without a GPU: every kernel accepts what it is given, in the order of the plans.

The kernels' host code is real and checks shapes, strides, dtypes and what is absent; tensors lie in host memory and only
claim to lie on a GPU, and launches are recorded.
"""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from launch_recorder import Recorder, gpu_tensor

from flash_hopper.launch import backward, ragged
from flash_hopper.launch.sequences import Sequences
from flash_hopper.plan.backward import BackwardRequest
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged
from flash_hopper.testing.cases import case_of

BATCH, ROWS_Q, ROWS_K = 3, 901, 1501
PACKED = Ragged(True, True, False, False, ROWS_Q, ROWS_K, None, None)
PADDED = Ragged(False, False, True, True, 3 * 300, 3 * 500, None, None)
MIXED = Ragged(True, False, False, True, ROWS_Q, 3 * 500, None, None)
LAYOUTS = {"dense": None, "packed": PACKED, "padded": PADDED, "mixed": MIXED}
# mask, layouts, sums; what `test_backward_code.py` compiles as well
SETTINGS = [
    (Mask(200, 100), ("dense",), False),
    (Mask(200, 100), ("dense",), True),
    (Mask(right=0, chunk=256), ("packed", "padded", "mixed"), False),
    (Mask(right=0), ("packed", "padded", "mixed"), True),
]
CASES = [
    (mask, layout, accumulates, heads_k, is_deterministic)
    for mask, layouts, accumulates in SETTINGS
    for layout, heads_k, is_deterministic in product(layouts, (2, 1), (False, True))
]
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}


def problem_of(mask, layout, heads_k):
    lengths, described = (300, 500), LAYOUTS[layout]
    problem = replace(case_of((64, 64), lengths, False, heads=(2, heads_k)).problem(), batch=BATCH, mask=mask)
    if described is None:
        return problem
    seqlen_q, seqlen_k = (ROWS_Q if described.packed_q else 300), (ROWS_K if described.packed_k else 500)
    return replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k, ragged=described)


class Launches:
    """Stands for `get_kernel`: remembers the plans that are bound, then runs their host code."""

    def __init__(self, kernels, folder):
        self.kernels, self.folder, self.plans, self.recorder = kernels, folder, {}, None
        self.kinds = []

    def get_kernel(self, plan):
        self.plans[plan.name] = plan
        return lambda *arguments: self.run(plan, arguments)

    def link(self):
        objects = [self.kernels.object_file(plan) for plan in self.plans.values()]
        self.recorder = Recorder(objects, self.folder)

    def run(self, plan, arguments):
        before = self.recorder.launches
        self.recorder.function(plan.name)(*map(on_gpu, arguments))
        launches = self.recorder.last(self.recorder.launches - before)
        assert all(launch.pdl for launch in launches)
        writers = ["schedule" for launch in launches[:-1] if "ScheduleKernel" in launch.kernel]
        assert len(launches) == len(writers) + 1
        self.kinds += [*writers, plan.kind]


def on_gpu(argument):
    if not isinstance(argument, torch.Tensor):
        return argument
    address = 0x7F00_0000_0000 + argument.data_ptr() % 64
    return gpu_tensor(tuple(argument.shape), DTYPES[argument.dtype], argument.stride(), address)


@pytest.fixture(scope="module")
def launches(kernels, tmp_path_factory):
    found = Launches(kernels, tmp_path_factory.mktemp("recorder"))
    backward.prepare_backward.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backward, "get_kernel", found.get_kernel)
        patch.setattr(ragged, "sequence_table", lambda index, ints: torch.zeros(ints + 50, dtype=torch.int32))
        patch.setattr(backward, "device_facts", lambda index: SimpleNamespace(sm_count=132))
        patch.setattr(backward, "tile_counter", lambda index: torch.zeros(1, dtype=torch.int32))
        patch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
        for case in CASES:
            prepared(*case)
        found.link()
        yield found
    backward.prepare_backward.cache_clear()


def prepared(mask, layout, accumulates, heads_k, is_deterministic):
    request = BackwardRequest(True, True, True, is_deterministic, accumulates)
    return backward.prepare_backward(problem_of(mask, layout, heads_k), request, 0)


def tensors_of(problem):
    """q, k, v, out, lse, dout, dlse and the lengths, in host memory."""
    p, described = problem, problem.ragged
    packed_q, packed_k = (False, False) if described is None else (described.packed_q, described.packed_k)

    def tensor(is_packed, rows, seqlen, heads, cols):
        return torch.empty((rows, heads, cols) if is_packed else (BATCH, seqlen, heads, cols), dtype=torch.bfloat16)

    def lengths(is_there, count):
        return torch.zeros(count, dtype=torch.int32) if is_there else None

    q, out, dout = (tensor(packed_q, p.rows_q, p.seqlen_q, p.heads, 64) for _ in range(3))
    k, v = (tensor(packed_k, p.rows_k, p.seqlen_k, p.heads_k, 64) for _ in range(2))
    lse, dlse = (torch.empty((p.heads, p.rows_q) if packed_q else (BATCH, p.heads, p.seqlen_q)) for _ in range(2))
    sequences = None
    if described is not None:
        used = (lengths(described.has_seqused_q, BATCH), lengths(described.has_seqused_k, BATCH))
        sequences = Sequences(lengths(packed_q, BATCH + 1), lengths(packed_k, BATCH + 1), *used, None, None)
    return (q, k, v, out, lse, dout, dlse), sequences


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_of_a_backward_accepts_what_the_launcher_passes(case, launches):
    bound = prepared(*case)
    tensors, sequences = tensors_of(bound.problem)
    into = None
    if bound.request.accumulates:  # float32 slices at odd addresses
        into = tuple(torch.zeros((*t.shape[:-1], 67))[..., 3:] for t in tensors[:3])
    launches.kinds.clear()
    gradients = bound.run(*tensors, sequences, into)
    table = ["schedule"] if sequences is not None else []
    assert launches.kinds == table + [plan.kind for plan in bound.plans.kernels()]
    assert [g.shape for g in gradients] == [t.shape for t in tensors[:3]]
    assert all(g.dtype == (torch.float32 if into else torch.bfloat16) for g in gradients)


def test_tensors_that_no_view_can_address_are_copied(launches):
    """Rows that an entry of a padded batch does not start a whole number of, and a sequence length of 1."""
    case = (Mask(right=0, chunk=256), "padded", False, 2, True)
    bound = prepared(*case)
    tensors, sequences = tensors_of(bound.problem)
    q, *others = tensors
    odd = torch.empty(BATCH * (q.shape[1] * 136 + 8), dtype=q.dtype)
    strided = odd.as_strided(q.shape, (q.shape[1] * 136 + 8, 136, 64, 1))
    bound.run(strided, *others, sequences, None)
