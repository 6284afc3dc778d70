"""Trains a small transformer on a short text, with our attention and with PyTorch's, and compares the loss curves.

    python examples/train_tiny.py --steps 500 --device cuda --dtype bfloat16 --json curves.json

The trainings start from the same weights and see the same batches: with `flash_hopper.flash_attn_func` in the given dtype
(autocast over float32 weights), with SDPA's plain formula ("math") in the same dtype, and with it in float32. The curves
agree if ours stays about as close to the float32 one as PyTorch's in the same dtype does. Exits with 1 if they do not.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_hopper import flash_attn_func
from flash_hopper.testing.environment import environment

TEXT = Path(__file__).with_suffix(".txt")
SMOOTHING = 10  # steps that a point of a compared curve averages over
FLOOR = 1e-3  # nats between curves that nobody needs to explain; a gradient left out makes more in a dozen steps
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model and of its batches."""

    layers: int = 2
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 64
    seqlen: int = 128
    batch: int = 8
    learning_rate: float = 2e-3

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.heads * self.head_dim


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention, ours; (batch, seqlen, heads, head_dim) for all tensors here."""
    out = flash_attn_func(q, k, v, causal=True)
    assert isinstance(out, Tensor)
    return out


def math_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention by PyTorch's plain formula."""
    with sdpa_kernel(SDPBackend.MATH):
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (batch, heads, seqlen, head_dim)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


class Block(nn.Module):
    """Attention with grouped queries, then an MLP, both with RMSNorm in front and added to what came in."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.attention_norm = nn.RMSNorm(sizes.hidden)
        self.qkv = nn.Linear(sizes.hidden, (sizes.heads + 2 * sizes.heads_k) * sizes.head_dim, bias=False)
        self.proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(sizes.hidden)
        self.mlp = nn.Sequential(
            nn.Linear(sizes.hidden, 4 * sizes.hidden), nn.GELU(), nn.Linear(4 * sizes.hidden, sizes.hidden)
        )

    def forward(self, x: Tensor, attention: Attention) -> Tensor:
        """x: (batch, seqlen, hidden), and so is the result."""
        s = self.sizes
        packed = self.qkv(self.attention_norm(x)).unflatten(2, (s.heads + 2 * s.heads_k, s.head_dim))
        x = x + self.proj(attention(*packed.split((s.heads, s.heads_k, s.heads_k), dim=2)).flatten(2))
        mlp: Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp


class Transformer(nn.Module):
    """Predicts the next character of a text."""

    def __init__(self, sizes: Sizes, characters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, sizes.hidden)
        self.position = nn.Parameter(0.02 * torch.randn(sizes.seqlen, sizes.hidden))
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, characters, bias=False)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        """Logits (batch, seqlen, characters) for tokens (batch, seqlen)."""
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x, attention)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Batches:
    """An iterator over random pieces of a text, the same for the same seed."""

    def __init__(self, text: str, sizes: Sizes, seed: int) -> None:
        alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
        self.characters = len(alphabet)
        self.tokens = torch.tensor([alphabet[character] for character in text])
        self.sizes = sizes
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        first = torch.randint(len(self.tokens) - self.sizes.seqlen, (self.sizes.batch, 1), generator=self.generator)
        places = first + torch.arange(self.sizes.seqlen)
        return self.tokens[places], self.tokens[places + 1]


def train(
    attention: Attention, steps: int, device: torch.device, dtype: torch.dtype, sizes: Sizes, name: str
) -> list[float]:
    """The loss at each step, in nats a character. Weights and batches are the same for every attention and dtype."""
    data = Batches(TEXT.read_text(), sizes, seed=1)
    torch.manual_seed(0)
    model = Transformer(sizes, data.characters).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=sizes.learning_rate, betas=(0.9, 0.95))
    losses = []
    for tokens, targets in track(islice(data, steps), name, total=steps, console=Console(stderr=True), transient=True):
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(tokens.to(device), attention)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def gap(losses: list[float], reference: list[float]) -> float:
    """The largest distance between two curves, averaged over `SMOOTHING` steps."""
    difference = torch.tensor(losses, dtype=torch.float64) - torch.tensor(reference, dtype=torch.float64)
    width = min(SMOOTHING, len(losses))
    return float(difference.unfold(0, width, 1).mean(dim=1).abs().max())


def compare(steps: int, device: torch.device, dtype: torch.dtype, sizes: Sizes) -> dict[str, object]:
    """Three loss curves, how far two of them are from the third, and whether ours agrees."""
    curves = {"flash_hopper": train(flash_attention, steps, device, dtype, sizes, "flash_hopper")}
    for name, other in (("math", dtype), ("math_float32", torch.float32)):
        known = curves.get("math") if other == dtype else None
        curves[name] = known or train(math_attention, steps, device, other, sizes, name)
    ours, plain = (gap(curves[name], curves["math_float32"]) for name in ("flash_hopper", "math"))
    return {"losses": curves, "gap": ours, "gap_of_math": plain, "agrees": ours <= 2 * plain + FLOOR}


def main(
    steps: Annotated[int, typer.Option(min=0, help="Training steps; default: 500, on the CPU 30.")] = 0,
    device: Annotated[str, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = "",
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}; default: bfloat16, on the CPU float32.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write curves and environment to this file.")] = None,
) -> None:
    """Train with our attention and with PyTorch's, and compare the loss curves."""
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    if name not in DTYPES:
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, got {name}")
    steps = steps or (30 if place.type == "cpu" else 500)
    sizes = Sizes()
    result = compare(steps, place, DTYPES[name], sizes)
    console = Console()
    table = Table("step", f"flash_hopper, {name}", f"math, {name}", "math, float32", title="loss, nats a character")
    curves = result["losses"]
    assert isinstance(curves, dict)
    for step in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        table.add_row(str(step), *(f"{curve[step]:.4f}" for curve in curves.values()))
    console.print(table)
    verdict = "agrees" if result["agrees"] else "DOES NOT AGREE"
    console.print(
        f"{verdict}: our curve is at most {result['gap']:.4f} nats from float32, PyTorch's in {name} "
        f"{result['gap_of_math']:.4f} (mean of {min(SMOOTHING, steps)} steps)"
    )
    if json_file is not None:
        stored = {"env": environment(), "device": str(place), "dtype": name, "steps": steps, "sizes": asdict(sizes)}
        json_file.write_text(json.dumps(stored | result, indent=1) + "\n")
    raise typer.Exit(0 if result["agrees"] else 1)


if __name__ == "__main__":
    typer.run(main)
