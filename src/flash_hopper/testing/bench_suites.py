"""Which shapes `bench` measures: the named suites.

A suite is a list of `BenchShape`s; `bench_run.py` measures them, `providers.py` says by whom. Shapes hold sizes only:
nothing is allocated here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem, varlen_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError, UnsupportedError
from flash_hopper.problem.tensor import TensorSpec
from flash_hopper.testing.lengths import lengths_of

PAPER_TOKENS = 16_384
PAPER_HIDDEN = 2048
PAPER_DIMS = (64, 128, 256)
PAPER_SEQLENS = (512, 1024, 2048, 4096, 8192, 16_384)
# the cells that targets and comparisons are stated for; the rest shows the course between them
MAIN_SEQLENS = (1024, 4096, 16_384)

# Training shapes, causal: (head dim, head dim of v, query heads, key heads)
TRAIN_TOKENS = 16_384
TRAIN_HEADS = (
    (128, 128, 32, 8),
    (128, 128, 64, 8),
    (192, 128, 16, 16),
    (96, 96, 32, 32),
    (192, 192, 16, 16),
)
TRAIN_SEQLENS = (4096, 8192)

# Ragged: 16k tokens in all, but for the tiny ones; sequences and the longest of them, by the word for their lengths
RAGGED_HIDDEN = 2048
RAGGED_DIMS = (64, 128)
RAGGED_LENGTHS = (("equal", 8, 2048), ("zipf", 64, 3455), ("one_long", 129, 8192), ("equal", 2000, 8))
ONE_LONG_OTHERS = 64
WINDOW_SEQLEN = 16_384
WINDOWS = (128, 1024, 4096)

LATER_SUITES = ("decode", "serve")
DIRECTIONS = ("forward", "backward")
QUANTISE = "quantise"  # of the fp8 suite: no attention, but q to e4m3
BACKWARD_FLOPS = 2.5  # five products of the forward's size, of which the forward has two


@dataclass(frozen=True, slots=True)
class BenchShape:
    """One attention to measure, forward or backward alone, or a quantisation. Field names are those of the JSON rows.

    `left`: window to the left. `lengths`: a word if the batch is packed; then `batch` is the number of its sequences, which
    have as many keys as queries, and `seqlen_q` = `seqlen_k` the length of the longest.
    """

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
    direction: str = "forward"
    left: int | None = None
    lengths: str | None = None

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        lengths = length_label(self.seqlen_q) if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}x{self.seqlen_k}"
        heads = f"h{self.heads}" if self.heads == self.heads_k else f"h{self.heads}/{self.heads_k}"
        lengths += f" {self.lengths}" if self.lengths else ""
        lengths += f" w{self.left}" if self.left is not None else ""
        return f"{self.dtype} d{dims_label(self.d, self.dv)} {mask} s{lengths} b{self.batch} {heads} {self.direction}"

    @property
    def is_fp8(self) -> bool:
        """True for e4m3 tensors."""
        return self.dtype is DType.E4M3

    @property
    def is_ragged(self) -> bool:
        """True for a packed batch."""
        return self.lengths is not None

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """(queries, keys) of every sequence."""
        if self.lengths is None:
            return ((self.seqlen_q, self.seqlen_k),) * self.batch
        if self.lengths == "one_long":
            others = ((ONE_LONG_OTHERS, ONE_LONG_OTHERS),) * (self.batch // 2)
            return (*others, (self.seqlen_q, self.seqlen_k), *others)
        return tuple((n, n) for n in lengths_of(self.lengths, self.batch, self.seqlen_q))

    @property
    def window(self) -> tuple[int | None, int | None]:
        """`window_size` as the call takes it."""
        return self.left, 0 if self.causal and self.left is not None else None

    @property
    def problem(self) -> AttentionProblem:
        """The request in canonical form; counts the floating-point operations of the forward."""
        return self.requested()

    def requested(self, **options: bool) -> AttentionProblem:
        """The request with more `AttentionOptions` than the mask."""
        asked = AttentionOptions(causal=self.causal, window_size=self.window, **options)
        sizes = {"q": (self.heads, self.d), "k": (self.heads_k, self.d), "v": (self.heads_k, self.dv)}
        q, k, v = (_spec(name, (*self.rows(name), *size), self.dtype) for name, size in sizes.items())
        if not self.is_ragged:
            return attention_problem(q, k, v, asked, dtypes=tuple(DType))
        cu_seqlens = [
            TensorSpec(f"cu_seqlens_{side}", (self.batch + 1,), (1,), None, "torch.int32", "cuda") for side in "qk"
        ]
        return varlen_problem(
            q, k, v, asked, cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1], seqused_q=None, seqused_k=None,
            max_seqlen_q=self.seqlen_q, max_seqlen_k=self.seqlen_k, dtypes=tuple(DType),
        )  # fmt: skip

    def rows(self, name: str) -> tuple[int, ...]:
        """Leading sizes of q, k or v: (batch, seqlen), or (rows of all sequences,)."""
        if not self.is_ragged:
            return self.batch, self.seqlen_q if name == "q" else self.seqlen_k
        return (sum(lengths[0 if name == "q" else 1] for lengths in self.sequences),)

    @property
    def flops(self) -> float:
        """Floating-point operations of the direction's matrix products, over visible scores only; 0 for a quantisation."""
        if self.direction == QUANTISE:
            return 0.0
        return self.problem.flops_of(self.sequences) * (BACKWARD_FLOPS if self.direction == "backward" else 1)

    @property
    def bytes_moved(self) -> int:
        """Bytes of q, k, v and out, each touched once; the backward's gradients count as well. Quantised is a q of 16 bits."""
        rows, keys = (math.prod(self.rows(name)) for name in ("q", "k"))
        if self.direction == QUANTISE:
            return rows * self.heads * self.d * (DType.BF16.itemsize + DType.E4M3.itemsize)
        if self.is_fp8:
            return rows * self.heads * (self.d + 2 * self.dv) + keys * self.heads_k * (self.d + self.dv)
        elements = (rows * self.heads + keys * self.heads_k) * (self.d + self.dv)
        return elements * self.dtype.itemsize * (2 if self.direction == "backward" else 1)


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
    """Small calls, where the time before the kernel starts is what counts, dense and packed."""
    shapes = [_square("host", dtype, 128, causal, 512, 2, 16) for causal in (False, True)]
    return shapes + [replace(shape, lengths="equal") for shape in shapes]


