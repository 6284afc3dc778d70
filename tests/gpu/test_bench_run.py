"""`bench` on the GPU: ours and PyTorch's backends are right and timed in both directions by every protocol."""

from dataclasses import replace

import pytest

from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.bench_run import GPU_PROTOCOLS, HOST_PROTOCOLS, Settings, measure
from flash_hopper.testing.bench_suites import DIRECTIONS, BenchShape
from flash_hopper.testing.provider_base import ProviderAbsent, make_inputs
from flash_hopper.testing.providers import prepare
from flash_hopper.testing.timing import GpuQueue

SHAPE = BenchShape("paper", DType.BF16, 128, 128, True, 1024, 1024, 2, 16, 4)
QUICK = {"rounds": 3, "pause_s": 0.01, "steady_s": 0.3}


@pytest.fixture(scope="module")
def queue():
    return GpuQueue()


@pytest.mark.alone
@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_protocol_times_ours_alone_and_in_order(direction, d, queue):
    shape = replace(SHAPE, direction=direction, d=d, dv=d)
    names = ("ours", "sdpa-flash") if direction == "forward" else ("ours", "ours-det", "sdpa-flash")
    rows = list(measure(shape, Settings(names, (*GPU_PROTOCOLS, *HOST_PROTOCOLS), **QUICK), queue))
    assert len(rows) == len(names) * 5
    assert [row for row in rows if row.error] == []
    times = {(row.provider, row.protocol): row.us for row in rows}
    assert all(us > 0 for us in times.values())
    # a graph holds the kernels of one call: it can neither be much slower than the call nor nearly free
    for name in names:
        assert 0.3 < times[name, "graph"] / times[name, "burst"] < 1.5


@pytest.mark.parametrize("d", [64, 128, 192, 256])
@pytest.mark.parametrize(("causal", "heads_k"), [(False, 16), (True, 4)])
def test_fa3_is_right_in_both_directions_where_it_is_installed(d, causal, heads_k):
    for direction in DIRECTIONS:
        shape = replace(SHAPE, direction=direction, d=d, dv=d, causal=causal, heads_k=heads_k)
        try:
            prepare("fa3", shape, make_inputs(shape, "cuda"))
        except ProviderAbsent as absent:
            if "is not installed" not in str(absent):
                raise
            pytest.skip(f"fa3 is absent: {absent}")


@pytest.mark.alone
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "ragged",
    [
        {"lengths": "zipf", "batch": 16},
        {"lengths": "equal", "batch": 40, "seqlen_q": 8, "seqlen_k": 8},
        {"lengths": "one_long", "batch": 9},
        {"left": 200},
    ],
    ids=str,
)
def test_packed_batches_and_windows_are_timed_by_ours_and_by_torch(ragged, direction, queue):
    shape = replace(SHAPE, suite="ragged", direction=direction, **ragged)
    names = ("ours", "sdpa-flash")
    rows = list(measure(shape, Settings(names, ("burst", "graph", *HOST_PROTOCOLS), **QUICK), queue))
    assert [row.error for row in rows if row.error] == []
    assert all(row.us > 0 for row in rows)
    assert {(row.lengths, row.left) for row in rows} == {(ragged.get("lengths"), ragged.get("left"))}
