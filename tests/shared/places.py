"""Where a shared test runs: the CPU floor computes with the reference, the GPU floor with the kernels."""

import shutil
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

BATCH, HEADS, HEADS_K, SEQLEN_Q, SEQLEN_K = 2, 6, 2, 40, 70

HAS_C_COMPILER = any(map(shutil.which, ("cc", "gcc", "clang")))
needs_code_generation = pytest.mark.skipif(
    not HAS_C_COMPILER, reason="torch.compile's code needs a C compiler, also on a GPU, for the launchers of Triton"
)


class Place(NamedTuple):
    """A device, the dtype to compute in, and the error allowed relative to the largest value."""

    device: torch.device
    dtype: torch.dtype
    tolerance: float

    def normal(self, *shape: int, seed: int = 0) -> Tensor:
        """Standard normal values, the same on every device."""
        values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 7919 * len(shape) + sum(shape)))
        return values.to(self.device, self.dtype)

    def inputs(
        self,
        *,
        batch: int = BATCH,
        seqlen_q: int = SEQLEN_Q,
        seqlen_k: int = SEQLEN_K,
        heads: int = HEADS,
        heads_k: int = HEADS_K,
        d: int = 64,
        dv: int = 64,
        requires_grad: str = "qkv",
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; those named in `requires_grad` do."""
        q = self.normal(batch, seqlen_q, heads, d, seed=1)
        k = self.normal(batch, seqlen_k, heads_k, d, seed=2)
        v = self.normal(batch, seqlen_k, heads_k, dv, seed=3)
        return tuple(x.requires_grad_(name in requires_grad) for name, x in zip("qkv", (q, k, v), strict=True))

    def assert_close(self, got: Tensor | None, want: Tensor, name: str = "result") -> None:
        """Every element within the tolerance of the largest wanted value."""
        assert got is not None, f"{name} is missing"
        assert got.shape == want.shape, f"{name} is {tuple(got.shape)}, wanted {tuple(want.shape)}"
        if want.numel() == 0:
            return
        got, want = got.detach().double(), want.detach().double()
        infinite = ~want.isfinite()
        assert torch.equal(got[infinite], want[infinite]), f"{name} differs where {int(infinite.sum())} are not finite"
        got, want = got.masked_fill(infinite, 0.0), want.masked_fill(infinite, 0.0)
        error, size = float((got - want).abs().max()), float(want.abs().max())
        assert error <= self.tolerance * max(size, 1e-3), f"{name} is off by {error} where values are up to {size}"

    def assert_all_close(self, got, want) -> None:
        """`assert_close` for several results."""
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            self.assert_close(a, b, f"result {i}")
