"""What a warm ragged call costs: one call into the compiled library, no memory but that of its results, one kept table.

Kernels are stand-ins, tensors lie in host memory, and streams are numbers.
"""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flash_hopper.launch import device, forward, ragged
from flash_hopper.launch.sequences import TENSORS, Sequences
from flash_hopper.plan.schedule import FEW, table_ints
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.ragged_cases import SIDES, ragged_case

VIEWS = {"aten::select.int"}


class Recorded(TorchDispatchMode):
    """Names of all operators that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class Streams:
    """Stands for CUDA: the current stream of each GPU, whether it is captured, and what was allocated to be kept."""

    def __init__(self, monkeypatch) -> None:
        self.current, self.is_capturing, self.kept = {}, False, []
        empty, zeros = torch.empty, torch.zeros

        def lasting(index, make):
            self.kept.append(make())
            return self.kept[-1]

        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: self.current.get(i, 0), raising=False)
        monkeypatch.setattr(torch, "empty", lambda *sizes, device=None, **options: empty(*sizes, **options))
        monkeypatch.setattr(torch, "zeros", lambda *sizes, device=None, **options: zeros(*sizes, **options))
        monkeypatch.setattr(device, "_lasting", lasting)
        monkeypatch.setattr(device, "_tables", device._Tables())
        monkeypatch.setattr(device, "_kept", {})


@pytest.fixture
def streams(monkeypatch) -> Streams:
    return Streams(monkeypatch)


def prepared(side, has_lse=True, batch=4):
    case = ragged_case(64, (40, 50), "causal", batch=batch, **side)
    inputs = make_inputs(case)
    sequences = Sequences(*(inputs.lengths.get(name) for name in TENSORS), None, None)
    tensors = inputs.q, inputs.k, inputs.v
    return forward.prepare(*tensors, AttentionOptions(return_lse=has_lse), None, sequences), tensors, sequences


@pytest.mark.parametrize("batch", [4, 40])
@pytest.mark.parametrize("has_lse", [False, True])
@pytest.mark.parametrize("side", SIDES, ids=str)
def test_a_warm_forward_is_one_library_call_and_allocates_nothing_but_its_results(
    side, has_lse, batch, kernels, streams, monkeypatch
):
    calls = []
    kernels["forward"] = lambda *arguments: calls.append(arguments)
    monkeypatch.setattr(ragged, "sequence_table", device.sequence_table)
    monkeypatch.setattr(ragged, "tile_counter", device.tile_counter)
    call, tensors, sequences = prepared(side, has_lse, batch)
    call.run(*tensors, None, sequences)
    assert len(streams.kept) == 1
    assert calls[0][6][0] == streams.kept[0].data_ptr()
    assert streams.kept[0].numel() >= table_ints(batch) if batch >= FEW else streams.kept[0].tolist() == [0]
    calls.clear()
    streams.kept.clear()
    with Recorded() as recorded:
        call.run(*tensors, None, sequences)
    assert len(calls) == 1
    assert streams.kept == []
    others = [name for name in recorded.names if name not in VIEWS]
    assert others == ["aten::empty.memory_format"] * (1 + has_lse)
    if side.get("packed") == "qk":
        assert recorded.names == others


def test_lengths_are_passed_by_address_and_absent_ones_as_zero(kernels):
    for side in SIDES:
        call, tensors, sequences = prepared(side)
        seen = []
        kernels["forward"] = lambda *arguments, seen=seen: seen.append(arguments[6])
        call.run(*tensors, None, sequences)
        (_, count, entries, lengths) = seen[0]
        lengths = tuple(lengths)
        assert count == 4
        assert lengths[:4] == tuple(0 if t is None else t.data_ptr() for t in sequences.tensors)
        assert lengths[4:] == (tensors[0].shape[-3], tensors[1].shape[-3], 1, 1)
        packed_q, packed_k = sequences.cu_seqlens_q is not None, sequences.cu_seqlens_k is not None
        assert [entry == 0 for entry in entries] == [packed_q, packed_k, packed_k, packed_q, packed_q]


@pytest.mark.parametrize("side", SIDES, ids=str)
def test_what_a_warm_call_passes_beside_tensors_is_looked_up_and_not_converted_anew(side, kernels, monkeypatch):
    table = torch.zeros(table_ints(4), dtype=torch.int32)
    monkeypatch.setattr(ragged, "sequence_table", lambda index, ints: table)
    monkeypatch.setattr(ragged, "tile_counter", lambda index: table)
    call, tensors, sequences = prepared(side)
    passed = []
    kernels["forward"] = lambda *arguments: passed.append(arguments[6])
    for _ in range(2):
        call.run(*tensors, None, sequences)
    assert passed[0] is passed[1]


def test_calls_on_one_stream_share_a_table_and_those_on_others_do_not(streams):
    first = device.sequence_table(0, table_ints(3))
    assert device.sequence_table(0, table_ints(4)) is first
    streams.current[0] = 7
    second = device.sequence_table(0, table_ints(3))
    assert second is not first and device.sequence_table(0, 10) is second
    streams.current[1] = 7  # the same number on another GPU
    third = device.sequence_table(1, table_ints(3))
    streams.current[0] = 0
    assert third is not second and device.sequence_table(0, 10) is first
    assert len(streams.kept) == 3


def test_a_table_grows_and_never_shrinks(streams):
    sizes = (1, 5, 100, 400, 2000, 3, 60_000, 2000, 1)
    found = [device.sequence_table(0, table_ints(batch)) for batch in sizes]
    assert all(table.numel() >= table_ints(batch) for table, batch in zip(found, sizes, strict=True))
    assert all(table.dtype == torch.int32 for table in found)
    capacities = [table.numel() for table in found]
    assert capacities == sorted(capacities)
    assert found[-1] is found[sizes.index(60_000)]
    # doubling: a batch that grows by one from call to call does not allocate at each of them
    for batch in range(1, 3000):
        device.sequence_table(0, table_ints(batch))
    streams.current[0] = 1
    streams.kept.clear()
    for batch in range(1, 3000):
        device.sequence_table(0, table_ints(batch))
    assert len(streams.kept) <= 5


def test_threads_do_not_share_tables_because_their_kernels_may_come_between_those_of_a_call(streams):
    own = device.sequence_table(0, 100)
    found = []

    def ask():
        found.append(device.sequence_table(0, 100))
        found.append(device.sequence_table(0, 100))

    for _ in range(2):
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert found[0] is found[1] and found[2] is found[3]
    assert len({id(table) for table in (own, *found)}) == 3
    assert device.sequence_table(0, 100) is own


def test_a_captured_call_shares_its_table_with_nobody(streams):
    kept = device.sequence_table(0, 100)
    streams.is_capturing = True
    captured = [device.sequence_table(0, 100) for _ in range(3)]
    assert len({id(table) for table in (kept, *captured)}) == 4
    assert len(streams.kept) == 1
    streams.is_capturing = False
    assert device.sequence_table(0, 100) is kept
