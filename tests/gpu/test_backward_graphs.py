"""CUDA graphs and streams with a backward: capture of a step, replay with changed inputs, order within a stream."""

from dataclasses import replace

import pytest
import torch
from backward_calls import assert_same, leaves, step

from flash_hopper.problem.dtypes import DType
from flash_hopper.testing.backward_cases import backward_case
from flash_hopper.testing.inputs import make_inputs

CASES = [
    backward_case(64, (600, 900), batch=2, heads=(8, 8)),
    backward_case(64, (700, 600), True, batch=2, heads=(8, 2), dlse="bhs"),
    backward_case(128, (700, 700), True, batch=2, heads=(8, 2)),
    backward_case(128, (333, 500), heads=(8, 8), dtype=DType.FP16, dlse="bhs"),
    backward_case(64, (600, 900), True, batch=2, heads=(8, 4), deterministic=True),
    backward_case(128, (500, 600), batch=2, heads=(8, 8), deterministic=True),
    backward_case((192, 128), (300, 400), True, batch=2, heads=(4, 4)),
    backward_case(256, (300, 400), True, batch=2, heads=(4, 2), deterministic=True),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
SLEEP_CYCLES = 20_000_000  # about 10 ms: far longer than any launch


class Step:
    """Tensors that stay where they are, into which the values of one of several sets are copied."""

    def __init__(self, case, device, sets):
        self.case = case
        self.sets = [make_inputs(replace(case, seed=seed), device) for seed in range(sets)]
        self.wanted = []
        for inputs in self.sets:
            self.wanted.append(step(leaves(inputs), inputs.dout, inputs.dlse, case))
            torch.cuda.synchronize(device)
        first = self.sets[0]
        self.static = {name: torch.empty_like(x) for name, x in self.operands(first).items()}
        self.tensors = tuple(self.static[name].detach().requires_grad_() for name in "qkv")

    def operands(self, inputs):
        found = {name: getattr(inputs, name) for name in ("q", "k", "v", "dout", "dlse")}
        return {name: x for name, x in found.items() if x is not None}

    def load(self, number):
        """The values of a set; `data`, since a step's graph may have saved the tensors."""
        for name, x in self.operands(self.sets[number]).items():
            self.static[name].data.copy_(x)

    def spoil(self):
        for x in self.static.values():
            x.data.fill_(float("nan"))

    def run(self):
        return step(self.tensors, self.static["dout"], self.static.get("dlse"), self.case)

    def capture(self, device):
        """A graph of a step and its results; warmed up on a side stream, as PyTorch asks for."""
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


@every_case
def test_a_graph_of_a_step_replays_with_changed_inputs(case, device):
    one = Step(case, device, sets=4)
    graph, results = one.capture(device)
    for number in (1, 2, 3, 0, 3):
        one.load(number)
        for x in results:
            x.fill_(float("nan"))
        for _ in range(3):  # whatever a replay leaves behind, the next one starts from it
            graph.replay()
        one.spoil()
        torch.cuda.synchronize(device)
        assert_same(results, one.wanted[number], case)


def test_several_steps_in_one_graph_beside_eager_steps_on_another_stream(device):
    made = [Step(case, device, sets=1) for case in CASES]
    for one in made:
        one.load(0)
        one.run()
    torch.cuda.synchronize(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for one in made:
            one.run()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [one.run() for one in made for _ in range(2)]
    wanted = [(one.wanted[0], one.case) for one in made for _ in range(2)]
    torch.cuda.synchronize(device)
    for _ in range(10):
        with torch.cuda.stream(side):
            graph.replay()
        eager = [one.run() for one in made]
        torch.cuda.synchronize(device)
        for got, (want, case) in zip(captured, wanted, strict=True):
            assert_same(got, want, case)
        for got, one in zip(eager, made, strict=True):
            assert_same(got, one.wanted[0], one.case)


def test_a_training_step_with_its_optimiser_replays(device):
    """Linear layers around attention, gradients into .grad, SGD, all in one graph: losses as step by step."""

    def build():
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(256, 256, bias=False) for _ in range(4)).to(device, torch.bfloat16)
        return layers, torch.optim.SGD(layers.parameters(), lr=0.05)

    def loss_of(layers, x, y):
        from flash_hopper import flash_attn_func

        q, k, v = (layer(x).unflatten(2, (4, 64)) for layer in layers[:3])
        out = flash_attn_func(q, k, v, causal=True, deterministic=True)
        return (layers[3](out.flatten(2)).float() - y).square().mean()

    x = torch.randn(2, 200, 256, device=device, dtype=torch.bfloat16)
    y = torch.randn(2, 200, 256, device=device)

    def train(layers, optimiser):
        optimiser.zero_grad(set_to_none=False)
        loss = loss_of(layers, x, y)
        loss.backward()
        optimiser.step()
        return loss

    layers, optimiser = build()
    eager = [float(train(layers, optimiser)) for _ in range(14)]
    layers, optimiser = build()
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        warm = [float(train(layers, optimiser)) for _ in range(4)]
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train(layers, optimiser)
    replayed = []
    for _ in range(10):
        graph.replay()
        replayed.append(float(loss))
    assert eager[-1] < eager[0]
    # matrix products may take another algorithm in a graph
    torch.testing.assert_close(torch.tensor(warm + replayed), torch.tensor(eager), rtol=2e-3, atol=0)


def test_a_graph_of_an_empty_problem_replays(device):
    case = backward_case(64, (5, 0), batch=2)
    inputs = make_inputs(case, device)
    tensors = leaves(inputs)
    step(tensors, inputs.dout, None, case)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(tensors, inputs.dout, None, case)
    results[2].fill_(1.0)
    graph.replay()
    torch.cuda.synchronize(device)
    assert (results[0] == 0).all()
    assert (results[1] == -torch.inf).all()
    assert (results[2] == 0).all()
    assert [x.shape for x in results[3:]] == [inputs.k.shape, inputs.v.shape]


@every_case
def test_steps_follow_the_order_of_a_side_stream(case, device):
    """Inputs are written late on the same stream just before a step and overwritten just after it."""
    one = Step(case, device, sets=3)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    results = []
    with torch.cuda.stream(stream):
        for i in range(30):
            if i % 10 == 0:
                torch.cuda._sleep(SLEEP_CYCLES)
            one.load(i % 3)
            results.append(one.run())
            one.spoil()
    stream.synchronize()
    for i, got in enumerate(results):
        assert_same(got, one.wanted[i % 3], case)


@every_case
def test_streams_at_once_do_not_disturb_each_other(case, device):
    """The same kernels on four streams, many steps in flight on each."""
    streams = [torch.cuda.Stream(device) for _ in range(4)]
    sets = [make_inputs(replace(case, seed=seed), device) for seed in range(4)]
    wanted = [step(leaves(inputs), inputs.dout, inputs.dlse, case) for inputs in sets]
    torch.cuda.synchronize(device)
    for _ in range(5):
        results = [[] for _ in streams]
        for _ in range(8):
            for stream, inputs, found in zip(streams, sets, results, strict=True):
                with torch.cuda.stream(stream):
                    found.append(step(leaves(inputs), inputs.dout, inputs.dlse, case))
        torch.cuda.synchronize(device)
        for found, want in zip(results, wanted, strict=True):
            for got in found:
                assert_same(got, want, case)


def test_a_backward_runs_on_the_stream_of_its_forward(device):
    """Called while another stream is current, as autograd promises: it waits for the gradient it was given."""
    case = CASES[2]
    inputs = make_inputs(case, device)
    q, k, v = leaves(inputs)
    want = step((q, k, v), inputs.dout, None, case)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    from flash_hopper import flash_attn_func

    with torch.cuda.stream(stream):
        out = flash_attn_func(q, k, v, causal=True)
    late = torch.full_like(inputs.dout, float("nan"))
    torch.cuda._sleep(SLEEP_CYCLES)
    late.copy_(inputs.dout)
    grads = torch.autograd.grad(out, (q, k, v), late)
    torch.cuda.synchronize(device)
    assert_same((*want[:2], *grads), want, case)