def cold(dtype: DType) -> list[BenchShape]:
    """The first call of a process, from a filled cache."""
    return [_square("cold", dtype, 128, False, 1024, 2, 16)]


def train(dtype: DType) -> list[BenchShape]:
    """Layers as they are trained: 16k tokens, causal, grouped queries, and head dims that are no power of two."""
    return [
        BenchShape("train", dtype, d, dv, True, seqlen, seqlen, TRAIN_TOKENS // seqlen, heads, heads_k)
        for d, dv, heads, heads_k in TRAIN_HEADS
        for seqlen in TRAIN_SEQLENS
    ]


def ragged(dtype: DType) -> list[BenchShape]:
    """Packed batches beside the dense one of the same tokens, and windows beside causal attention without one."""
    shapes = []
    for d in RAGGED_DIMS:
        heads = RAGGED_HIDDEN // d
        for causal in (False, True):
            _, batch, longest = RAGGED_LENGTHS[0]
            shapes.append(_square("ragged", dtype, d, causal, longest, batch, heads))
            shapes += [
                replace(_square("ragged", dtype, d, causal, longest, batch, heads), lengths=word)
                for word, batch, longest in RAGGED_LENGTHS
            ]
        whole = _square("ragged", dtype, d, True, WINDOW_SEQLEN, 1, heads)
        shapes += [whole, *(replace(whole, left=left) for left in WINDOWS)]
    return shapes


def fp8(dtype: DType) -> list[BenchShape]:
    """e4m3 attention in the main cells of the paper's shapes. Raises ArgumentError for a dtype other than that of its 16-bit peers."""
    if dtype is not DType.BF16:
        raise ArgumentError(f"suite fp8 compares with bf16, got {dtype}")
    return [
        _square("fp8", DType.E4M3, d, causal, seqlen, PAPER_TOKENS // seqlen, PAPER_HIDDEN // d)
        for d in PAPER_DIMS
        for causal in (False, True)
        for seqlen in MAIN_SEQLENS
    ]


def quantisations(shapes: Sequence[BenchShape]) -> list[BenchShape]:
    """For each head dim of some shapes the quantisation of a q, of the longest length."""
    longest = {shape.d: shape for shape in sorted(shapes, key=lambda shape: shape.seqlen_q)}
    return [replace(longest[d], causal=False, direction=QUANTISE) for d in sorted(longest)]


SUITES: dict[str, Callable[[DType], list[BenchShape]]] = {
    "paper": paper, "train": train, "host": host, "cold": cold, "ragged": ragged, "fp8": fp8
}  # fmt: skip
# what a suite measures if the caller does not say
DEFAULT_DIRECTIONS = {
    "paper": "forward",
    "train": "both",
    "host": "forward",
    "cold": "forward",
    "ragged": "both",
    "fp8": "forward",
}


def bench_suite(name: str, selection: Selection, direction: str | None = None) -> list[BenchShape]:
    """The selected shapes of a suite in a direction: forward, backward or both (None: what the suite is for).

    Raises ArgumentError for unknown names and for a selection that keeps nothing, UnsupportedError for what comes later.
    """
    if direction not in (None, "both", *DIRECTIONS):
        raise ArgumentError(f"direction must be forward, backward or both, got {direction!r}")
    if name in LATER_SUITES:
        raise UnsupportedError(f"suite {name} comes with a later release; there is {', '.join(SUITES)}")
    if name not in SUITES:
        raise ArgumentError(f"suite must be one of {', '.join(SUITES)}, got {name!r}")
    if name == "cold" and direction in ("backward", "both"):
        raise ArgumentError(f"suite cold measures the first forward call, got direction {direction}")
    if name == "fp8" and direction in ("backward", "both"):
        raise ArgumentError(
            f"suite fp8 measures the forward, as e4m3 attention has no backward, got direction {direction}"
        )
    if selection.dtype not in KERNEL_DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(map(str, KERNEL_DTYPES))}, got {selection.dtype}")
    shapes = SUITES[name](selection.dtype)
    kept = [shape for shape in shapes if selection.keeps(shape)]
    if not kept:
        dims, lengths = sorted({s.d for s in shapes}), sorted({s.seqlen_q for s in shapes})
        raise ArgumentError(f"no shape of suite {name} is selected; its head dims are {dims}, its lengths {lengths}")
    wanted = direction or DEFAULT_DIRECTIONS[name]
    found = [replace(shape, direction=d) for d in DIRECTIONS if wanted in (d, "both") for shape in kept]
    return found + quantisations(kept) if name == "fp8" else found


def dims_label(d: int, dv: int) -> str:
    """Head dims as they are shown: 128, or 192/128 where that of v differs."""
    return str(d) if d == dv else f"{d}/{dv}"


def length_label(length: int) -> str:
    """A sequence length as it is shown: 512, 1k, 16k."""
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def _square(suite: str, dtype: DType, d: int, causal: bool, seqlen: int, batch: int, heads: int) -> BenchShape:
    return BenchShape(suite, dtype, d, d, causal, seqlen, seqlen, batch, heads, heads)


def _spec(name: str, shape: tuple[int, ...], dtype: DType) -> TensorSpec:
    """A contiguous tensor."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return TensorSpec(name, shape, strides, dtype, str(dtype), "cuda")
