"""What `demo` computes: attention and a transformer block against float64, and what plain PyTorch makes of them.

The command line shows the results. On a CPU tensor everything runs through the CPU backend, on a GPU of compute
capability 9.0 through the kernels; with gradients on both.
"""

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import flash_hopper
from flash_hopper.problem.errors import ArgumentError, MissingDependencyError
from flash_hopper.problem.mask import Mask
from flash_hopper.reference import naive
from flash_hopper.testing.block import AttentionFunction, BlockSizes, make_block

TENSOR_NAMES = ("q", "k", "v")
HIDDEN_NAME = "hidden"


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest error against float64 of ours and of plain PyTorch in the same dtype, and the largest exact value."""

    what: str
    ours: float
    torch: float
    scale: float

    @property
    def passes(self) -> bool:
        """True if our error is at most twice PyTorch's, as the rule of `verify` has it for every element."""
        return self.ours <= 2 * self.torch + 1e-5 * max(self.scale, 1.0)


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file that the demo understands: q, k and v, or hidden, or both.

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim), hidden (batch, seqlen, hidden).
    Raises ArgumentError or MissingDependencyError.
    """
    try:
        from safetensors.torch import load_file  # an optional package
    except ImportError as missing:
        raise MissingDependencyError(
            "--input and --save need safetensors: pip install 'flash-hopper[demo]'"
        ) from missing
    if not path.is_file():
        raise ArgumentError(f"input must name a safetensors file, got {path}")
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except Exception as damage:  # the package raises its own types, which differ between versions
        raise ArgumentError(f"input {path} is no safetensors file: {damage}") from damage
    known = {name: t for name, t in tensors.items() if name in (*TENSOR_NAMES, HIDDEN_NAME)}
    has_qkv = [name in known for name in TENSOR_NAMES]
    if not known or any(has_qkv) != all(has_qkv):
        raise ArgumentError(f"input must hold q, k and v, or hidden; {path} holds {', '.join(tensors) or 'nothing'}")
    for name, t in known.items():
        rank = 3 if name == HIDDEN_NAME else 4
        if t.dim() != rank:
            raise ArgumentError(f"{name} in {path} must have {rank} dimensions, got shape {tuple(t.shape)}")
    return known


def save_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors in the form that `load_tensors` reads."""
    try:
        from safetensors.torch import save_file  # an optional package
    except ImportError as missing:
        raise MissingDependencyError(
            "--input and --save need safetensors: pip install 'flash-hopper[demo]'"
        ) from missing
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: t.cpu().contiguous() for name, t in tensors.items()}, path)


def random_qkv(
    sizes: BlockSizes, batch: int, seqlen: int, device: torch.device, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Standard normal q, k, v, the same on every device."""
    generator = torch.Generator().manual_seed(seed)

    def normal(heads: int) -> torch.Tensor:
        made = torch.randn(batch, seqlen, heads, sizes.head_dim, generator=generator)
        return made.to(device, dtype)

    return normal(sizes.heads), normal(sizes.heads_k), normal(sizes.heads_k)


def attention_accuracy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> list[Accuracy]:
    """Errors of out and of the gradients of q, k and v for a random gradient of out."""
    if causal and q.shape[1] != k.shape[1]:
        raise ArgumentError(f"the demo compares causal attention for equal lengths, got {q.shape[1]} and {k.shape[1]}")
    dout = _gradient_for((*q.shape[:3], v.shape[3]), q)
    exact = [
        _attend(_exact(causal), tuple(t[i : i + 1].double() for t in (q, k, v)), dout[i : i + 1].double())
        for i in range(q.shape[0])  # entry by entry: the scores of one are enough to hold
    ]
    runs = (
        _attend(_ours(causal), (q, k, v), dout),
        _attend(_torch(causal), (q, k, v), dout),
        [torch.cat(of_entries) for of_entries in zip(*exact, strict=True)],
    )
    names = ("out", "gradient of q", "gradient of k", "gradient of v")
    return [_accuracy(*of_one) for of_one in zip(names, *runs, strict=True)]


def block_accuracy(x: torch.Tensor, sizes: BlockSizes, seed: int) -> list[Accuracy]:
    """Errors of a transformer block with causal attention on hidden states x (batch, seqlen, hidden).

    The block runs in the dtype of x with ours and with PyTorch's attention, and in float64: its result, and for a random
    gradient of that the gradients of x and of the q/k/v weights.
    """
    exact_block = make_block(sizes, seed).to(x.device)
    block = copy.deepcopy(exact_block).to(x.dtype)
    dy = _gradient_for(tuple(x.shape), x)
    results = []
    for module, states, attention in (
        (block, x, _ours(True)),
        (block, x, _torch(True)),
        (exact_block, x.double(), _exact(True)),
    ):
        module.zero_grad()
        states = states.detach().requires_grad_()
        y = module(states, attention)
        y.backward(dy.to(y.dtype))
        assert states.grad is not None and module.qkv.weight.grad is not None, "backward reached no leaf"
        results.append([y.detach(), states.grad, module.qkv.weight.grad.clone()])
    names = ("block output", "gradient of the block's input", "gradient of the q/k/v weights")
    return [_accuracy(*of_one) for of_one in zip(names, *results, strict=True)]


def _ours(causal: bool) -> AttentionFunction:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(flash_hopper.flash_attn_func(q, k, v, causal=causal))

    return attention


def _torch(causal: bool) -> AttentionFunction:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        qh, kh, vh = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        out = F.scaled_dot_product_attention(qh, kh, vh, is_causal=causal, enable_gqa=q.shape[2] != k.shape[2])
        return out.transpose(1, 2)

    return attention


def _exact(causal: bool) -> AttentionFunction:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return naive.attention(q, k, v, softmax_scale=q.shape[-1] ** -0.5, mask=Mask(right=0 if causal else None))[0]

    return attention


def _attend(attention: AttentionFunction, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> list[torch.Tensor]:
    """out and the three gradients."""
    q, k, v = (t.detach().requires_grad_() for t in inputs)
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def _gradient_for(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """A seeded gradient, equal for every dtype that `like` may have (values of bf16 are exact in all of them)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(torch.bfloat16).to(like.device, like.dtype)


def _accuracy(what: str, ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> Accuracy:
    def worst(values: torch.Tensor) -> float:
        return float((values.double() - exact).abs().max())

    return Accuracy(what, worst(ours), worst(plain), float(exact.abs().max()))
