"""Training steps as CUDA graphs: captured by hand, by make_graphed_callables, and by torch.compile."""

import copy

import pytest
import torch
from places import needs_code_generation
from torch import nn

from flash_hopper import flash_attn_func

HEADS, HEADS_K, HEAD_DIM, BATCH, SEQLEN = 4, 2, 64, 2, 200
HIDDEN = HEADS * HEAD_DIM
STEPS = 10
# relative, between losses of two runs in bf16 whose sums are taken in different orders
TOLERANCE = 0.05


class Block(nn.Module):
    """Attention between two projections, and a residual connection if asked for."""

    def __init__(self, causal, deterministic, is_residual):
        super().__init__()
        self.is_residual = is_residual
        self.options = {"causal": causal, "deterministic": deterministic}
        self.norm = nn.RMSNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * HEADS_K) * HEAD_DIM, bias=False)
        self.proj = nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x):
        packed = self.qkv(self.norm(x)).unflatten(2, (HEADS + 2 * HEADS_K, HEAD_DIM))
        q, k, v = packed.split((HEADS, HEADS_K, HEADS_K), dim=2)
        out = self.proj(flash_attn_func(q, k, v, **self.options).flatten(2))
        return x + out if self.is_residual else out


class Training:
    """Two blocks that learn to give the mean of the rows that are put in."""

    def __init__(self, device, causal, deterministic=False):
        torch.manual_seed(0)
        blocks = (Block(causal, deterministic, is_residual) for is_residual in (True, False))
        self.model = nn.Sequential(*blocks).to(device, torch.bfloat16)
        self.optimizer = torch.optim.Adam(
            self.model.parameters(), lr=2e-3, capturable=torch.device(device).type == "cuda"
        )

    def loss(self, x):
        return (self.model(x).float() - x.float().mean(dim=1, keepdim=True)).square().mean()

    def step(self, x):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(x)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def inputs(device, count=STEPS):
    """Rows around a mean that differs from one batch entry to the next."""
    generator = torch.Generator().manual_seed(3)
    basis = torch.randn(4, HIDDEN, generator=generator) / 2
    made = []
    for _ in range(count):
        means = torch.randn(BATCH, 1, 4, generator=generator) @ basis
        noise = torch.randn(BATCH, SEQLEN, HIDDEN, generator=generator)
        made.append((means + noise).to(device, torch.bfloat16))
    return made


def eager_losses(device, causal, warm_up, batches):
    training = Training(device, causal)
    for x in warm_up:
        training.step(x)
    return [training.step(x).item() for x in batches]


def assert_losses_agree(got, want):
    assert max(want) > 1.5 * min(want), "the losses do not show whether anything was learned"
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert abs(a - b) <= TOLERANCE * b, f"step {i}: loss {a}, eagerly {b}"


def on_side_stream(device, function):
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_whole_training_step_can_be_captured_and_replayed(device, causal, deterministic):
    batches = inputs(device, 3 + STEPS)
    training = Training(device, causal, deterministic)
    static = batches[0].clone()

    def warm_up():
        for x in batches[:3]:
            static.copy_(x)
            training.step(static)

    on_side_stream(device, warm_up)
    graph = torch.cuda.CUDAGraph()
    training.optimizer.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph):
        loss = training.step(static)
    losses = []
    for x in batches[3:]:
        static.copy_(x)
        graph.replay()
        losses.append(loss.item())
    assert_losses_agree(losses, eager_losses(device, causal, batches[:3], batches[3:]))


def test_a_replay_gives_the_same_bits_as_an_eager_deterministic_step(device):
    q, k, v, dout = (
        torch.randn(2, 300, heads, 64, device=device, dtype=torch.bfloat16)
        for heads in (HEADS, HEADS_K, HEADS_K, HEADS)
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def gradients():
        out = flash_attn_func(*leaves, causal=True, deterministic=True)
        return torch.autograd.grad(out, leaves, dout)

    want = gradients()
    on_side_stream(device, gradients)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gradients()
    for _ in range(3):
        for x in got:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize(device)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_module_can_become_graphed_callables(device):
    batches = inputs(device)
    training = Training(device, causal=True)
    want = eager_losses(device, True, [], batches)
    sample = torch.zeros_like(batches[0]).requires_grad_()
    training.model[0] = torch.cuda.make_graphed_callables(training.model[0], (sample,))
    losses = [training.step(x.requires_grad_()).item() for x in batches]
    assert_losses_agree(losses, want)


@needs_code_generation
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_compiled_training_step_learns_the_same(device, causal, mode):
    """With mode="reduce-overhead" torch captures graphs, whose memory it takes back: nothing of ours may live in it."""
    torch._dynamo.reset()
    batches = inputs(device, 3 * STEPS)
    want = eager_losses(device, causal, [], batches)
    training = Training(device, causal)
    training.loss = torch.compile(training.loss, mode=mode, fullgraph=True)
    other = Training(device, causal)
    losses = []
    for x in batches:
        torch.compiler.cudagraph_mark_step_begin()
        losses.append(training.step(x).item())
        junk = [torch.full((1024,), -1, dtype=torch.int32, device=device) for _ in range(64)]
        other.loss(x).backward()
        del junk
    assert_losses_agree(losses, want)


@needs_code_generation
def test_a_compiled_forward_in_a_graph_serves_inference(device):
    torch._dynamo.reset()
    model = Training(device, causal=True).model.eval()
    compiled = torch.compile(copy.deepcopy(model), mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for x in inputs(device, 8):
            torch.compiler.cudagraph_mark_step_begin()
            got, want = compiled(x).float(), model(x).float()
            assert (got - want).abs().max() <= 0.05 * want.abs().max()


def test_calls_in_a_private_memory_pool_leave_nothing_in_it(device):
    """The first call of a stream keeps a counter; it must not come from a pool that goes away."""
    x = torch.randn(2, 300, HEADS, 64, device=device, dtype=torch.bfloat16)
    want = flash_attn_func(x, x, x, causal=True)
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            got = flash_attn_func(x, x, x, causal=True)
        assert torch.equal(got, want)
        del got, pool
        stream.synchronize()
        torch.cuda.empty_cache()
        junk = [torch.full((256,), -1, dtype=torch.int32, device=device) for _ in range(256)]
        assert torch.equal(flash_attn_func(x, x, x, causal=True), want)
        del junk
    stream.synchronize()
