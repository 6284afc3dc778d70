"""The memory for the table of sequences, which calls share: of one thread on one stream, one behind the other."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from backward_calls import assert_same
from ragged_steps import attention, hints_of, of_case

from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.ragged_cases import SIDES, ragged_case
from flash_hopper.testing.window_cases import as_backward

# few and many sequences, so that one call's table lies where another's rows or order were
FORWARD = [
    ragged_case(64, (700, 700), "causal", batch=40, heads=(8, 2), lengths_q="zipf", lengths_k="zipf1"),
    ragged_case(128, (9, 12), "full", batch=2000, heads=(4, 4), lengths_q="tiny", lengths_k="tiny"),
    ragged_case(64, (1500, 1500), "causal", batch=1, heads=(4, 2)),
    ragged_case(128, (300, 500), "local", 3, batch=7, heads=(4, 1), **SIDES[7]),
    ragged_case(64, (20, 30), "causal", batch=993, heads=(2, 1), **SIDES[2]),
]
BACKWARD = [as_backward(case, deterministic=True, dlse="bhs") for case in FORWARD]


class Calls:
    """Cases with their inputs, and what each gives by itself."""

    def __init__(self, cases, device) -> None:
        self.cases, self.device = cases, device
        self.inputs = [make_inputs(case, device) for case in cases]
        self.hints = [hints_of(case, device) for case in cases]
        self.wanted = []
        for number in range(len(cases)):
            self.wanted.append(self.run(number))
            torch.cuda.synchronize(device)

    def run(self, number):
        return of_case(self.cases[number], self.inputs[number], hints=self.hints[number])

    def check(self, number, got) -> None:
        assert_same(got, self.wanted[number], self.cases[number])


@pytest.mark.parametrize("cases", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_calls_of_any_size_follow_each_other_without_a_wait(cases, device):
    calls = Calls(cases, device)
    torch.cuda._sleep(20_000_000)
    order = [i * step % len(cases) for step in (1, 2, 3, 4) for i in range(3 * len(cases))]
    found = [(number, calls.run(number)) for number in order]
    torch.cuda.synchronize(device)
    for number, got in found:
        calls.check(number, got)


@pytest.mark.parametrize("cases", [FORWARD, BACKWARD], ids=["forward", "backward"])
def test_threads_that_call_on_one_stream_do_not_disturb_each_other(cases, device):
    """The kernels of one thread's calls come between those of another's."""
    calls = Calls(cases, device)

    def repeated(number):
        with torch.cuda.device(device):
            return [calls.run(number) for _ in range(60)]

    for _ in range(3):
        with ThreadPoolExecutor(len(cases)) as threads:
            found = list(threads.map(repeated, range(len(cases))))
        torch.cuda.synchronize(device)
        for number, results in enumerate(found):
            for got in results:
                calls.check(number, got)


@pytest.mark.parametrize("has_lse", [False, True])
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_a_warm_forward_allocates_nothing_but_its_results(case, has_lse, device):
    inputs = make_inputs(case, device)
    tensors, hints = (inputs.q, inputs.k, inputs.v), hints_of(case, device)
    kept = [attention(case, tensors, inputs.lengths, hints, return_lse=has_lse) for _ in range(2)]
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
    kept.append(attention(case, tensors, inputs.lengths, hints, return_lse=has_lse))
    assert torch.cuda.memory_stats(device)["allocation.all.allocated"] - before == 1 + has_lse


def test_a_table_made_while_memory_comes_from_a_private_pool_outlives_it(device):
    """Whoever meets a larger batch first may be allocating from a pool whose memory is taken back."""
    calls = Calls(FORWARD[:2], device)
    stream = torch.cuda.Stream(device)
    pool = torch.cuda.MemPool()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        with torch.cuda.use_mem_pool(pool):
            first = [calls.run(number) for number in (0, 1)]
        torch.cuda.synchronize(device)
        for number, got in enumerate(first):
            calls.check(number, got)
        del first, got, pool
        torch.cuda.empty_cache()
        others = [torch.full((1 << 20,), -1, dtype=torch.int32, device=device) for _ in range(20)]
        again = [calls.run(number) for number in (0, 1, 0, 1)]
        torch.cuda.synchronize(device)
    assert all(bool((x == -1).all()) for x in others)
    for number, got in enumerate(again):
        calls.check(number % 2, got)
