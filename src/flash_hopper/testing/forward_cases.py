"""The grids of the forward: through the kinds of fault that attention kernels have had.

Lengths over every residue of every tile, every head dim, strides, values, scales, masks, empty and huge sizes; a small
cut through the same kinds for machines without a GPU; a few tiny cases for tools that slow a kernel down a
thousandfold. Pure functions of the tile tables. Called by `suites`.
"""

import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

from flash_hopper.plan.forward import plan_forward
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.cases import LAYOUTS, Case, Dims, case_of
from flash_hopper.testing.cases import VALUES as ALL_VALUES

BF16, FP16 = DType.BF16, DType.FP16
VALUES = tuple(values for values in ALL_VALUES if values != "gated")  # which is about the gradient of out

SWEPT_DIMS: tuple[Dims | int, ...] = (64, 128, 96, (192, 128), 256)
"""Head dims whose tiles meet every residue of lengths in `forward`."""

_CAUSAL = (False, True)


def forward() -> list[Case]:
    """The whole grid."""
    groups = (
        _residues, _head_dims, _value_dims, _head_ratios, _layouts, _values, _scales, _causal_lengths, _without_lse,
        _empty, _many, _grids, _long, _mixtures,
    )  # fmt: skip
    cases = [case for group in groups for case in group()]
    # every fifth call allocates its own output, unless the case is about the layout of the given one
    return [replace(c, give_out=False) if i % 5 == 4 and c.layout == "bshd" else c for i, c in enumerate(cases)]


