"""The grid of e4m3 attention: codes, descales in every form, and a v that is transposed already or comes in rows.

Lengths over every residue of every tile, every head dim, masks, groups, ragged batches, and values that show one kind of fault
each: values of one sign (sums in the tensor core), one key a row (the order of keys in a transposed v), rows of zeros,
saturation, blocks of very different size (descales). Head dims, masks and forms are combined so that few kernels serve all
cases. Called by `suites`; what is allowed says `fp8_errors`.
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.mask import MaskKind
from flash_hopper.testing.cases import FP8_VALUES, LAYOUTS, Case, Dims, case_of
from flash_hopper.testing.ragged_cases import EMPTIES, ONE_SIDED, SIDES
from flash_hopper.testing.window_cases import HEADS, MASKS

MAIN_DIMS = (64, 128, 256)
VALUES = ("normal", "samesign", "onehot", "outlier", "mixed", "small", "slopes", "negative", "extreme", *FP8_VALUES)
TURNS = ("normal", "samesign", "onehot", "ramp")
KINDS: tuple[MaskKind, ...] = ("full", "causal", "local")
BOTH: tuple[MaskKind, ...] = KINDS[:2]
BLOCKS, HEAD_FORM = "bbb", "hhh"
ROW_TILES = {64: 192, 128: 128, 256: 128}  # what residues of query lengths are swept over


def fp8_case(
    dims: Dims | int,
    lengths: Dims,
    kind: MaskKind = "full",
    i: int = 0,
    *,
    batch: int = 1,
    heads: Dims = (2, 2),
    **fields: Any,
) -> Case:
    """A case with transposed values and blocks of descales, and the `i`-th mask of its kind, unless `fields` say otherwise."""
    case = case_of(dims, lengths, batch=batch, heads=heads, dtype=DType.E4M3)
    defaults: dict[str, Any] = {"descales": BLOCKS, "v_form": "transposed"}
    return replace(case, **(defaults | MASKS[kind][i % len(MASKS[kind])] | fields))


def fp8() -> list[Case]:
    """The whole grid with transposed values, and a cut through it with v in rows."""
    groups = (
        _residues, _head_dims, _head_ratios, _descales, _values, _masks, _causal_lengths, _ragged, _scales, _long, _outputs, _layouts,
        _empty, _mixtures,
    )  # fmt: skip
    cases = [case for group in groups for case in group()]
    cases = [replace(c, give_out=False) if i % 5 == 4 and _may_allocate(c) else c for i, c in enumerate(cases)]
    return list(dict.fromkeys([*cases, *in_rows()]))


def _may_allocate(case: Case) -> bool:
    return case.layout == "bshd" and case.out_dtype == DType.BF16


def _residues() -> Iterator[Case]:
    """Every residue of the rows of a tile and of its keys: padded rows and keys, blocks of descales that are not full."""
    for d, tile in ROW_TILES.items():
        for i in range(0, max(tile, 128), 1 if d < 256 else 2):
            kind = KINDS[i // 2 % 2]
            seqlen_q = i + (tile if i % 3 == 0 or i == 0 else 0)
            seqlen_k = (7 * i + 3) % 128 + 128 * (i % 4)
            yield fp8_case(
                d,
                (seqlen_q, max(seqlen_k, 1)),
                kind,
                batch=1 + i % 2,
                heads=(2, 1 + i // 2 % 2),
                values=TURNS[(i // 4 + i) % 4],
            )


def _head_dims() -> Iterator[Case]:
    """Every head dim, both masks; v with its own; dims below the smallest tile."""
    for i, d in enumerate(range(64, 257, 16)):
        for j, kind in enumerate(BOTH):
            yield fp8_case(d, (64 + 7 * d % 61, 100 + 11 * d % 250), kind, batch=2, values=TURNS[(i + j) % 4])
            yield fp8_case(d, (200 + 5 * d % 51, 300 + 13 * d % 170), kind, heads=(3, 1), values=TURNS[(i + j + 1) % 4])
    pairs: tuple[Dims, ...] = ((192, 128), (128, 64), (64, 128), (16, 16), (48, 32), (80, 112), (256, 64), (112, 48))
    for i, dims in enumerate(pairs):
        for j, values in enumerate(TURNS):
            yield fp8_case(dims, (77, 150 + 90 * j), KINDS[(i + j) % 2], batch=2, heads=(4, 2), values=values)


def _head_ratios() -> Iterator[Case]:
    """Query heads a key head, with a descale of each key head and of each block."""
    ratios = (
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 1),
        (5, 1),
        (7, 1),
        (8, 1),
        (16, 1),
        (40, 1),
        (6, 2),
        (12, 4),
        (10, 2),
        (21, 3),
        (32, 2),
        (40, 8),
    )
    for i, (heads, d) in enumerate(itertools.product(ratios, (64, 128))):
        form = (BLOCKS, HEAD_FORM)[(i // 2 + i) % 2]
        yield fp8_case(d, (65 + i % 70, 130 + 3 * i % 90), KINDS[i % 2], batch=1 + i % 3, heads=heads, descales=form)


def _descales() -> Iterator[Case]:
    """All forms of descales together with all others."""
    for i, forms in enumerate(itertools.product("nhb", "nhb", "nhb")):
        for d in (64, 128):
            yield fp8_case(
                d, (150, 300), KINDS[(i + d // 64) % 2], batch=3, heads=(4, 2), descales="".join(forms), values="mixed"
            )
    for i, form in enumerate(("000", "111", "01n", "b0h", "1b1", "h10")):
        yield fp8_case(MAIN_DIMS[i % 3], (200, 260), KINDS[i % 2], batch=2, heads=(4, 2), descales=form)
        yield fp8_case(
            64, (140, 140), KINDS[i % 2], batch=4, descales=form, packed="qk", lengths_q="random", lengths_k="random"
        )


def _values() -> Iterator[Case]:
    """Every kind of values, short and over several blocks; blocks whose descales differ by powers of ten."""
    for i, (values, d, kind) in enumerate(itertools.product(VALUES, MAIN_DIMS, BOTH)):
        lengths = ((130, 700), (67, 1100), (300, 513))[i % 3]
        form = HEAD_FORM if values != "blocks" and i % 4 == 0 else BLOCKS
        yield fp8_case(d, lengths, kind, batch=2, heads=(4, 2), values=values, descales=form)
    for d, kind in itertools.product(MAIN_DIMS, KINDS):
        yield fp8_case(d, (260, 260), kind, 4, values="onehot", heads=(4, 4))


def _masks() -> Iterator[Case]:
    """Windows and chunks of every kind."""
    kinds: tuple[MaskKind, ...] = ("local", "chunk")
    for kind in kinds:
        for i, d in itertools.product(range(len(MASKS[kind])), MAIN_DIMS[:2] if kind == "chunk" else MAIN_DIMS):
            lengths = ((130, 130), (100, 333), (333, 100), (1, 300), (257, 256), (321, 500))[(i + d // 64) % 6]
            yield fp8_case(d, lengths, kind, i, batch=1 + i % 2, heads=HEADS[i % 5], values=TURNS[(i + d // 128) % 4])


def _causal_lengths() -> Iterator[Case]:
    """Bottom-right causal around tile edges: more rows than keys, as many, fewer."""
    lengths = (1, 2, 63, 65, 127, 129, 193, 385)
    for i, pair in enumerate(itertools.product(lengths, lengths)):
        yield fp8_case((64, 128)[(i + i // 8) % 2], pair, "causal", heads=(2, 1), values=TURNS[i % 4])


def _ragged() -> Iterator[Case]:
    """Packed and padded batches, lengths of every kind, NaN in every row that no sequence uses."""
    for i, (side, kind) in enumerate(itertools.product((*SIDES, *ONE_SIDED), KINDS)):
        for j in range(2):
            fields: dict[str, Any] = {"lengths_q": "random", "lengths_k": "random"}
            if side in ONE_SIDED:
                fields = {"lengths_q": "equal", "lengths_k": "equal"}
            lengths = ((150, 150), (70, 210), (260, 300))[(i + j) % 3]
            form = BLOCKS if (i // 3 + j) % 3 or kind == "local" else HEAD_FORM
            yield fp8_case(
                MAIN_DIMS[(i + 2 * j) % 3], lengths, kind, i + j, batch=4 + i % 3, heads=HEADS[(i + j) % 5], descales=form,
                values=TURNS[(i + j) % 4], **(fields | side),
            )  # fmt: skip
    words = ("zipf", "edges", "one_long", "tiny", *EMPTIES)
    for i, (word, kind) in enumerate(itertools.product(words, KINDS[:2])):
        yield fp8_case(
            MAIN_DIMS[i % 2], (300, 300), kind, i, batch=(7, 12, 33)[i % 3], heads=HEADS[i % 4], lengths_q=word,
            lengths_k=("random", word)[i % 2], values=TURNS[i % 4], **SIDES[i % 4],
        )  # fmt: skip
    for i, batch in enumerate((1, 2, 31, 32, 33, 64, 500, 993)):
        yield fp8_case(
            MAIN_DIMS[i % 2],
            (20, 40),
            KINDS[i % 2],
            i,
            batch=batch,
            packed="qk",
            lengths_q="random",
            lengths_k="tiny",
            slack=2,
        )


def _scales() -> Iterator[Case]:
    """Softmax scales of any sign and size."""
    for i, (scale, d) in enumerate(itertools.product((0.0, -0.1, 1e-4, -1.0, 1.0), (64, 128))):
        yield fp8_case(d, (120, 333), KINDS[i % 2], heads=(4, 1), scale=scale)
        yield fp8_case(d, (90, 290), KINDS[i % 2], batch=2, scale=scale, values="samesign")


def _long() -> Iterator[Case]:
    """Thousands of keys: values of one sign, whose sums are wrong by a quarter if the tensor core adds up all of them."""
    for d, seqlen_k in itertools.product(MAIN_DIMS, (4096, 16_384)):
        yield fp8_case(d, (64, seqlen_k), heads=(1, 1), values="samesign")
        yield fp8_case(d, (64, seqlen_k), heads=(1, 1), values="zeros", descales=HEAD_FORM)
    for i, d in enumerate(MAIN_DIMS):
        yield fp8_case(d, (32, 65_536), heads=(1, 1), values="samesign", descales=HEAD_FORM)
        yield fp8_case(d, (1500, 4001), "causal", heads=(2, 1), values=TURNS[i])
        yield fp8_case(d, (1024, 2048), "local", 11, heads=(2, 1), values="samesign")
        yield fp8_case(
            d,
            (900, 3000),
            "causal",
            batch=3,
            packed="qk",
            lengths_q="one_long",
            lengths_k="one_long",
            values="samesign",
        )


def _outputs() -> Iterator[Case]:
    """Kernels that do not store LSE; float16 results."""
    for d, kind, lengths in itertools.product(MAIN_DIMS, BOTH, ((1, 90), (200, 400))):
        yield fp8_case(d, lengths, kind, batch=2, heads=(4, 2), return_lse=False)
    for kind, lengths in itertools.product(BOTH, ((1, 90), (200, 400), (130, 128))):
        yield fp8_case(128, lengths, kind, batch=2, heads=(4, 2), out_dtype=DType.FP16)


def _layouts() -> Iterator[Case]:
    """Strides of q, k and out."""
    plain = [layout for layout in LAYOUTS if layout not in ("bshd", "packed", "size1")]
    for i, layout in enumerate(plain):
        strided = "qk" if layout.startswith("expand") else "qko"
        yield fp8_case(
            (64, 128)[i % 2], (130, 200), KINDS[i // 2 % 2], batch=2, heads=(4, 2), layout=layout, strided=strided
        )
        if layout not in ("sbhd", "expand_batch"):
            yield fp8_case(
                (128, 64)[i % 2], (110, 170), KINDS[i % 2], batch=3, heads=(4, 2), layout=layout, strided=strided,
                lengths_q="random", lengths_k="random", **SIDES[i % 3],
            )  # fmt: skip
    yield fp8_case(128, (1, 300), batch=1, heads=(1, 1), layout="size1", strided="qko")


def _empty() -> Iterator[Case]:
    """Sizes of zero: an empty result, or rows without keys."""
    for i, kind in enumerate(BOTH):
        for lengths in ((0, 5), (5, 0), (0, 0)):
            yield fp8_case(64, lengths, kind, batch=2, return_lse=i == 0)
            yield fp8_case(
                128, lengths, kind, batch=2, packed="qk", lengths_q="equal", lengths_k="equal", return_lse=i == 0
            )
        yield fp8_case(64, (5, 7), kind, batch=0)
        yield fp8_case(64, (5, 7), kind, heads=(0, 0))


def _mixtures() -> Iterator[Case]:
    """Draws over everything at once."""
    draw = random.Random(20_31)
    made = 0
    while made < 110:
        kind = draw.choice(KINDS)
        longest = draw.choice((60, 300, 1200))
        fields: dict[str, Any] = {
            "values": draw.choice(VALUES),
            "descales": "".join(draw.choice("nhb1") for _ in range(2)) + "b",
            "seed": made,
        }
        if fields["values"] in ("tiny", "blocks"):
            fields["descales"] = BLOCKS
        if draw.random() < 0.5:
            words = ("random", "zipf", "one_long", "edges", *EMPTIES)
            fields |= {f"lengths_{side}": f"{draw.choice(words)}{draw.randint(0, 99)}" for side in "qk"} | draw.choice(
                SIDES
            )
        try:
            case = fp8_case(
                draw.choice(MAIN_DIMS), (draw.randint(1, longest), draw.randint(1, longest)), kind, draw.randint(0, 20),
                batch=draw.randint(1, 8), heads=draw.choice(HEADS), **fields,
            )  # fmt: skip
        except ArgumentError:
            continue  # a combination that these sizes do not allow
        made += 1
        yield case


def in_rows() -> list[Case]:
    """A cut through the grid with v in rows, dense and ragged."""
    found = [
        fp8_case(d, lengths, kind, batch=2, heads=(4, 2), values=values, v_form="rows")
        for (d, kind), (lengths, values) in itertools.product(
            itertools.product(MAIN_DIMS, KINDS),
            (
                ((130, 257), "onehot"),
                ((70, 385), "samesign"),
                ((200, 64), "normal"),
                ((1, 1), "normal"),
                ((300, 1001), "blocks"),
            ),
        )
    ]
    for i, (d, side) in enumerate(itertools.product(MAIN_DIMS, SIDES)):
        fields: dict[str, Any] = {"lengths_q": "random", "lengths_k": "random", "v_form": "rows", **side}
        found.append(fp8_case(d, (150, 300), KINDS[i % 3], i, batch=6, values=TURNS[i % 4], **fields))
    for i, d in enumerate(range(16, 257, 16)):
        dims, keys = (max(d, 64), d), 1 + (37 * i + 90) % 128 + 128 * (i % 3)
        found.append(
            fp8_case(dims, (90 + i, keys), BOTH[i % 2], batch=2, heads=HEADS[i % 5], values=TURNS[i % 4], v_form="rows")
        )
    odd: tuple[Dims, ...] = ((64, 16), (64, 32), (64, 48), (128, 112), (256, 240))  # of plans that others need, too
    for i, (dims, word) in enumerate(itertools.product(odd, ("random", "edges", "tiny", "empty_first"))):
        fields = {"lengths_q": "equal", "lengths_k": word, "v_form": "rows", **SIDES[(i + i // 4) % len(SIDES)]}
        found.append(fp8_case(dims, (40, 90 + 37 * i % 128), BOTH[i % 2], batch=5 + i, values=TURNS[i % 4], **fields))
    for layout in ("bhsd", "headslice", "misaligned", "misstride", "expand_heads"):
        found.append(
            fp8_case(128, (130, 200), "causal", batch=2, heads=(4, 2), layout=layout, strided="kv", v_form="rows")
        )
    found += [fp8_case(64, lengths, batch=2, v_form="rows") for lengths in ((5, 0), (0, 5))]
    return found


def sanitizer() -> list[Case]:
    """One or two tiles of each kind of kernel, and so many that a scheduler warp finds two."""
    return [
        fp8_case(64, (100, 200)),
        fp8_case(64, (9, 70), "causal", batch=4, heads=(35, 5)),
        fp8_case(64, (230, 150), "causal", heads=(2, 1), descales=HEAD_FORM),
        fp8_case(64, (100, 300), "local", 3),
        fp8_case(128, (130, 300)),
        fp8_case(128, (150, 200), "causal", heads=(3, 1)),
        fp8_case(128, (100, 140), "chunk", descales=HEAD_FORM),
        fp8_case(128, (140, 260), out_dtype=DType.FP16, descales=HEAD_FORM, return_lse=False),
        fp8_case((96, 160), (60, 200), "causal", scale=-0.1),
        fp8_case(256, (130, 300)),
        fp8_case(256, (70, 200), "causal", batch=3, packed="qk", lengths_q="random", lengths_k="random"),
        fp8_case(
            64, (100, 200), "causal", batch=3, packed="qk", used="qk", slack=5, lengths_q="random", lengths_k="random"
        ),
        fp8_case(
            128, (70, 200), "full", batch=4, used="qk", lengths_q="empty_first", lengths_k="random", descales=HEAD_FORM
        ),
        fp8_case((64, 48), (70, 200), v_form="rows"),
        fp8_case(
            128,
            (70, 200),
            "causal",
            batch=3,
            packed="qk",
            used="k",
            slack=5,
            lengths_q="equal",
            lengths_k="random",
            v_form="rows",
        ),
    ]
