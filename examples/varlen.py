"""Attention over texts of different lengths, three ways: packed one behind the other, padded, and as a jagged tensor.

    python examples/varlen.py --device cuda --dtype bfloat16
    python examples/varlen.py "a text" "and a longer one" --window 8

A packed batch holds the tokens of all texts and nothing else, and `cu_seqlens` says where each begins; a padded one has rows
that nobody uses, and `seqused` says how many count; a jagged tensor is a packed batch that torch knows as one. The three give
the same outputs and the same gradients. Exits with 1 if they do not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from flash_hopper import flash_attn_func, flash_attn_varlen_func

TEXTS = (
    "Attention.",
    "Each text of a batch has a length of its own, and few of them are equal.",
    "",
    "A padded batch makes all of them as long as the longest one, and computes on the difference; a packed one does not.",
)
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
ROUNDINGS = 4  # units in the last place by which sums of the same values may differ


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the layer: grouped queries, one byte of text a token."""

    vocabulary: int = 256
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """tokens: (total,) int64, all texts one behind the other; lengths of each."""

    tokens: Tensor
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The most tokens of a text."""
        return max(self.lengths)

    @property
    def offsets(self) -> list[int]:
        """Where each text begins, and where the last one ends."""
        return list(accumulate(self.lengths, initial=0))


class Layer(nn.Module):
    """Embeddings of bytes and their projections to q, k and v, token by token; attention is computed in `dtype`."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype) -> None:
        super().__init__()
        self.sizes, self.dtype = sizes, dtype
        width = (sizes.heads + 2 * sizes.heads_k) * sizes.head_dim
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.projection = nn.Linear(width, width, bias=False)

    def forward(self, tokens: Tensor) -> list[Tensor]:
        """tokens: (...); q, k, v: (..., heads, head_dim)."""
        s = self.sizes
        heads = self.projection(self.embedding(tokens)).unflatten(-1, (-1, s.head_dim)).to(self.dtype)
        return list(heads.split((s.heads, s.heads_k, s.heads_k), dim=-2))


Way = Callable[[Layer, Batch, tuple[int | None, int | None]], Tensor]


def packed(layer: Layer, batch: Batch, window: tuple[int | None, int | None]) -> Tensor:
    """Rows of all texts and no others: (total, heads, head_dim)."""
    q, k, v = layer(batch.tokens)
    offsets = torch.tensor(batch.offsets, dtype=torch.int32, device=q.device)
    out = flash_attn_varlen_func(q, k, v, offsets, offsets, batch.longest, batch.longest, window_size=window)
    assert isinstance(out, Tensor)
    return out


def padded(layer: Layer, batch: Batch, window: tuple[int | None, int | None]) -> Tensor:
    """A rectangle of rows, of which `seqused` count; the result has the used ones only, as `packed`."""
    rows = torch.zeros(len(batch.lengths), batch.longest, dtype=torch.int64, device=batch.tokens.device)
    is_used = torch.arange(batch.longest) < torch.tensor(batch.lengths)[:, None]
    is_used = is_used.to(rows.device)
    rows[is_used] = batch.tokens
    q, k, v = layer(rows)
    used = torch.tensor(batch.lengths, dtype=torch.int32, device=q.device)
    out = flash_attn_varlen_func(
        q, k, v, None, None, batch.longest, batch.longest, seqused_q=used, seqused_k=used, window_size=window
    )
    assert isinstance(out, Tensor)
    return out[is_used]


def jagged(layer: Layer, batch: Batch, window: tuple[int | None, int | None]) -> Tensor:
    """A jagged tensor of torch, whose values are those of `packed`."""
    offsets = torch.tensor(batch.offsets, device=batch.tokens.device)
    q, k, v = (torch.nested.nested_tensor_from_jagged(t, offsets) for t in layer(batch.tokens))
    out = flash_attn_func(q, k, v, window_size=window)
    assert isinstance(out, Tensor)
    values = out.values()
    assert isinstance(values, Tensor)
    return values


WAYS: dict[str, Way] = {"packed": packed, "padded": padded, "jagged": jagged}


def batch_of(texts: tuple[str, ...], device: torch.device) -> Batch:
    """One token a byte."""
    encoded = [text.encode() for text in texts]
    return Batch(torch.tensor(list(b"".join(encoded)), dtype=torch.int64, device=device), tuple(map(len, encoded)))


def compare(batch: Batch, dtype: torch.dtype, window: tuple[int | None, int | None]) -> dict[str, tuple[float, float]]:
    """By way: how far its outputs, and its gradients of the embedding, are from those of `packed`, in units of what roundings
    of the dtype explain."""
    torch.manual_seed(0)
    layer = Layer(Sizes(), dtype).to(batch.tokens.device)
    found = {}
    for name, way in WAYS.items():
        layer.zero_grad()
        out = way(layer, batch, window)
        out.float().square().sum().backward()
        gradient = layer.embedding.weight.grad
        assert gradient is not None
        found[name] = out.detach(), gradient.clone()
    wanted = found["packed"]
    return {
        name: (_apart(out, wanted[0], dtype), _apart(gradient, wanted[1], dtype))
        for name, (out, gradient) in found.items()
    }


def _apart(found: Tensor, expected: Tensor, dtype: torch.dtype) -> float:
    allowed = ROUNDINGS * torch.finfo(dtype).eps * expected.float().abs().max().clamp_min(1e-30)
    return float((found.float() - expected.float()).abs().max() / allowed)


def main(
    texts: Annotated[list[str] | None, typer.Argument(help="At least one with a character in it.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[str, typer.Option(help=", ".join(DTYPES))] = "float32",
    window: Annotated[int, typer.Option(min=-1, help="Tokens that a token sees before itself; -1: all.")] = -1,
) -> None:
    """Show the batch and that the three ways agree."""
    batch = batch_of(tuple(texts or TEXTS), torch.device(device))
    rows = batch.longest * len(batch.lengths)
    console = Console()
    console.print(f"lengths {', '.join(map(str, batch.lengths))}: {len(batch.tokens)} tokens, padded to {rows} rows")
    differences = compare(batch, DTYPES[dtype], (window, 0))
    table = Table("batch", "rows", "outputs apart", "gradients apart", title="1: what roundings explain", box=None)
    for name, apart in differences.items():
        table.add_row(name, str(rows if name == "padded" else len(batch.tokens)), *(f"{x:.3f}" for x in apart))
    console.print(table)
    if max(max(apart) for apart in differences.values()) > 1:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
