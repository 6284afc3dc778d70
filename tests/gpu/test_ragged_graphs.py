"""CUDA graphs of ragged calls: captured once, replayed with longer, shorter and empty sequences within the same rows."""

import pytest
import torch
from backward_calls import assert_same
from ragged_steps import attention, hints_of, step

from flash_hopper.testing.cases import case_of
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.ragged_cases import ragged_case
from flash_hopper.testing.window_cases import as_backward

BATCH, ROWS, KEYS = 6, 1200, 1500
# lengths of queries and of keys of six sequences, at most ROWS and KEYS in all
LENGTHS = (
    ("200.200.200.200.200.200", "250.250.250.250.250.250"),  # what is captured
    ("1.1.1196.1.1.0", "1.1.1.1.1400.1"),
    ("0.0.0.0.0.0", "10.0.20.0.30.0"),
    ("65.0.130.0.1.300", "0.64.200.129.0.777"),
    ("0.0.0.1200.0.0", "0.0.0.1500.0.0"),
    ("100.300.100.300.100.300", "0.0.0.0.0.0"),
    ("33.65.129.257.17.400", "400.17.257.129.65.33"),
)
PACKED = {"packed": "qk"}
USED = {"packed": "qk", "used": "qk", "slack": 7}


def cases(kind, i, d, **fields):
    """The same call with each of the lengths."""
    found = []
    for n, (lengths_q, lengths_k) in enumerate(LENGTHS):
        found.append(
            ragged_case(
                d,
                (ROWS, KEYS),
                kind,
                i,
                batch=BATCH,
                heads=(4, 2),
                lengths_q=lengths_q,
                lengths_k=lengths_k,
                seed=n,
                **fields,
            )
        )
    return found


FORWARD = [
    cases("full", 0, 64, **PACKED, hint="none"),
    cases("causal", 0, 128, **PACKED, hint="device"),
    cases("causal", 0, 64, **USED, hint="none"),
    cases("local", 3, 128, **USED, hint="device"),
    cases("chunk", 0, 64, **PACKED, hint="none"),
    cases("causal", 0, 256, **PACKED, hint="none"),
]
BACKWARD = [
    [as_backward(case, dlse=dlse, deterministic=deterministic) for case in FORWARD[number]]
    for number, dlse, deterministic in (
        (0, "none", True), (1, "bhs", False), (2, "bhs", True), (3, "none", True), (3, "none", False), (4, "none", True),
        (5, "none", False),
    )
]  # fmt: skip
of_kinds = pytest.mark.parametrize("group", FORWARD, ids=lambda group: str(group[0]))
of_steps = pytest.mark.parametrize("group", BACKWARD, ids=lambda group: str(group[0]))


class Static:
    """Memory for the rows of the largest of some cases, into which the tensors of one of them are put.

    Rows behind those of a case hold NaN. What is right is an eager call on the same memory.
    """

    def __init__(self, group, device):
        self.case, self.group = group[0], group
        self.inputs = [make_inputs(case, device) for case in group]
        self.static = {}
        for name in ("q", "k", "v", "dout", "dlse"):
            given = [getattr(inputs, name) for inputs in self.inputs]
            if given[0] is not None:
                rows = 1 if name == "dlse" else 0
                largest = max(given, key=lambda x, rows=rows: x.shape[rows])
                self.static[name] = torch.empty_like(largest, memory_format=torch.contiguous_format)
        self.lengths = {name: x.clone() for name, x in self.inputs[0].lengths.items()}
        self.hints = hints_of(self.case, device)
        self.tensors = tuple(self.static[name].detach() for name in "qkv")
        if self.case.is_backward:
            self.tensors = tuple(x.requires_grad_() for x in self.tensors)

    def load(self, number):
        inputs = self.inputs[number]
        self.spoil()
        for name, static in self.static.items():
            values = getattr(inputs, name)
            dim = 1 if name == "dlse" else 0
            static.data.narrow(dim, 0, values.shape[dim]).copy_(values)
        for name, static in self.lengths.items():
            static.copy_(inputs.lengths[name])

    def spoil(self):
        for static in self.static.values():
            static.data.fill_(float("nan"))

    def run(self):
        if not self.case.is_backward:
            return attention(self.case, self.tensors, self.lengths, self.hints)
        return step(
            self.case, self.tensors, self.lengths, self.static["dout"], self.static.get("dlse"), hints=self.hints
        )

    def capture(self, device):
        """A graph of the call and its results; warmed up on a side stream, as PyTorch asks for."""
        self.load(0)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(3):
                self.run()
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = self.run()
        return graph, results


