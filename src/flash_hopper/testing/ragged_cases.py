"""The grid of ragged batches, forward and backward: packed and padded, with lengths of every kind.

Numbers of sequences around the 31 that a warp of the scheduler takes at once and beyond the 992 that one prepare block
takes; empty sequences everywhere; used lengths inside of the space that sequences have, with NaN in every row that none
uses; every mask, head dim, group, stride, value and hint. Called by `suites`.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.mask import MaskKind
from flash_hopper.testing.cases import DLSES, DOUTS, HINTS, LAYOUTS, Case, Dims, case_of
from flash_hopper.testing.window_cases import (
    BF16,
    FP16,
    HARMFUL,
    HEADS,
    MASKS,
    as_backward,
    is_served,
    settings_with,
    windows,
    with_directions,
)

KINDS: tuple[MaskKind, ...] = tuple(MASKS)
SIDES: tuple[dict[str, Any], ...] = (
    {"packed": "qk"},
    {"packed": "qk", "slack": 3},
    {"packed": "qk", "used": "qk", "slack": 9},
    {"packed": "qk", "used": "k", "slack": 70},
    {"packed": "qk", "used": "q", "slack": 5},
    {"packed": "q", "used": "k"},
    {"packed": "k", "used": "q", "slack": 2},
    {"used": "qk"},
)
"""Fields of `Case` for layouts in which both sides may have any lengths."""

ONE_SIDED: tuple[dict[str, Any], ...] = (
    {"packed": "q", "lengths_q": "random"},
    {"packed": "k", "lengths_k": "random"},
    {"used": "q", "lengths_q": "random"},
    {"used": "k", "lengths_k": "random"},
    {"packed": "q", "used": "q", "lengths_q": "zipf", "slack": 4},
    {"packed": "k", "used": "k", "lengths_k": "zipf", "slack": 4},
)
"""Layouts in which all sequences of one side have the same length."""

EMPTIES = (
    "empty_first", "empty_middle", "empty_last", "empty_run", "empty_every", "empty_most", "empty_all",
)  # fmt: skip


def ragged_case(
    dims: Dims | int, lengths: Dims, kind: MaskKind = "full", i: int = 0, *, batch: int = 5, heads: Dims = (2, 1),
    dtype: DType = BF16, **fields: Any,
) -> Case:  # fmt: skip
    """A forward case: the `i`-th mask of its kind, random lengths, both sides packed unless `fields` say what is or is used."""
    packed = "none" if "used" in fields else "qk"
    defaults: dict[str, Any] = {"packed": packed, "lengths_q": "random", "lengths_k": "random"}
    case = case_of(dims, lengths, batch=batch, heads=heads, dtype=dtype)
    return replace(case, **(defaults | MASKS[kind][i % len(MASKS[kind])] | fields))


def ragged() -> list[Case]:
    """The whole grid, dense windows and chunks first."""
    groups = (
        _batches, _empties, _sides, _grids, _long, _values, _layouts, _single_rows, _gradients, _scales, _hints, _without_lse, _nothing,
        _mixtures,
    )  # fmt: skip
    cases = windows() + [case for group in groups for case in group() if is_served(case)]
    cases = [replace(c, give_out=False) if i % 5 == 4 and not c.is_backward else c for i, c in enumerate(cases)]
    return list(dict.fromkeys(cases))


def _batches() -> Iterator[Case]:
    """Numbers of sequences, with lengths from empty to several tiles; thousands are tiny."""
    words = ("random", "zipf", "edges", "one_long", "same")
    for i, (batch, kind) in enumerate(itertools.product((1, 2, 30, 31, 32, 33, 61, 62, 63, 64, 93), KINDS)):
        for s, (dims, dtype) in enumerate(settings_with(kind)[i % 2 :: 2]):
            longest = 260 if batch < 30 else 130
            word = words[(i + s) % 5]
            case = ragged_case(
                dims, (longest, longest), kind, i + s, batch=batch, dtype=dtype, heads=HEADS[(i + s) % 4],
                lengths_q="random" if word == "same" else word, lengths_k=word, **SIDES[(i + s) % 3],
            )  # fmt: skip
            yield from with_directions(case, i + s)
    for i, (batch, kind) in enumerate(itertools.product((500, 992, 993, 1985, 2000), KINDS)):
        for j, longest in enumerate((8, 20)):
            case = ragged_case(
                (64, 128)[(i + j) % 2], (longest, longest), kind, i + j, batch=batch, heads=((2, 1), (1, 1))[j],
                lengths_q=("tiny", "random", "empty_every", "one_long")[(i + i // 4) % 4], lengths_k=("tiny", "random")[j], **(SIDES[(i + 2 * j) % len(SIDES)] | {"slack": 2}),
            )  # fmt: skip
            yield from with_directions(case, i + j)


def _empties() -> Iterator[Case]:
    """Empty sequences of queries, of keys, of both."""
    chosen: tuple[tuple[str, str], ...] = tuple(
        pair for word in EMPTIES for pair in ((word, "random"), ("random", word), (word, "same"))
    )
    for i, ((lengths_q, lengths_k), kind) in enumerate(itertools.product(chosen, KINDS)):
        case = ragged_case(
            (64, 128)[i % 2], (140, 140), kind, i, batch=(6, 9, 33)[i % 3], heads=HEADS[i % 4],
            lengths_q=lengths_q, lengths_k=lengths_k, **SIDES[i % len(SIDES)],
        )  # fmt: skip
        yield from with_directions(case, i)


def _sides() -> Iterator[Case]:
    """Every way in which the two sides may lie, with every mask."""
    for i, (side, kind) in enumerate(itertools.product((*SIDES, *ONE_SIDED), KINDS)):
        settings = settings_with(kind)
        for j in range(3):
            dims, dtype = settings[(i + j) % len(settings)]
            fields: dict[str, Any] = {"lengths_q": "equal", "lengths_k": "equal"} if side in ONE_SIDED else {}
            lengths = ((150, 150), (70, 210), (260, 90))[(i + j) % 3]
            case = ragged_case(
                dims, lengths, kind, i + j, batch=4 + i % 3, heads=HEADS[(i + j) % 5], dtype=dtype,
                values=HARMFUL[(i + j) % 4], **(fields | side),
            )  # fmt: skip
            yield from with_directions(case, i + j)


def _grids() -> Iterator[Case]:
    """One tile, and more tiles than a GPU has SMs, of few sequences and of many, tall tiles and those that heads share."""
    shapes = ((1, (1, 1), 90), (20, (16, 4), 300), (40, (16, 1), 200), (20, (20, 20), 100), (50, (16, 2), 110))
    for i, ((batch, heads, longest), kind) in enumerate(itertools.product(shapes, KINDS)):
        word = "equal" if batch == 1 else ("random", "zipf", "edges")[i % 3]
        fields: dict[str, Any] = {"batch": batch, "heads": heads, "lengths_q": word, "lengths_k": word}
        case = ragged_case(64, (longest, longest + 20), kind, i, **fields, **SIDES[0 if batch == 1 else i % 3])
        yield from with_directions(case, i)
        if batch == 1:
            yield replace(case, hint="loose")  # heads share tiles or not by the hint
        if longest > 128 and kind != "chunk":
            yield replace(case, return_lse=False) if kind == "local" else replace(case, scale=-0.2)
    for i, kind in enumerate(KINDS):
        yield ragged_case(128, (200, 240), kind, i, batch=(20, 40)[i % 2], heads=(16, 4))


def _long() -> Iterator[Case]:
    """Sequences of many tiles among short ones."""
    words = ("one_long", "zipf", "edges", "random")
    for i, (word, kind) in enumerate(itertools.product(words, KINDS)):
        for j, (dims, dtype) in enumerate(settings_with(kind)):
            lengths = ((900, 900), (500, 1200), (1200, 400))[(i + j) % 3]
            case = ragged_case(
                dims, lengths, kind, i + j, batch=(7, 12)[j % 2], heads=HEADS[(i + j) % 5], dtype=dtype,
                lengths_q=word, lengths_k=words[(i + j) % 4], **SIDES[(i + j) % 4],
            )  # fmt: skip
            yield from with_directions(case, i + j)


def _values() -> Iterator[Case]:
    """Every kind of values next to rows and keys of other sequences, and to NaN."""
    for i, (values, kind) in enumerate(itertools.product((*HARMFUL, "small", "large", "mixed"), KINDS)):
        for d in (64, 128):
            case = ragged_case(
                d, (200, 300), kind, i, batch=5, heads=(4, 2), values=values, **SIDES[(i + d // 64) % len(SIDES)]
            )
            yield from with_directions(case, i + d // 64)


def _layouts() -> Iterator[Case]:
    """Strides of packed and of padded tensors, for all operands and for one at a time."""
    plain = [layout for layout in LAYOUTS if layout not in ("bshd", "sbhd", "packed", "size1", "expand_batch")]
    for i, (layout, strided) in enumerate(itertools.product(plain, ("qkvo", "q", "k", "v", "o"))):
        if layout == "expand_heads" and strided == "o":
            continue
        case = ragged_case(
            (64, 128)[i % 2], (110, 170), ("full", "causal", "local")[i % 3], i, heads=(4, 2), layout=layout,
            strided=strided, **SIDES[i % len(SIDES)],
        )  # fmt: skip
        yield case
        if strided != "o":
            yield as_backward(case, strided=strided.replace("o", ""), deterministic=i % 2 == 0)
    for d, side in itertools.product((64, 128), SIDES[:3]):
        same = ragged_case(
            d, (120, 120), "causal", heads=(2, 2), layout="packed", strided="qkv", lengths_k="same", **side
        )
        for case in (replace(same, strided="kv"), same):
            if not (case.strided == "qkv" and case.used == "k"):
                yield from with_directions(case, d // 64)
    padded = ragged_case(64, (90, 140), "causal", used="qk", layout="sbhd", strided="qkvo")
    yield padded
    yield as_backward(padded, strided="qkv")
    one = ragged_case(128, (60, 90), batch=1, heads=(1, 1), layout="size1", strided="qkvo")
    yield one
    yield as_backward(one, strided="qkv")


def _single_rows() -> Iterator[Case]:
    """Padded entries of one row, on either side or on both, where the stride of rows is anything."""
    sides: tuple[dict[str, Any], ...] = ({"used": "qk"}, {"packed": "k", "used": "q"}, {"packed": "q", "used": "k"})
    shapes = ((sides[0], (1, 1)), (sides[0], (1, 150)), (sides[0], (90, 1)), (sides[1], (1, 150)), (sides[2], (90, 1)))
    plain = [layout for layout in LAYOUTS if layout not in ("packed", "expand_batch")]
    for i, (layout, (side, lengths)) in enumerate(itertools.product(plain, shapes)):
        case = ragged_case(
            (64, 128)[i % 2], lengths, KINDS[i % 4], i, batch=(40, 3)[i // 2 % 2], heads=HEADS[i % 4], layout=layout,
            strided="qkvo", **side,
        )  # fmt: skip
        yield case
        yield as_backward(case, strided="qkv", dout=layout if layout in DOUTS else "bshd", deterministic=i % 2 == 0)


def _gradients() -> Iterator[Case]:
    """Layouts of the gradients that come back, and subsets of those asked for."""
    for i, dout in enumerate(dout for dout in DOUTS if dout != "expand_batch"):
        for side in (SIDES[2], SIDES[7], SIDES[0]):
            case = ragged_case((64, 128)[i % 2], (130, 170), KINDS[i % 4], i, heads=(4, 2), **side)
            yield as_backward(case, dout=dout, dlse="bhs" if dout == "none" else "none", deterministic=i % 2 == 0)
    for i, (dlse, side) in enumerate(itertools.product((d for d in DLSES if d != "none"), SIDES)):
        case = ragged_case((64, 128)[i % 2], (150, 100), KINDS[i % 4], i, heads=(2, 2), **side)
        yield as_backward(case, dlse=dlse, deterministic=i % 3 == 0)
    for i, (grads, d) in enumerate(itertools.product(("q", "k", "v", "qk", "qv", "kv"), (64, 128))):
        case = ragged_case(d, (130, 200), ("causal", "local")[i % 2], i, heads=(4, 2), **SIDES[i % len(SIDES)])
        yield as_backward(case, grads=grads, deterministic=i % 4 < 2)
    for i, word in enumerate(("random", "empty_run", "one_long", "edges")):
        case = ragged_case(64, (300, 300), KINDS[i], i, heads=(4, 1), lengths_q=word, **SIDES[i])
        yield as_backward(case, values="gated", deterministic=i % 2 == 0)


def _scales() -> Iterator[Case]:
    """Softmax scales of any sign and size."""
    for i, (scale, side) in enumerate(itertools.product((0.0, 1e-4, 1.0, 20.0), SIDES[:4])):
        case = ragged_case((64, 128)[i % 2], (130, 150), KINDS[i % 4], i, scale=scale, **side)
        yield from with_directions(case, i)
    for i, side in enumerate(SIDES):
        case = ragged_case(64, (130, 150), ("full", "causal")[i % 2], scale=-0.2, values=HARMFUL[i], **side)
        yield from with_directions(case, i)


def _hints() -> Iterator[Case]:
    """max_seqlen of every kind, also far from the lengths."""
    for i, (hint, side) in enumerate(itertools.product(HINTS, (SIDES[0], SIDES[2], SIDES[5], SIDES[7]))):
        case = ragged_case((64, 128)[i % 2], ((60, 60), (300, 300))[i // 2 % 2], KINDS[i % 4], i, hint=hint, **side)
        yield from with_directions(case, i)


def _without_lse() -> Iterator[Case]:
    """The kernels that do not store the LSE."""
    for i, (kind, side) in enumerate(itertools.product(("causal", "local"), SIDES)):
        yield ragged_case(64, (130, 200), kind, i, return_lse=False, **side)
        yield as_backward(ragged_case(128, (130, 200), kind, i, return_lse=False, **side))


def _nothing() -> Iterator[Case]:
    """No sequences, no rows, no keys, no heads."""
    for i, (side, kind) in enumerate(itertools.product(SIDES, ("full", "causal", "local", "chunk"))):
        empty = ragged_case(64, (7, 9), kind, i, **side)
        for case in (
            replace(empty, batch=0),
            replace(empty, seqlen_q=0),
            replace(empty, seqlen_k=0),
            replace(empty, seqlen_q=0, seqlen_k=0, slack=0),
            replace(empty, heads=0, heads_k=0),
        ):
            if (i + case.seqlen_q) % 2:
                yield case
            else:
                yield as_backward(case, dlse=("none", "bhs")[i % 2], deterministic=i % 3 == 0)


def _mixtures() -> Iterator[Case]:
    """Draws over everything at once."""
    draw = random.Random(20_29)
    words = ("random", "zipf", "one_long", "edges", "tiny", "equal", *EMPTIES)
    made = 0
    while made < 560:
        kind = draw.choice(KINDS)
        dims, dtype = draw.choice(settings_with(kind))
        longest = draw.choice((30, 100, 260, 500))
        batch = draw.choice((1, 3, 6, 12)) if longest > 100 else draw.choice((5, 31, 64, 93))
        fields: dict[str, Any] = {
            "layout": draw.choice(("bshd", "bshd", *LAYOUTS)),
            "values": draw.choice(HARMFUL),
            "lengths_q": f"{draw.choice(words)}{draw.randint(0, 99)}",
            "lengths_k": f"{draw.choice(words)}{draw.randint(0, 99)}",
            "hint": draw.choice(tuple(HINTS)),
            "seed": made,
            **draw.choice(SIDES),
        }
        lengths = draw.randint(1, longest), draw.randint(1, longest)
        is_backward, deterministic = draw.random() < 0.6, draw.random() < 0.4 and dtype == BF16
        dout, dlse = draw.choice(tuple(DOUTS)), draw.choice(tuple(DLSES)) if dtype == BF16 else "none"
        try:
            case = ragged_case(
                dims, lengths, kind, draw.randint(0, 20), batch=batch, heads=draw.choice(HEADS), dtype=dtype, **fields
            )
            if is_backward:
                case = as_backward(case, strided="qkv", dout=dout, dlse=dlse, deterministic=deterministic)
        except ArgumentError:
            continue  # a combination that these sizes do not allow
        made += 1
        yield case


def accumulate() -> list[Case]:
    """Gradients added to float32 buffers, dense and ragged, on every route."""
    found = []
    dims: tuple[Dims | int, ...] = (64, 128, 256, 96, (192, 128), 40)
    masks = (("full", 0), ("causal", 0), ("local", 3))
    for i, (d, (kind, number), deterministic) in enumerate(itertools.product(dims, masks, (False, True))):
        heads: Dims = ((2, 2), (4, 2))[(i // 2 + i // 12) % 2]
        mask: dict[str, Any] = MASKS[kind][number]  # type: ignore[index]
        fields: dict[str, Any] = {"deterministic": deterministic, "into": ("zeros", "holes")[i // 2 % 2]}
        dense = replace(case_of(d, ((150, 260), (300, 170))[i // 2 % 2], batch=2, heads=heads), **mask)
        found.append(as_backward(dense, dlse=("none", "bhs")[i // 4 % 2], **fields))
        if d in (64, 128, 256):
            ragged = ragged_case(d, (200, 240), kind, number, batch=6, heads=heads, **SIDES[i % len(SIDES)])  # type: ignore[arg-type]
            found.append(as_backward(ragged, dlse=("bhs", "none")[i // 4 % 2], **fields))
    for i, (grads, d) in enumerate(itertools.product(("q", "k", "v", "qk", "qv", "kv"), (64, 128))):
        case = case_of(d, (130, 200), i % 2 == 0, heads=(4, 2))
        found.append(as_backward(case, grads=grads, into="holes", deterministic=i % 4 < 2))
    for values in ("extreme", "outlier", "gated"):
        found.append(as_backward(case_of(128, (300, 300), True, heads=(4, 2)), values=values, into="zeros"))
    for lengths in ((0, 5), (5, 0)):
        found.append(as_backward(case_of(64, lengths, batch=2), into="holes"))
    found.append(as_backward(ragged_case(64, (90, 90), "causal", lengths_q="empty_all"), into="zeros"))
    return list(dict.fromkeys(found))


# ---- smoke and sanitizer -------------------------------------------------------------------------------------


def smoke() -> list[Case]:
    """A cut through all kinds, small enough for the CPU."""
    base = ragged_case(32, (40, 50), "causal", batch=4, heads=(4, 2))
    dense = case_of(32, (70, 90), batch=2, heads=(4, 2))
    even = {"packed": "none", "lengths_q": "equal", "lengths_k": "equal"}
    of_masks = [(kind, i) for kind in KINDS for i in range(0, len(MASKS[kind]), 3)]
    cases: Iterable[Case] = itertools.chain(
        (replace(dense, **MASKS[kind][i]) for kind, i in of_masks),
        (ragged_case(16, (60, 60), kind, i, **SIDES[n % 8]) for n, (kind, i) in enumerate(of_masks)),
        (
            replace(base, lengths_q=word, lengths_k=("same", "random")[i % 2], seqlen_k=40)
            for i, word in enumerate(EMPTIES)
        ),
        (replace(base, **side) for side in SIDES),
        (replace(base, **(even | side)) for side in ONE_SIDED),
        (replace(base, hint=hint) for hint in HINTS),
        (replace(base, values=values, **SIDES[i % 8]) for i, values in enumerate(HARMFUL)),
        (replace(base, layout=layout, used="k", slack=4) for layout in ("headslice", "misaligned", "expand_heads")),
        (
            replace(base, batch=300, lengths_q="tiny", lengths_k="tiny"),
            replace(base, batch=0),
            replace(base, dtype=FP16),
        ),
        (replace(base, seqlen_q=0), replace(base, seqlen_k=0), replace(base, lengths_q="3.0.40.1")),
    )
    forward = list(cases)
    back = [as_backward(c, strided="qkv", dlse=("none", "bhs")[i % 2]) for i, c in enumerate(forward[::2])]
    return list(dict.fromkeys([*forward, *back]))


def sanitizer() -> list[Case]:
    """One or two tiles of each family of kernels; of those with several streams also so many that a scheduler warp finds two."""
    return [
        replace(case_of(64, (130, 150)), left=20, right=30),
        replace(case_of(128, (130, 170), heads=(2, 1)), left=40, causal=True),
        replace(case_of(64, (100, 140)), chunk=50),
        as_backward(replace(case_of(64, (130, 150)), left=20, right=30)),
        as_backward(replace(case_of(128, (90, 140)), left=33, causal=True), deterministic=True),
        as_backward(replace(case_of(64, (100, 140), heads=(2, 1)), chunk=50, causal=True)),
        ragged_case(64, (100, 140), "causal", batch=3),
        ragged_case(128, (100, 140), "local", 3, batch=3, packed="qk", used="qk", slack=5),
        ragged_case(64, (9, 12), "full", batch=40, heads=(24, 4), lengths_q="tiny", lengths_k="tiny"),
        ragged_case(64, (150, 70), "causal", batch=8, heads=(28, 4), lengths_q="150.0.64.129.1.150.128.20"),
        replace(case_of(64, (70, 80), batch=8, heads=(36, 4)), left=20, right=30),
        ragged_case(128, (70, 100), "full", batch=4, used="qk", lengths_q="empty_first"),
        ragged_case(256, (70, 90), "causal", batch=2),
        as_backward(ragged_case(64, (100, 140), "causal", batch=3), dlse="bhs"),
        as_backward(ragged_case(128, (100, 140), "full", batch=3, packed="qk", used="qk", slack=5)),
        as_backward(ragged_case(64, (90, 130), "local", 3, batch=3, lengths_k="empty_first"), deterministic=True),
        as_backward(ragged_case(128, (9, 12), "causal", batch=40, heads=(8, 4), lengths_q="tiny"), deterministic=True),
        as_backward(ragged_case(256, (70, 90), "full", batch=2, heads=(2, 2))),
    ]
