"""The grid of dense sliding windows and attention chunks, forward and backward.

Either end bounded, both, none, with and without causal, from 0 to more than the lengths; chunks from 1 on; queries fewer
than, as many as and more than keys, so that rows and keys nobody sees are met; values that show what a mask lets through.
Head dims and masks are combined so that few kernels serve all cases. Called by `suites`, with `ragged_cases`.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.mask import MaskKind
from flash_hopper.testing.cases import Case, Dims, case_of

BF16, FP16 = DType.BF16, DType.FP16

MASKS: dict[MaskKind, tuple[dict[str, Any], ...]] = {
    "full": ({}, {"left": -1, "right": -1}),
    "causal": ({"causal": True}, {"right": 0}, {"causal": True, "left": -1, "right": 5}),
    "local": (
        {"left": 0, "right": 0}, {"left": 0}, {"right": 1}, {"left": 5, "right": 7}, {"left": 63, "causal": True},
        {"left": 64, "right": 64}, {"left": 65, "right": -1}, {"left": -1, "right": 63}, {"left": 100, "right": 3},
        {"left": 0, "causal": True}, {"left": 3, "right": 130}, {"left": 127, "right": 0}, {"left": 128, "right": 200},
        {"left": 17, "causal": True}, {"right": 90}, {"left": 31},
    ),
    "chunk": (
        {"chunk": 64}, {"chunk": 1}, {"chunk": 100, "causal": True}, {"chunk": 7}, {"chunk": 65, "left": 20, "right": 30},
        {"chunk": 128, "causal": True}, {"chunk": 63}, {"chunk": 200, "right": 9}, {"chunk": 2, "causal": True},
        {"chunk": 129, "left": 40},
    ),
}  # fmt: skip
"""Fields of `Case` for masks of each kind, to be taken in turn."""

SETTINGS: tuple[tuple[Dims | int, DType, tuple[MaskKind, ...]], ...] = (
    (64, BF16, ("full", "causal", "local", "chunk")),
    (128, BF16, ("full", "causal", "local", "chunk")),
    (64, FP16, ("local",)),
    (128, FP16, ("causal",)),
    (96, BF16, ("causal", "local")),
    ((192, 128), BF16, ("causal", "local")),
    (256, BF16, ("full", "local")),
)
"""Head dims, dtype, and the kinds of mask that cases with them have: what bounds the number of kernels."""

LENGTHS = (
    (130, 130), (100, 333), (333, 100), (1, 300), (257, 256), (64, 65), (65, 700), (700, 64), (190, 1), (400, 401),
    (128, 384), (450, 449), (5, 9), (192, 80), (321, 500),
)  # fmt: skip
HEADS = ((2, 2), (4, 2), (3, 1), (4, 1), (1, 1))
HARMFUL = ("normal", "extreme", "negative", "samesign", "slopes", "rising", "falling", "outlier", "onehot")


def settings_with(kind: MaskKind) -> list[tuple[Dims | int, DType]]:
    """Head dims and dtypes that meet masks of a kind."""
    return [(dims, dtype) for dims, dtype, kinds in SETTINGS if kind in kinds]


def as_backward(case: Case, **fields: Any) -> Case:
    """The case with its gradients."""
    return replace(case, direction="backward", give_out=False, **fields)


def with_directions(case: Case, i: int) -> Iterator[Case]:
    """A forward and a backward case; every third backward is deterministic, and others have a gradient of lse."""
    yield case
    if case.dtype == FP16:
        yield as_backward(case)
    else:
        yield as_backward(case, deterministic=i % 3 == 0, dlse=("none", "bhs", "none", "bsh")[i % 4])


def is_served(case: Case) -> bool:
    """False for a case that alone would need a kernel: one whose window cuts nothing at these lengths, for rare head dims.

    Kernels of fp16 neither are deterministic nor take a gradient of lse here: nothing of either depends on the dtype.
    """
    kind = case.mask.simplified(case.problem().seqlen_q, case.problem().seqlen_k).kind
    if case.dtype == FP16 and (case.deterministic or case.dlse != "none"):
        return False
    if case.dtype == BF16 and case.d == case.dv and (case.d == 128 or (case.d == 64 and case.is_ragged)):
        return True
    known = [kinds for dims, dtype, kinds in SETTINGS if (case.d, case.dtype) == (_head_dim(dims), dtype)]
    return not known or kind in (known[0] if case.is_ragged else {"local", "chunk"})


def _head_dim(dims: Dims | int) -> int:
    return dims[0] if isinstance(dims, tuple) else dims


def windows() -> list[Case]:
    """The whole grid."""
    groups = (_every_mask, _wide_windows, _every_length, _values, _layouts, _grids, _mixtures)
    return [case for group in groups for case in group() if is_served(case)]


def _every_mask() -> Iterator[Case]:
    """Every window and chunk with all head dims that meet its kind."""
    kinds: tuple[MaskKind, ...] = ("local", "chunk")
    for kind in kinds:
        pairs = itertools.product(enumerate(MASKS[kind]), enumerate(settings_with(kind)))
        for (m, mask), (s, (dims, dtype)) in pairs:
            i = 3 * m + s
            case = case_of(dims, LENGTHS[i % len(LENGTHS)], batch=1 + i % 2, heads=HEADS[(m + s) % 5], dtype=dtype)
            yield from with_directions(replace(case, values=HARMFUL[(m + 2 * s) % 4], **mask), m + s)


def _wide_windows() -> Iterator[Case]:
    """Windows and chunks as long as the lengths and longer: the kernels of full and causal attention may serve them."""
    for i, (sq, sk) in enumerate(((100, 100), (90, 200), (200, 90))):
        masks: tuple[dict[str, Any], ...] = (
            {"left": sk - 1, "right": sq - 1}, {"left": sk - 2, "right": sq - 2}, {"left": sk, "causal": True},
            {"left": 10**6, "right": 10**6}, {"left": 2**31 - 1, "causal": True}, {"left": 2**40, "right": 2**40},
            {"chunk": sk}, {"chunk": sk, "causal": True}, {"chunk": sk - 1, "causal": True}, {"chunk": 10**9},
            {"right": sq - 2}, {"right": sq - 1}, {"left": sk - 2, "chunk": sk + 1},
        )  # fmt: skip
        for j, mask in enumerate(masks):
            case = replace(case_of(128, (sq, sk), heads=((4, 2), (2, 2))[(i + j) % 2]), **mask)
            yield from with_directions(case, 3 * i + j)


def _every_length() -> Iterator[Case]:
    """Lengths around tile edges: rows that see nothing above, keys that nobody sees on both sides."""
    lengths = (1, 2, 63, 65, 129, 193, 385)
    masks: tuple[dict[str, Any], ...] = (
        {"left": 10, "right": 10}, {"left": 40, "causal": True}, {"right": 20}, {"left": 0}, {"chunk": 50},
        {"chunk": 70, "causal": True},
    )  # fmt: skip
    for i, pair in enumerate(itertools.product(lengths, lengths)):
        for j in (i, i + 1, i + 3):
            case = replace(case_of((64, 128)[(i + j // 3) % 2], pair, heads=(2, 1)), **masks[j % 6])
            case = replace(case, values=HARMFUL[(i + j) % 4])
            yield as_backward(case, deterministic=i % 3 == 0, dlse=("none", "bhs")[j % 2]) if (i + j) % 3 else case


def _values() -> Iterator[Case]:
    """Every kind of values that moves the maximum, over several blocks, with a window that moves along."""
    masks: tuple[dict[str, Any], ...] = ({"left": 100, "right": 60}, {"left": 200, "causal": True}, {"chunk": 150})
    for i, (values, d) in enumerate(itertools.product(HARMFUL, (64, 128, 256))):
        mask = masks[i % (3 if d < 256 else 2)]
        case = replace(case_of(d, (300, 700), batch=2, heads=(2, 1)), values=values, **mask)
        yield from with_directions(case, i)


def _layouts() -> Iterator[Case]:
    """Strides, with a window."""
    for i, layout in enumerate(("bhsd", "headslice", "dimslice", "misaligned", "misstride", "expand_heads")):
        case = case_of((64, 128)[i % 2], (130, 200), batch=2, heads=(4, 2))
        case = replace(case, layout=layout, strided="qkv", left=30 + i, right=20)
        yield from with_directions(case, i)


def _grids() -> Iterator[Case]:
    """One tile, and more tiles than a GPU has SMs: CTAs, and streams of a CTA, with none, one and several."""
    shapes = ((1, (1, 1), (100, 130)), (3, (40, 8), (260, 300)), (5, (30, 1), (130, 65)))
    windows: tuple[dict[str, Any], ...] = ({"left": 90, "right": 60}, {"left": 70, "causal": True})
    chunks: tuple[dict[str, Any], ...] = ({"chunk": 90},)
    kinds = ((64, BF16, (*windows, *chunks)), (64, FP16, windows), (128, BF16, (*windows, *chunks)))
    for i, ((batch, heads, lengths), (d, dtype, masks)) in enumerate(itertools.product(shapes, kinds)):
        for j, mask in enumerate(masks):
            case = case_of(d, lengths, batch=batch, heads=heads, dtype=dtype)
            yield from with_directions(replace(case, **mask), i + j)


def _mixtures() -> Iterator[Case]:
    """Draws over masks, lengths and all else; longer ones among them."""
    draw = random.Random(20_28)
    for i in range(220):
        kind: MaskKind = "local" if i % 3 else "chunk"
        dims, dtype = draw.choice(settings_with(kind))
        longest = draw.choice((100, 400, 1100))
        case = case_of(
            dims, (draw.randint(1, longest), draw.randint(1, longest)), batch=draw.randint(1, 3),
            heads=draw.choice(HEADS), dtype=dtype,
        )  # fmt: skip
        bound = draw.choice((8, 150, 600))
        mask: dict[str, Any] = {"left": draw.randint(0, bound), "right": draw.randint(0, bound)}
        if kind == "chunk":
            mask = {"chunk": draw.randint(1, bound + 1), "causal": draw.random() < 0.5}
        elif draw.random() < 0.5:
            mask = {"left": draw.randint(0, bound), "causal": True}
        case = replace(case, values=draw.choice(HARMFUL), **mask)
        yield as_backward(case, deterministic=dtype == BF16 and draw.random() < 0.4) if i % 2 else case