def assert_replays(group, device):
    one = Static(group, device)
    wanted = []
    for number in range(len(group)):
        one.load(number)
        wanted.append(one.run())
        torch.cuda.synchronize(device)
    graph, results = one.capture(device)
    for number in (*range(len(group)), *reversed(range(len(group)))):
        one.load(number)
        for x in results:
            x.fill_(float("nan"))
        for _ in range(3):  # whatever a replay leaves behind, the next one starts from it
            graph.replay()
        torch.cuda.synchronize(device)
        assert_same(results, wanted[number], group[number])
    return wanted


@of_kinds
def test_a_graph_of_a_forward_replays_with_other_lengths(group, device):
    assert_replays(group, device)


@of_steps
def test_a_graph_of_a_forward_and_backward_replays_with_other_lengths(group, device):
    assert_replays(group, device)


@of_steps
def test_what_the_replays_are_compared_with_has_no_nan_and_zeros_in_rows_of_no_sequence(group, device):
    one = Static(group, device)
    for number, case in enumerate(group):
        one.load(number)
        out, lse, *gradients = one.run()
        is_used = torch.zeros(out.shape[0], dtype=torch.bool, device=device)
        side = case.side("q")
        for (_, start), length in zip(side.starts, side.lengths, strict=True):
            is_used[start : start + length] = True
        assert (out[~is_used] == 0).all()
        assert (lse[:, ~is_used] == -torch.inf).all()
        assert (gradients[0][~is_used] == 0).all()
        assert not any(x.isnan().any() for x in (out, lse, *gradients))


def test_ragged_and_dense_calls_share_a_graph_beside_eager_calls_on_another_stream(device):
    """Whatever is kept per stream, tables of sequences and counters among it, belongs to one launch at a time."""
    ragged = [Static(group, device) for group in (*FORWARD[:3], *BACKWARD[:3])]
    dense = make_inputs(case_of(64, (500, 600), True, heads=(4, 2)), device)
    dense_case = case_of(64, (500, 600), True, heads=(4, 2))
    wanted = []
    for one in ragged:
        one.load(3)
        wanted.append(one.run())
    want_dense = attention(dense_case, (dense.q, dense.k, dense.v), {})
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for one in ragged:
            one.run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = []
        for one in ragged:
            captured.append(one.run())
            attention(dense_case, (dense.q, dense.k, dense.v), {})
    torch.cuda.synchronize(device)
    for _ in range(10):
        with torch.cuda.stream(side):
            graph.replay()
        eager = [one.run() for one in ragged]
        eager_dense = attention(dense_case, (dense.q, dense.k, dense.v), {})
        torch.cuda.synchronize(device)
        for one, first, second, want in zip(ragged, captured, eager, wanted, strict=True):
            assert_same(first, want, one.case)
            assert_same(second, want, one.case)
        assert all(torch.equal(a, b) for a, b in zip(eager_dense, want_dense, strict=True))


def test_lengths_are_read_when_the_kernels_run(device):
    """Lengths written late on the stream just before a call and overwritten just after it."""
    group = FORWARD[0]
    one = Static(group, device)
    wanted = []
    for number in range(len(group)):
        one.load(number)
        wanted.append(one.run())
    torch.cuda.synchronize(device)
    found = []
    for i in range(30):
        if i % 10 == 0:
            torch.cuda._sleep(20_000_000)
        one.load(i % len(group))
        found.append(one.run())
        one.spoil()
        for lengths in one.lengths.values():
            lengths.zero_()
    torch.cuda.synchronize(device)
    for i, got in enumerate(found):
        assert_same(got, wanted[i % len(group)], group[0])


def test_streams_at_once_do_not_disturb_each_other(device):
    groups = [*FORWARD[:2], *BACKWARD[:2]]
    ones = [Static(group, device) for group in groups]
    wanted = []
    for number, one in enumerate(ones):
        one.load(number + 2)
        wanted.append(one.run())
    torch.cuda.synchronize(device)
    streams = [torch.cuda.Stream(device) for _ in ones]
    for _ in range(5):
        results = [[] for _ in ones]
        for _ in range(8):
            for stream, one, found in zip(streams, ones, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(one.run())
        torch.cuda.synchronize(device)
        for one, found, want in zip(ones, results, wanted, strict=True):
            for got in found:
                assert_same(got, want, one.case)
