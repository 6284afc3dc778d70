"""Which shapes `bench` measures: the named suites.

A suite is a list of `BenchShape`s; `bench_run.py` measures them, `providers.py` says by whom. Shapes hold sizes only:
nothing is allocated here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError, UnsupportedError
from flash_hopper.problem.tensor import TensorSpec

PAPER_TOKENS = 16_384
PAPER_HIDDEN = 2048
PAPER_DIMS = (64, 128, 256)
PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
# the cells that targets and comparisons are stated for; the rest shows the course between them
MAIN_SEQLENS = (1024, 4096, 16_384)

LATER_SUITES = ("train", "decode", "serve", "fp8")


@dataclass(frozen=True, slots=True)
class BenchShape:
    """One dense attention forward to measure. Field names are those of the JSON rows."""

    suite: str
    dtype: DType
    d: int
    dv: int
    causal: bool
    seqlen_q: int
    seqlen_k: int
    batch: int
    heads: int
    heads_k: int

    direction = "forward"

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        dims = f"d{self.d}" if self.d == self.dv else f"d{self.d}/{self.dv}"
        lengths = length_label(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        heads = f"h{self.heads}" if self.heads == self.heads_k else f"h{self.heads}/{self.heads_k}"
        return f"{self.dtype} {dims} {mask} s{lengths} b{self.batch} {heads}"

    @property
    def problem(self) -> AttentionProblem:
        """The request in canonical form; counts the floating-point operations."""
        q, k, v = (
            _packed_spec("q", (self.batch, self.seqlen_q, self.heads, self.d), self.dtype),
            _packed_spec("k", (self.batch, self.seqlen_k, self.heads_k, self.d), self.dtype),
            _packed_spec("v", (self.batch, self.seqlen_k, self.heads_k, self.dv), self.dtype),
        )
        return attention_problem(q, k, v, AttentionOptions(causal=self.causal), dtypes=tuple(DType))

    @property
    def bytes_moved(self) -> int:
        """Bytes of q, k, v and out, each touched once."""
        per_batch = self.seqlen_q * self.heads * (self.d + self.dv) + self.seqlen_k * self.heads_k * (self.d + self.dv)
        return self.batch * per_batch * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Selection:
    """Which shapes of a suite to keep; None keeps all. `dtype` is what the tensors are made of."""

    dtype: DType = DType.BF16
    dims: Sequence[int] | None = None
    seqlens: Sequence[int] | None = None
    causal: bool | None = None

    def keeps(self, shape: BenchShape) -> bool:
        """True if the shape is selected."""
        return (
            (self.dims is None or shape.d in self.dims)
            and (self.seqlens is None or shape.seqlen_q in self.seqlens)
            and (self.causal is None or shape.causal == self.causal)
        )


def paper(dtype: DType) -> list[BenchShape]:
    """16k tokens, hidden size 2048: head dims 64, 128, 256, full and causal, lengths 512 to 16k."""
    return [
        _square("paper", dtype, d, causal, seqlen, PAPER_TOKENS // seqlen, PAPER_HIDDEN // d)
        for d in PAPER_DIMS
        for causal in (False, True)
        for seqlen in PAPER_SEQLENS
    ]


def host(dtype: DType) -> list[BenchShape]:
    """Small calls, where the time before the kernel starts is what counts."""
    return [_square("host", dtype, 128, causal, 512, 2, 16) for causal in (False, True)]


def cold(dtype: DType) -> list[BenchShape]:
    """The first call of a process, from a filled cache."""
    return [_square("cold", dtype, 128, False, 1024, 2, 16)]


SUITES: dict[str, Callable[[DType], list[BenchShape]]] = {"paper": paper, "host": host, "cold": cold}


def bench_suite(name: str, selection: Selection, direction: str = "forward") -> list[BenchShape]:
    """The selected shapes of a suite.

    Raises ArgumentError for unknown names and for a selection that keeps nothing, UnsupportedError for what comes later.
    """
    if direction == "backward":
        raise UnsupportedError("direction backward: the backward kernels come with a later release")
    if direction != "forward":
        raise ArgumentError(f"direction must be forward or backward, got {direction!r}")
    if name in LATER_SUITES:
        raise UnsupportedError(f"suite {name} comes with a later release; there is {', '.join(SUITES)}")
    if name not in SUITES:
        raise ArgumentError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    if selection.dtype not in KERNEL_DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(map(str, KERNEL_DTYPES))}, got {selection.dtype}")
    shapes = SUITES[name](selection.dtype)
    kept = [shape for shape in shapes if selection.keeps(shape)]
    if not kept:
        dims, lengths = sorted({s.d for s in shapes}), sorted({s.seqlen_q for s in shapes})
        raise ArgumentError(f"no shape of suite {name} is selected; its head dims are {dims}, its lengths {lengths}")
    return kept


def length_label(length: int) -> str:
    """A sequence length as it is shown: 512, 1k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _square(suite: str, dtype: DType, d: int, causal: bool, seqlen: int, batch: int, heads: int) -> BenchShape:
    return BenchShape(suite, dtype, d, d, causal, seqlen, seqlen, batch, heads, heads)


def _packed_spec(name: str, shape: tuple[int, int, int, int], dtype: DType) -> TensorSpec:
    _, seqlen, heads, dim = shape
    return TensorSpec(name, shape, (seqlen * heads * dim, heads * dim, dim, 1), dtype, str(dtype), "cuda")
