"""What the launchers hand to a ragged batch's kernels, by brute force: views that describe the tensors of the call.

The kernels are stand-ins that look at memory as the real ones do: they get the packed rows or the first entry of a padded
batch, and how many elements lie between two entries, which is a whole number of rows (`device/sequences.py`).
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from flash_hopper.launch import backward, forward
from flash_hopper.launch.sequences import TENSORS, Sequences
from flash_hopper.launch.tensors import is_aligned
from flash_hopper.plan.backward import BackwardRequest
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.cases import DOUTS, LAYOUTS, Case
from flash_hopper.testing.inputs import Inputs, make_inputs
from flash_hopper.testing.ragged_cases import ragged_case
from flash_hopper.testing.window_cases import as_backward

SIDES = [{"packed": "qk", "slack": 3}, {"packed": "q"}, {"packed": "k"}, {"used": "qk"}]
SIZES = list(product((1, 3), (1, 2), (1, 5), (1, 4)))  # batch, heads, seqlen_q, seqlen_k
OF_RAGGED = [name for name in LAYOUTS if name != "expand_batch"]


def as_kernels_see(passed: Tensor, entry: int, like: Tensor) -> Tensor:
    """Rows (rows, heads, cols) and the distance of entries as the kernels address them, in the shape of the call's tensor."""
    row, head, last = passed.stride()
    assert last == 1 and is_aligned(passed), "TMA cannot address it"
    assert all(stride % 8 == 0 for stride in (entry, row, head)), "the argument check refuses it"
    if like.dim() == 3:
        assert entry == 0, "packed sequences share an entry"
        return passed
    rows_per_entry = entry // max(row, 1)
    return passed.as_strided(like.shape, (rows_per_entry * row, row, head, 1))


def holds_same(passed: Tensor, entry: int, tensor: Tensor) -> bool:
    """True if a kernel that gets `passed` reads the values of `tensor`; rows of no sequence hold NaN."""
    return torch.equal(as_kernels_see(passed, entry, tensor).nan_to_num(7), tensor.nan_to_num(7))


def pattern_like(tensor: Tensor) -> Tensor:
    """Values that differ from one element to the next, contiguous."""
    return torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape).to(tensor.dtype)


def cases(layout: str, strided: tuple[str, ...]) -> Iterator[Case]:
    """Small forward cases, packed and padded on either side; each with the layout for some of the operands."""
    for side, (batch, heads, seqlen_q, seqlen_k), of in product(SIDES, SIZES, strided):
        try:
            yield ragged_case(
                16, (seqlen_q, seqlen_k), batch=batch, heads=(heads, heads), layout=layout, strided=of,
                **{"lengths_q": "equal", "lengths_k": "equal", **side},
            )  # fmt: skip
        except ArgumentError:
            continue  # a layout that these sizes do not have


def sequences_of(inputs: Inputs) -> Sequences:
    return Sequences(*(inputs.lengths.get(name) for name in TENSORS), None, None)


@pytest.mark.parametrize("layout", OF_RAGGED)
def test_the_forward_reads_and_writes_the_tensors_of_the_call_whatever_their_layout(layout, kernels):
    count = 0
    for case in cases(layout, ("qkvo", "qkv", "q", "kv", "o")):
        inputs = make_inputs(case)
        given, sequences = (inputs.q, inputs.k, inputs.v), sequences_of(inputs)
        wanted, seen = pattern_like(inputs.out), []

        def stand_in(q, k, v, out, lse, counter, ragged, *_, given=given, wanted=wanted, seen=seen):
            *entries, entry_out, _ = ragged[2]
            seen += map(holds_same, (q, k, v), entries, given)
            as_kernels_see(out, entry_out, wanted).copy_(wanted)

        kernels["forward"] = stand_in
        prepared = forward.prepare(*given, AttentionOptions(), inputs.out, sequences)
        prepared.run(*given, inputs.out, sequences)
        assert seen == [True, True, True], str(case)
        assert torch.equal(inputs.out, wanted), str(case)
        assert inputs.out_is_contained(), str(case)
        count += 1
    assert count >= 40


@pytest.mark.parametrize(
    ("layout", "dout"),
    [(name, "bshd") for name in OF_RAGGED]
    + [("bshd", name) for name in DOUTS if name not in ("bshd", "expand_batch", "none")],
)
def test_the_backward_reads_and_writes_the_tensors_of_the_call_whatever_their_layout(layout, dout, kernels):
    count = 0
    for case in cases(layout, ("qkv", "kv")):
        inputs = make_inputs(as_backward(case, dout=dout, deterministic=True))
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": out_of(case), "dout": inputs.dout}
        written = {f"d{name}": pattern_like(tensors[name]) for name in "qkv"}
        looks = []

        def look(entries, tensors=tensors, looks=looks, **passed):
            for (name, rows), entry in zip(passed.items(), entries, strict=False):
                looks.append((name, holds_same(rows, entry, tensors[name])))

        def write(entries, written=written, **passed):
            for (name, rows), entry in zip(passed.items(), entries, strict=True):
                as_kernels_see(rows, entry, written[name]).copy_(written[name])

        def dq_kernel(q, k, v, dout, dq, statistics, counter, ragged, *_, look=look, write=write):
            look(ragged[2], q=q, k=k, v=v, dout=dout)
            write(ragged[2][4:], dq=dq)

        def dkdv_kernel(q, k, v, dout, dk, dv, statistics, accumulator, counter, ragged, *_, look=look, write=write):
            look(ragged[2], q=q, k=k, v=v, dout=dout)
            write(ragged[2][4:], dk=dk, dv=dv)

        def preprocess(out, dout, lse, dlse, statistics, accumulator, ragged, look=look):
            look(ragged[2], out=out, dout=dout)

        kernels |= {"preprocess": preprocess, "backward_dq": dq_kernel, "backward_dkdv": dkdv_kernel}
        request = BackwardRequest(True, True, False, True, False)
        prepared = backward.prepare_backward(as_backward(case, deterministic=True).problem(), request, None)
        q, k, v, out, dout_given = tensors.values()
        found = prepared.run(q, k, v, out, torch.zeros(case.lse_shape), dout_given, None, sequences_of(inputs))
        assert {name for name, _ in looks} == tensors.keys()
        assert all(same for _, same in looks), f"{looks} of {case}"
        for gradient, (name, wanted) in zip(found, written.items(), strict=True):
            assert torch.equal(gradient, wanted), f"{name} of {case}"
        count += 1
    assert count >= 40


def out_of(case: Case) -> Tensor:
    """What a forward returned, laid out like the inputs where an output can be."""
    try:
        case = replace(case, strided="o")
    except ArgumentError:
        case = replace(case, layout="bshd")
    out = make_inputs(case).out
    assert out is not None
    return out.copy_(pattern_like(out))