def _residues() -> Iterator[Case]:
    """Every residue of tile_m and tile_n that a plan can meet: padded rows and keys with harmful values."""
    values = ("extreme", "normal", "negative", "samesign")
    for dims, causal in itertools.product(SWEPT_DIMS, _CAUSAL):
        others = tile_rows(dims, not causal)
        for (tile_m, tile_n), rows in tile_rows(dims, causal).items():
            if dims == 96 and (tile_m, tile_n) in tile_rows(128, causal):
                continue  # swept there
            # every second residue where the other mask takes the rest, or a tile only serves lengths that fit it
            is_alone = 2 * len(others.get((tile_m, tile_n), ())) < len(rows)
            whole = is_alone or (dims in (64, 128) and len(rows) == tile_m)
            for i in range(0 if whole else causal, max(len(rows), tile_n), 1 if whole else 2):
                seqlen_q = rows[i % len(rows)]
                lengths = seqlen_q, _length_with_residue(i, tile_n, seqlen_q if causal else 0)
                dtype = FP16 if dims == 128 and i % 4 == 3 else BF16
                case = case_of(dims, lengths, causal, batch=1 + i % 2, heads=(2, 1 + i // 2 % 2), dtype=dtype)
                yield replace(case, values=values[(i // 2 + i // 32) % 4])


def tile_rows(dims: Dims | int, causal: bool, longest: int = 4500) -> dict[Dims, list[int]]:
    """For each (tile_m, tile_n) that head dims meet: the shortest seqlen_q for each residue of tile_m that occurs."""
    found: dict[Dims, dict[int, int]] = {}
    problem = case_of(dims, (1, 256), causal).problem()
    for seqlen_q in range(1, longest):
        plan = plan_forward(replace(problem, seqlen_q=seqlen_q))
        found.setdefault((plan.tile_m, plan.tile_n), {}).setdefault(seqlen_q % plan.tile_m, seqlen_q)
    return {tile: sorted(lengths.values()) for tile, lengths in found.items()}


def _length_with_residue(i: int, tile_n: int, near: int) -> int:
    """A key length of residue i of tile_n: some blocks long, or a few blocks around `near`."""
    blocks = (0, 2, 1, 3)[i // 3 % 4] if near == 0 else near // tile_n + (0, -1, 1, 2)[i // 3 % 4]
    length = max(blocks, 0) * tile_n + i % tile_n
    return length or tile_n


def _head_dims() -> Iterator[Case]:
    """Every head dim, both masks, short and longer than a tile; fp16 too."""
    for d, causal in itertools.product(range(8, 257, 8), _CAUSAL):
        yield case_of(d, (64 + 7 * d % 61, 100 + 11 * d % 150), causal, batch=2)
        yield case_of(d, (140 + 5 * d % 51, 200 + 13 * d % 170), causal, heads=(3, 1))
        if d % 32 == 0:
            yield case_of(d, (100 + d % 27, 90 + 11 * d % 150), causal, dtype=FP16)


def _value_dims() -> Iterator[Case]:
    """v with its own head dim, smaller and larger."""
    pairs = (
        (192, 128), (128, 64), (64, 128), (64, 256), (256, 64), (40, 200), (8, 256), (256, 8),
        (72, 128), (120, 104), (16, 24), (176, 120), (96, 64), (248, 72),
    )  # fmt: skip
    for dims, causal in itertools.product(pairs, _CAUSAL):
        yield case_of(dims, (77, 150), causal, batch=2, heads=(4, 2))
        yield case_of(dims, (125, 333), causal, heads=(3, 3))
    for dims in ((192, 128), (64, 256)):
        for heads, lengths in itertools.product(((8, 1), (6, 2), (16, 16)), ((128, 128), (60, 700), (513, 129))):
            yield case_of(dims, lengths, lengths[0] != 60, heads=heads)


def _head_ratios() -> Iterator[Case]:
    """Query heads a key head: one to many, powers of two or not."""
    heads = (
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 1), (32, 1), (40, 1),
        (6, 2), (12, 4), (10, 2), (21, 3), (14, 2), (8, 4), (32, 2), (40, 8), (9, 9),
    )  # fmt: skip
    for i, (ratio, d, causal) in enumerate(itertools.product(heads, (64, 128), _CAUSAL)):
        yield case_of(d, (65 + i % 70, 130 + 3 * i % 90), causal, batch=1 + i % 3, heads=ratio)


def _layouts() -> Iterator[Case]:
    """Each layout for all operands and for one operand at a time."""
    settings = (
        case_of(64, (130, 200), batch=2, heads=(4, 4)),
        case_of(128, (150, 260), True, batch=3, heads=(6, 2)),
        case_of((192, 128), (90, 130), True, batch=2, heads=(4, 2)),
        case_of(40, (100, 300), batch=2, heads=(2, 1)),
    )
    for base in settings:
        operands = ("qkvo", "q", "k", "v", "o") if base.d in (64, 128) else ("qkvo", "kv")
        for layout, strided in itertools.product(LAYOUTS, operands):
            if layout in ("bshd", "packed") or (layout.startswith("expand") and strided == "o"):
                continue
            case = replace(base, batch=1, heads=1, heads_k=1) if layout == "size1" else base
            yield replace(case, layout=layout, strided=strided)
        yield replace(base, layout="packed", strided="kv")
        if base.d == base.dv:
            same = replace(base, seqlen_q=base.seqlen_k)
            yield replace(same, layout="packed", strided="qkv")
            yield replace(same, layout="packed", strided="qkv", heads_k=base.heads)
    one_row = case_of(128, (1, 300), batch=2, heads=(4, 2))
    for strided, case in itertools.product(
        ("qkvo", "q", "o"), (one_row, replace(one_row, batch=1, heads=1, heads_k=1))
    ):
        yield replace(case, layout="size1", strided=strided)
    for layout, dtype in itertools.product(("bhsd", "dimslice", "misaligned", "misstride"), (BF16, FP16)):
        for lengths in ((1, 1), (128, 128), (385, 70)):
            yield replace(case_of(128, lengths, lengths[0] > 1, batch=2, dtype=dtype), layout=layout)


def _values() -> Iterator[Case]:
    """Every kind of values, short and over many blocks; those that move the running maximum over more of them."""
    lengths = ((130, 257), (67, 1100))
    for i, (values, d, causal) in enumerate(itertools.product(VALUES, (64, 128, 256), _CAUSAL)):
        for j, length in enumerate(lengths):
            dtype = FP16 if (i // 2 + j) % 3 == 0 and d != 256 else BF16
            yield replace(case_of(d, length, causal, batch=3, heads=(4, 2), dtype=dtype), values=values)
    moving = ("rising", "falling", "slopes", "negative", "extreme")
    for values, d, causal in itertools.product(moving, (64, 128, 256), _CAUSAL):
        yield replace(case_of(d, (300, 4097), causal), values=values)
    for (i, values), d in itertools.product(enumerate(VALUES), (64, 128)):
        yield replace(case_of(d, (100, 600), (i + d // 64) % 2 == 0, batch=2), values=values, scale=-(d**-0.5))


def _scales() -> Iterator[Case]:
    """Softmax scales of any sign and size, also with values that are harmful by themselves."""
    scales = (0.0, -0.125, -1.0, 1e-4, -1e-4, 1.0, 20.0, -20.0, 1e-8)
    for scale, d, causal in itertools.product(scales, (64, 128, 256), _CAUSAL):
        yield replace(case_of(d, (120, 333), causal, heads=(4, 1)), scale=scale)
    for scale, values in itertools.product((0.0, -0.05, 0.3), ("extreme", "slopes", "outlier", "large")):
        yield replace(case_of(128, (90, 500), True, batch=2), scale=scale, values=values)


def _causal_lengths() -> Iterator[Case]:
    """Bottom-right causal around tile edges: more rows than keys (rows without a key), as many, fewer."""
    lengths = (1, 2, 63, 64, 65, 127, 129, 191, 193, 385)
    for i, pair in enumerate(itertools.product(lengths, lengths)):
        yield replace(
            case_of((64, 128)[(i + i // 10) % 2], pair, True, heads=(2, 1)), values=("normal", "extreme")[i % 2]
        )


def _without_lse() -> Iterator[Case]:
    """The kernels that do not store the LSE."""
    for d, causal, lengths in itertools.product((64, 128, 256), _CAUSAL, ((1, 90), (100, 400), (120, 120))):
        for dtype in (BF16, FP16) if d == 128 else (BF16,):
            yield replace(case_of(d, lengths, causal, batch=2, heads=(4, 2), dtype=dtype), return_lse=False)


def _empty() -> Iterator[Case]:
    """Sizes of zero: an empty result, or rows without keys (out 0, lse -inf), with and without `out` and lse."""
    for causal, return_lse, give_out in itertools.product(_CAUSAL, _CAUSAL, _CAUSAL):
        empty = [case_of(64, lengths, causal, batch=2) for lengths in ((0, 5), (5, 0), (0, 0))]
        empty += [case_of((128, 64), (5, 7), causal, batch=0), case_of(128, (5, 7), causal, heads=(0, 0))]
        yield from (replace(case, return_lse=return_lse, give_out=give_out) for case in empty)


def _many() -> Iterator[Case]:
    """Many tiny problems at once: batch and heads beyond 16 bits, decode-like shapes."""
    shapes = (
        (300, (2, 1), (3, 5)), (2000, (1, 1), (1, 7)), (70_000, (1, 1), (1, 2)), (1, (70_000, 1), (1, 3)),
        (1, (200, 8), (40, 70)), (9, (16, 2), (1, 2000)), (64, (8, 8), (17, 17)), (33, (5, 5), (64, 190)),
    )  # fmt: skip
    for i, ((batch, heads, lengths), causal) in enumerate(itertools.product(shapes, _CAUSAL)):
        yield case_of(
            (64, 128)[(i + i // 2) % 2] if batch * heads[0] < 9000 else 8, lengths, causal, batch=batch, heads=heads
        )


def _grids() -> Iterator[Case]:
    """One tile, and more tiles than a GPU has SMs: CTAs, and streams of a CTA, with none, one and several."""
    shapes = (
        (1, (1, 1), (100, 300)), (4, (40, 8), (300, 500)), (2, (48, 1), (450, 130)), (9, (33, 33), (129, 65)),
        (1, (64, 16), (700, 700)),
    )  # fmt: skip
    kinds = ((64, BF16), (64, FP16), (40, BF16), (128, BF16))
    for (batch, heads, lengths), causal in itertools.product(shapes, _CAUSAL):
        yield from (case_of(d, lengths, causal, batch=batch, heads=heads, dtype=dtype) for d, dtype in kinds)
        usual = case_of(64, lengths, causal, batch=batch, heads=heads)
        yield from (replace(usual, scale=-0.1), replace(usual, return_lse=False))


def _long() -> Iterator[Case]:
    """Thousands of rows and keys."""
    yield case_of(64, (8192, 8192), True, heads=(1, 1))
    yield case_of(64, (8192, 32768), heads=(1, 1))
    yield case_of(128, (8192, 8192), heads=(1, 1))
    for causal in _CAUSAL:
        yield case_of(128, (4096, 16384), causal, heads=(2, 1))
        yield case_of(256, (2048, 8192), causal, heads=(2, 1))
        yield case_of((192, 128), (3000, 5000), causal, heads=(2, 2))
        yield case_of(96, (5000, 3000), causal, heads=(2, 2))
        yield case_of(128, (8000, 1000), causal, heads=(2, 1))
        yield case_of(64, (1, 32768), causal, batch=2, heads=(4, 2))
        yield case_of(128, (16, 32001), causal, batch=2, heads=(8, 1))
        yield case_of(128, (2047, 2049), causal, batch=2, heads=(4, 4), dtype=FP16)
        for values in ("rising", "falling", "slopes", "outlier"):
            yield replace(case_of(128, (1024, 12_000), causal, heads=(2, 1)), values=values)


def _mixtures() -> Iterator[Case]:
    """Draws over everything at once."""
    draw = random.Random(20_26)
    made = 0
    while made < 60:
        heads_k = draw.choice((1, 1, 2, 3, 4))
        dtype = draw.choice((BF16, BF16, FP16))
        case = case_of(
            draw.choice((64, 128)) if dtype == FP16 else 8 * draw.randint(1, 32),
            (_any_length(draw), _any_length(draw)),
            draw.random() < 0.5,
            batch=draw.randint(1, 4),
            heads=(heads_k * draw.choice((1, 1, 2, 3, 4)), heads_k),
            dtype=dtype,
        )
        layout, values = draw.choice(tuple(LAYOUTS)), draw.choice(VALUES)
        try:
            yield replace(case, layout=layout, values=values)
        except ArgumentError:
            continue  # a layout that these sizes do not allow
        made += 1


def _any_length(draw: random.Random) -> int:
    return draw.choice((draw.randint(1, 64), draw.randint(1, 400), draw.randint(1, 1500)))


def smoke() -> list[Case]:
    """A cut through all kinds, small enough for the CPU."""
    base = case_of(32, (70, 90), True, batch=2, heads=(4, 2))
    dims: tuple[Dims | int, ...] = (8, 40, 128, (192, 128), (64, 256), 256)
    cases: Iterable[Case] = itertools.chain(
        (replace(base, layout=layout) for layout in LAYOUTS if layout not in ("packed", "size1")),
        (replace(base, layout="packed", strided=s, seqlen_q=90) for s in ("kv", "qkv")),
        (replace(base, layout="size1", batch=1), replace(base, layout="size1", seqlen_q=1)),
        (replace(base, values=values, causal=i % 2 == 0) for i, values in enumerate(VALUES)),
        (replace(base, values=values, dtype=FP16, scale=-0.2) for values in ("extreme", "slopes", "normal")),
        (replace(base, scale=scale) for scale in (0.0, -0.3, 5.0, 1e-6)),
        (case_of(d, (20, 33), i % 2 == 1) for i, d in enumerate(dims)),
        (case_of(16, lengths, True) for lengths in ((1, 1), (130, 5), (5, 130), (129, 129), (1, 257), (257, 256))),
        (case_of(16, (9, 17), heads=heads) for heads in ((3, 1), (7, 1), (6, 2), (16, 1))),
        (replace(base, return_lse=False, give_out=out) for out in _CAUSAL),
        (case_of(16, lengths) for lengths in ((0, 5), (5, 0), (0, 0))),
        (case_of(16, (5, 7), batch=0), case_of(16, (5, 7), heads=(0, 0))),
    )
    return list(cases)


def sanitizer() -> list[Case]:
    """One or two tiles of each kernel family; of those with several streams, and with O in stages of V, so many that a scheduler warp
    finds two, and writes where it has written before."""
    return [
        case_of(64, (100, 200)),
        case_of(64, (70, 150), True, heads=(2, 1)),
        case_of(64, (70, 9), batch=8, heads=(35, 5), dtype=FP16),
        replace(case_of(64, (8, 66), True, batch=8, heads=(36, 4)), scale=-0.1),
        case_of(64, (4100, 40), heads=(1, 1)),
        case_of(128, (130, 170)),
        case_of(128, (150, 200), True, heads=(3, 1)),
        case_of(128, (100, 140), True, dtype=FP16),
        case_of(96, (130, 100), True),
        case_of((192, 128), (60, 120), True),
        replace(case_of(256, (13, 100), True, batch=4, heads=(35, 5)), left=60, scale=-0.1),
        replace(case_of(40, (65, 130), True, batch=2, heads=(4, 2)), layout="bhsd", return_lse=False),
    ]
