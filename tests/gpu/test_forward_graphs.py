"""Streams and CUDA graphs: order within a stream, several streams at once, capture and replay with new inputs."""

from dataclasses import replace

import pytest
import torch

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.cases import Case
from flash_hopper.testing.inputs import make_inputs

CASES = [
    Case(DType.BF16, 2, 8, 8, 600, 900, 64, 64),
    Case(DType.BF16, 2, 8, 2, 700, 700, 128, 128, causal=True),
    Case(DType.FP16, 1, 8, 1, 333, 500, 128, 128),
    Case(DType.BF16, 2, 4, 4, 300, 800, 256, 256, causal=True),
]
SLEEP_CYCLES = 20_000_000  # about 10 ms: far longer than any launch


def attention(tensors, case, out=None):
    q, k, v = tensors
    return flash_hopper.flash_attn_func(q, k, v, case.scale, causal=case.causal, out=out, return_lse=True)


def sets_of_inputs(case, device, count):
    """Tensors of one shape with different values, and what attention gives for each, one call at a time."""
    sets = []
    for seed in range(count):
        inputs = make_inputs(replace(case, seed=seed), device)
        sets.append((inputs.q, inputs.k, inputs.v))
    wanted = []
    for tensors in sets:
        wanted.append(attention(tensors, case))
        torch.cuda.synchronize(device)
    return sets, wanted


def assert_same(got, want):
    for name, a, b in zip(("out", "lse"), got, want, strict=True):
        assert torch.equal(a, b), f"{name} differs in {int((a != b).sum())} elements"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_graph_replays_with_changed_inputs(case, device):
    sets, wanted = sets_of_inputs(case, device, 4)
    static = tuple(x.clone() for x in sets[0])
    given = torch.full_like(wanted[0][0], float("nan"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own = attention(static, case)
        into_given = attention(static, case, out=given)
    for i in (1, 2, 3, 0, 3):
        for x, new in zip(static, sets[i], strict=True):
            x.copy_(new)
        given.fill_(float("nan"))
        for _ in range(3):  # whatever a replay leaves behind, the next one starts from it
            graph.replay()
        torch.cuda.synchronize(device)
        assert_same(own, wanted[i])
        assert_same(into_given, wanted[i])


def test_a_graph_of_a_first_call_is_captured(device):
    """The first call of a signature, in a capture: checks and plan run on the host, the kernel is loaded if need be."""
    case = Case(DType.BF16, 3, 4, 4, 77, 123, 128, 128, causal=True)
    inputs = make_inputs(case, device)
    # the kernel itself is loaded by another shape: loading a module may not be captured
    attention((inputs.q[:, :76], inputs.k[:, :122], inputs.v[:, :122]), case)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention((inputs.q, inputs.k, inputs.v), case)
    graph.replay()
    torch.cuda.synchronize(device)
    assert_same(got, attention((inputs.q, inputs.k, inputs.v), case))


def test_many_calls_in_one_graph_on_any_stream_beside_eager_calls(device):
    """A small network of calls, replayed on another stream while the same kernels run eagerly."""
    prepared = [sets_of_inputs(case, device, 1) for case in CASES]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attention(sets[0], case) for case, (sets, _) in zip(CASES, prepared, strict=True) for _ in range(3)]
    wanted = [want[0] for _, want in prepared for _ in range(3)]
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    for _ in range(10):
        with torch.cuda.stream(stream):
            graph.replay()
        eager = [attention(sets[0], case) for case, (sets, _) in zip(CASES, prepared, strict=True)]
        torch.cuda.synchronize(device)
        for got, want in zip(captured, wanted, strict=True):
            assert_same(got, want)
        for got, (_, want) in zip(eager, prepared, strict=True):
            assert_same(got, want[0])


def test_graphs_of_empty_problems_replay(device):
    q, k = (
        torch.randn(2, 5, 2, 64, dtype=torch.bfloat16, device=device),
        torch.empty(2, 0, 2, 64, device=device).bfloat16(),
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = flash_hopper.flash_attn_func(q, k, k, return_lse=True)
        none = flash_hopper.flash_attn_func(q[:, :0], q, q)
    out.fill_(1.0)
    graph.replay()
    torch.cuda.synchronize(device)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert none.shape == (2, 0, 2, 64)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_calls_follow_the_order_of_a_side_stream(case, device):
    """Inputs are written late on the same stream just before a call and overwritten just after it."""
    sets, wanted = sets_of_inputs(case, device, 3)
    static = tuple(torch.zeros_like(x) for x in sets[0])
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    results = []
    with torch.cuda.stream(stream):
        for i in range(30):
            if i % 10 == 0:
                torch.cuda._sleep(SLEEP_CYCLES)
            for x, new in zip(static, sets[i % 3], strict=True):
                x.copy_(new)
            results.append(attention(static, case))
            for x in static:
                x.fill_(float("nan"))
    stream.synchronize()
    for i, got in enumerate(results):
        assert_same(got, wanted[i % 3])


def test_a_result_may_be_the_next_query_at_once(device):
    """Each call reads what the one before it wrote, without a pause between the kernels."""
    for case in (CASES[0], CASES[1]):
        (first, *_), _ = sets_of_inputs(case, device, 1)
        q, k, v = first
        for synchronise in (True, False):
            x, chain = q, []
            for _ in range(30):
                x, _ = attention((x, k, v), case)
                chain.append(x)
                if synchronise:
                    torch.cuda.synchronize(device)
            torch.cuda.synchronize(device)
            if synchronise:
                wanted = chain
            else:
                assert all(torch.equal(a, b) for a, b in zip(chain, wanted, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_at_once_do_not_disturb_each_other(case, device):
    """The same kernel on four streams, many calls in flight on each."""
    sets, wanted = sets_of_inputs(case, device, 4)
    streams = [torch.cuda.Stream(device) for _ in sets]
    torch.cuda.synchronize(device)
    for _ in range(5):
        results = [[] for _ in streams]
        for _ in range(8):
            for stream, tensors, found in zip(streams, sets, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(attention(tensors, case))
        torch.cuda.synchronize(device)
        for found, want in zip(results, wanted, strict=True):
            for got in found:
                assert_same(got, want)


def test_new_streams_keep_working(device):
    """Whatever is kept per stream survives many streams, and a stream handle that is used again."""
    case = CASES[1]
    sets, wanted = sets_of_inputs(case, device, 1)
    for _ in range(100):
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            got = attention(sets[0], case)
        stream.synchronize()
        assert_same(got, wanted[0])
