"""A small transformer block around an attention function, and hidden states made from text.

What `demo` runs: norm, q/k/v projection, attention, output projection, MLP. The attention is handed in, so that the
same weights can be run with ours, with PyTorch's and in float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

AttentionFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Heads of q, heads of k and v, and their head dim; the hidden size is heads * head_dim."""

    heads: int
    heads_k: int
    head_dim: int

    @property
    def hidden(self) -> int:
        """Width of the hidden states."""
        return self.heads * self.head_dim


class TransformerBlock(nn.Module):
    """x + W_o attention(q, k, v) with q, k, v from RMSNorm(x), then x + MLP(RMSNorm(x))."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.sizes = sizes
        hidden = sizes.hidden
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, (sizes.heads + 2 * sizes.heads_k) * sizes.head_dim, bias=False)
        self.proj = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor, attention: AttentionFunction) -> torch.Tensor:
        """x, result: (batch, seqlen, hidden). `attention` takes and returns (batch, seqlen, heads, head_dim)."""
        x = x + self.proj(attention(*self.project(x)).flatten(2))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.mlp_norm(x)))))

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of x: slices of one packed tensor, as a model makes them."""
        s = self.sizes
        packed = self.qkv(self.attention_norm(x)).unflatten(2, (s.heads + 2 * s.heads_k, s.head_dim))
        q, k, v = packed.split((s.heads, s.heads_k, s.heads_k), dim=2)
        return q, k, v


def make_block(sizes: BlockSizes, seed: int) -> TransformerBlock:
    """A block in float64 on the CPU with seeded weights; cast and move it as needed."""
    block = TransformerBlock(sizes).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in block.parameters():
            if weight.dim() == 2:
                weight.copy_(
                    torch.randn(weight.shape, generator=generator, dtype=torch.float64) / weight.shape[1] ** 0.5
                )
    return block


def text_states(text: bytes, seqlen: int, hidden: int, seed: int) -> torch.Tensor:
    """Hidden states (1, seqlen, hidden) in float64 of a text's first bytes, repeated if it is short.

    A seeded embedding for each byte value plus sinusoidal positions. Unlike Gaussian inputs they repeat themselves, so
    some rows of the attention are sharp and others flat.
    """
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(256, hidden, generator=generator, dtype=torch.float64)
    repeats = -(-seqlen // max(len(text), 1))
    tokens = torch.tensor(list((text * repeats)[:seqlen]), dtype=torch.long)
    position = torch.arange(seqlen, dtype=torch.float64)[:, None]
    angle = position * 10_000.0 ** (-torch.arange(0, hidden, 2, dtype=torch.float64) / hidden)
    waves = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)[:, :hidden]
    return (table[tokens] + waves)[None]
