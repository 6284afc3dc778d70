"""The grids of the backward: gradients through the kinds of fault that attention kernels have had.

Lengths over every residue of every tile on both routes (dQ added up in memory, and dQ by a kernel of its own, which is
what `deterministic` asks for), every head dim, grouped queries, strides of inputs and of the incoming gradients, any
subset of gradients, values, scales, masks, empty and huge sizes; a small cut for machines without a GPU; a few tiny
cases for tools that slow a kernel down a thousandfold. Pure functions of the tile tables. Called by `suites`.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from flash_hopper.plan.backward import BackwardRequest, plan_backward
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.cases import DLSES, DOUTS, LAYOUTS, VALUES, Case, Dims, case_of

BF16, FP16 = DType.BF16, DType.FP16

SWEPT: tuple[tuple[Dims | int, bool, bool, bool], ...] = (
    (64, False, False, False), (64, False, True, False), (128, False, False, False), (128, False, True, False),
    (64, True, False, True), (64, True, True, True), (128, True, False, False), (128, True, True, False),
    ((192, 128), False, False, False), (192, True, True, False), (256, True, False, False), (256, False, True, False),
)  # fmt: skip
"""Head dims, deterministic, causal, whether all residues of lengths are met: every second where the other mask, with
the same tiles, takes the rest."""

_BOTH = (False, True)
_GRADS = ("q", "k", "v", "qk", "qv", "kv")


def backward_case(
    dims: Dims | int, lengths: Dims, causal: bool = False, *, batch: int = 1, heads: Dims = (2, 2),
    dtype: DType = BF16, **fields: Any,
) -> Case:  # fmt: skip
    """A backward case from what `case_of` takes and other fields of `Case`."""
    case = case_of(dims, lengths, causal, batch=batch, heads=heads, dtype=dtype)
    return replace(case, direction="backward", give_out=False, **fields)


def backward() -> list[Case]:
    """The whole grid."""
    groups = (
        _residues, _head_dims, _value_dims, _head_ratios, _layouts, _douts, _dlses, _subsets, _values, _scales,
        _causal_lengths, _empty, _many, _long, _mixtures,
    )  # fmt: skip
    cases = [case for group in groups for case in group()]
    # every fifth call returns no lse, unless something is passed back through it
    return [replace(c, return_lse=False) if i % 5 == 4 and c.dlse == "none" else c for i, c in enumerate(cases)]


def _residues() -> Iterator[Case]:
    """Every residue of every tile: padded rows and keys with harmful values."""
    values = ("extreme", "normal", "negative", "samesign")
    for dims, deterministic, causal, is_whole in SWEPT:
        rows, keys = tiles(dims, deterministic, causal)
        for i in range(0 if is_whole else causal, max(*rows, *keys), 1 if is_whole else 2):
            # consecutive lengths, some of them a few blocks longer, meet all residues of all tiles
            lengths = _length(i, i // 3, rows), _length(13 * i + 3, i // 5, keys)
            is_half = (dims == 128 and i // 2 % 4 == 1) or (dims == 64 and i // 2 % 8 == 3)
            yield backward_case(
                dims, lengths, causal, batch=1 + i % 2, heads=(2, 1 + (i // 2 + i // 8) % 2),
                dtype=FP16 if is_half else BF16, deterministic=deterministic, values=values[(i // 2 + i // 32) % 4],
            )  # fmt: skip


def tiles(dims: Dims | int, deterministic: bool, causal: bool) -> tuple[set[int], set[int]]:
    """Tile sizes of query rows, and those of keys, in the kernels of a backward."""
    request = BackwardRequest(needs_dq=True, needs_dkdv=True, has_dlse=False, is_deterministic=deterministic)
    plans = plan_backward(case_of(dims, (1024, 1024), causal).problem(), request)
    found = [plan for plan in (plans.dkdv, plans.dq) if plan is not None]
    return {plan.tile_m for plan in found}, {plan.tile_n for plan in found}


def _length(i: int, blocks: int, tile_sizes: set[int]) -> int:
    """A length with residue i of the largest tile and 0 to 2 common multiples of all tiles more."""
    period = math.lcm(*tile_sizes)
    return i % max(tile_sizes) + blocks % (3 if period < 300 else 2) * period or period


def _head_dims() -> Iterator[Case]:
    """Every head dim, both masks and both routes, short and longer than a tile."""
    for d, causal, deterministic in itertools.product(range(8, 257, 8), _BOTH, _BOTH):
        if d > 128 and deterministic == (d % 16 == 0):
            continue  # one route serves both
        if (d // 8 + causal + deterministic) % 2:
            lengths = 64 + 7 * d % 61, 100 + 11 * d % 150
            yield backward_case(d, lengths, causal, batch=2, deterministic=deterministic)
        else:
            lengths = 200 + 5 * d % 51, 200 + 13 * d % 170
            yield backward_case(d, lengths, causal, heads=(3, 1), deterministic=deterministic, dlse="bhs")


def _value_dims() -> Iterator[Case]:
    """v with its own head dim, smaller and larger."""
    pairs = (
        (192, 128), (64, 128), (128, 64), (256, 64), (64, 256), (40, 200),
        (176, 120), (56, 104), (104, 40), (232, 48), (120, 112), (48, 56),
    )  # fmt: skip
    for i, (dims, causal) in enumerate(itertools.product(pairs, _BOTH)):
        deterministic = max(dims) <= 128 and i % 4 < 2
        yield backward_case(dims, (77, 150), causal, batch=2, heads=(4, 2), deterministic=deterministic)
        yield backward_case(dims, (125, 333), causal, heads=(3, 3), deterministic=not deterministic)
        yield backward_case(dims, (250, 125), causal, heads=(5, 1), dlse="bsh")
    for dims in ((192, 128), (64, 256), (128, 64)):
        for heads, lengths in itertools.product(((8, 1), (6, 2), (16, 16)), ((128, 128), (60, 700), (500, 129))):
            yield backward_case(dims, lengths, lengths[0] != 60, heads=heads)


def _head_ratios() -> Iterator[Case]:
    """Query heads a key head: one to many, powers of two or not."""
    heads = (
        (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (16, 1), (40, 1), (10, 2), (21, 3), (40, 8),
    )  # fmt: skip
    for i, (ratio, d, causal) in enumerate(itertools.product(heads, (64, 128, 256), _BOTH)):
        lengths = 65 + 17 * i % 170, 130 + 3 * i % 90
        yield backward_case(d, lengths, causal, batch=1 + i % 3, heads=ratio, deterministic=i // 2 % 2 == 0)


def _settings() -> tuple[Case, ...]:
    """Calls of every kind of kernel, to be varied."""
    return (
        backward_case(64, (130, 200), batch=2, heads=(4, 4)),
        backward_case(128, (150, 260), True, batch=3, heads=(6, 2)),
        backward_case(64, (210, 170), True, batch=2, heads=(4, 2), deterministic=True),
        backward_case((192, 128), (90, 130), True, batch=2, heads=(4, 2)),
        backward_case(256, (140, 100), batch=2, heads=(2, 1)),
    )


def _layouts() -> Iterator[Case]:
    """Each layout for all inputs and for one at a time."""
    plain = [layout for layout in LAYOUTS if layout not in ("bshd", "packed")]
    for base in _settings():
        for i, layout in enumerate(plain):
            case = replace(base, batch=1, heads=1, heads_k=1) if layout == "size1" else base
            yield replace(case, layout=layout, strided="qkv")
            if base.d in (64, 128):
                yield replace(case, layout=layout, strided="qkv"[(i + base.d // 64) % 3])
        yield replace(base, layout="packed", strided="kv")
        if base.d == base.dv:
            yield replace(base, layout="packed", strided="qkv", seqlen_q=base.seqlen_k, heads_k=base.heads)


def _douts() -> Iterator[Case]:
    """Each layout of the gradient of out."""
    for base, dout in itertools.product(_settings(), DOUTS):
        yield replace(base, dout=dout, dlse="bhs" if dout == "none" else "none")
    for base, dout in itertools.product(_settings()[:2], ("bhsd", "dimslice", "misaligned", "expand_all", "step")):
        yield replace(base, dout=dout, dtype=FP16, batch=1, heads=1, heads_k=1)
        yield replace(base, dout=dout, seqlen_q=1, causal=True, dlse="bsh")


def _dlses() -> Iterator[Case]:
    """Gradients through lse, of every layout, with rows that see no key among them."""
    given = [dlse for dlse in DLSES if dlse != "none"]
    lengths = ((100, 230), (260, 90))
    for i, (dlse, d, causal, length) in enumerate(itertools.product(given, (64, 128, 256), _BOTH, lengths)):
        yield backward_case(d, length, causal, batch=2, heads=(4, 2), dlse=dlse, deterministic=i % 3 == 0)


def _subsets() -> Iterator[Case]:
    """Gradients of some inputs only."""
    for i, (grads, base) in enumerate(itertools.product(_GRADS, _settings())):
        yield replace(base, grads=grads)
        yield replace(
            base, grads=grads, causal=not base.causal, dlse="bhs", deterministic=i % 2 == 0, seqlen_q=base.seqlen_k + 7
        )


def _values() -> Iterator[Case]:
    """Every kind of values: short, over many key blocks, over many query blocks."""
    lengths = ((130, 257), (67, 1100), (900, 150))
    for i, (values, d, causal) in enumerate(itertools.product(VALUES, (64, 128, 256), _BOTH)):
        dtype = FP16 if i % 3 == 0 and d != 256 else BF16
        for j in (i, i + 1) if d == 128 else (i,):
            yield backward_case(
                d, lengths[j % 3], causal, batch=3, heads=(4, 2), dtype=dtype, values=values,
                deterministic=j // 2 % 2 == 0, dlse=("none", "bhs")[j // 3 % 2 if dtype == BF16 else 0],
            )  # fmt: skip
    for (i, values), d in itertools.product(enumerate(VALUES), (64, 128)):
        yield backward_case(d, (100, 600), (i + d // 64) % 2 == 0, batch=2, values=values, scale=-(d**-0.5))


def _scales() -> Iterator[Case]:
    """Softmax scales of any sign and size, also with values that are harmful by themselves."""
    scales = (0.0, -0.125, -1.0, 1e-4, 1.0, 20.0, -20.0, 1e-8)
    for i, (scale, d, causal) in enumerate(itertools.product(scales, (64, 128, 256), _BOTH)):
        if scale < 0 and d == 256:
            continue  # a forward kernel of its own, and the backward kernels have none for the sign
        yield backward_case(d, (120, 333), causal, heads=(4, 1), scale=scale, deterministic=i % 2 == 0)
    for scale, values in itertools.product((0.0, -0.05, 0.3), ("extreme", "slopes", "outlier", "large")):
        yield backward_case(128, (90, 500), True, batch=2, scale=scale, values=values)


def _causal_lengths() -> Iterator[Case]:
    """Bottom-right causal around tile edges: more rows than keys (rows without a key), as many, fewer."""
    lengths = (1, 2, 63, 64, 65, 127, 193, 385)
    for i, pair in enumerate(itertools.product(lengths, lengths)):
        yield backward_case(
            (64, 128, 256)[(i + i // 8) % 3], pair, True, heads=(2, 1), values=("normal", "extreme", "negative")[i % 3],
            deterministic=i // 3 % 2 == 0,
        )  # fmt: skip


def _empty() -> Iterator[Case]:
    """Sizes of zero: no gradient has an element, or those that exist are zero."""
    for causal, dlse in itertools.product(_BOTH, ("none", "bhs")):
        fields: dict[str, Any] = {"deterministic": causal == (dlse == "none"), "dlse": dlse}
        yield from (backward_case(64, lengths, causal, batch=2, **fields) for lengths in ((0, 5), (5, 0), (0, 0)))
        yield backward_case((128, 64), (5, 7), causal, batch=0, **fields)
        yield backward_case(128, (5, 7), causal, heads=(0, 0), **fields)
        yield backward_case(64, (0, 5), causal, grads="kv", **fields)


def _many() -> Iterator[Case]:
    """Many tiny problems at once: batch and heads beyond 16 bits, decode-like shapes."""
    shapes = (
        (300, (2, 1), (3, 5)), (2000, (1, 1), (1, 7)), (70_000, (1, 1), (1, 2)), (1, (70_000, 1), (1, 3)),
        (1, (200, 8), (40, 70)), (9, (16, 2), (1, 2000)), (64, (8, 8), (17, 17)), (33, (5, 5), (64, 190)),
    )  # fmt: skip
    for i, ((batch, heads, lengths), causal) in enumerate(itertools.product(shapes, _BOTH)):
        d = (64, 128)[(i + i // 2) % 2] if batch * heads[0] < 9000 else 8
        yield backward_case(d, lengths, causal, batch=batch, heads=heads, deterministic=i % 3 == 0)


def _long() -> Iterator[Case]:
    """Thousands of rows and keys."""
    for causal in _BOTH:
        yield backward_case(64, (4096, 4096), causal, heads=(2, 1), deterministic=causal)
        yield backward_case(64, (4000, 4000), causal, heads=(1, 1), deterministic=not causal, dlse="bhs")
        yield backward_case(128, (2000, 4000), causal, heads=(2, 1), dtype=FP16)
        yield backward_case(128, (4096, 4096), causal, heads=(1, 1))
        yield backward_case(128, (2048, 3000), causal, heads=(4, 1), deterministic=True)
        yield backward_case(128, (4000, 1000), causal, heads=(2, 1))
        yield backward_case(256, (1500, 4096), causal, heads=(2, 1))
        yield backward_case((192, 128), (3000, 2000), causal, heads=(2, 2))
        yield backward_case(96, (2500, 3500), causal, heads=(2, 2))
        yield backward_case(64, (1, 16_384), causal, batch=2, heads=(4, 2))
        yield backward_case(128, (16, 8001), causal, batch=2, heads=(8, 1))
        for values in ("rising", "slopes", "outlier", "gated"):
            yield backward_case(128, (1024, 4096), causal, heads=(2, 1), values=values)


def _mixtures() -> Iterator[Case]:
    """Draws over everything at once."""
    draw = random.Random(20_27)
    made = 0
    while made < 60:
        heads_k = draw.choice((1, 1, 2, 3, 4))
        dtype = draw.choice((BF16, BF16, FP16))
        layout, dlse = draw.choice(tuple(LAYOUTS)), draw.choice(tuple(DLSES)) if dtype == BF16 else "none"
        try:
            yield backward_case(
                draw.choice((64, 128)) if dtype == FP16 else 8 * draw.randint(1, 32),
                (_any_length(draw), _any_length(draw)),
                draw.random() < 0.5,
                batch=draw.randint(1, 4),
                heads=(heads_k * draw.choice((1, 1, 2, 3, 4)), heads_k),
                dtype=dtype,
                layout=layout,
                strided=draw.choice(("qkv", "kv", "q", "k", "v")),
                values=draw.choice(tuple(VALUES)),
                dout=draw.choice(tuple(DOUTS)),
                dlse=dlse,
                grads=draw.choice(("qkv", "qkv", "qkv", *_GRADS)),
                deterministic=draw.random() < 0.5,
            )
        except ArgumentError:
            continue  # a combination that these sizes do not allow
        made += 1


def _any_length(draw: random.Random) -> int:
    return draw.choice((draw.randint(1, 64), draw.randint(1, 400), draw.randint(1, 1500)))


# ---- smoke and sanitizer -------------------------------------------------------------------------------------


def smoke() -> list[Case]:
    """A cut through all kinds, small enough for the CPU."""
    base = backward_case(32, (70, 90), True, batch=2, heads=(4, 2))
    dims: tuple[Dims | int, ...] = (8, 40, 128, (192, 128), (64, 256), 256)
    around = ((1, 1), (130, 5), (5, 130), (129, 129), (1, 257), (257, 130))
    cases: Iterable[Case] = itertools.chain(
        (replace(base, layout=layout, strided="qkv") for layout in ("bhsd", "headslice", "misaligned", "expand_batch")),
        (replace(base, layout="packed", strided=s, seqlen_q=90) for s in ("kv", "qkv")),
        (replace(base, dout=dout, dlse="bhs" if dout == "none" else "none") for dout in DOUTS),
        (replace(base, dlse=dlse) for dlse in DLSES if dlse != "none"),
        (replace(base, grads=grads, deterministic=True) for grads in _GRADS),
        (replace(base, values=values, causal=i % 2 == 0) for i, values in enumerate(VALUES)),
        (replace(base, values=values, dtype=FP16, scale=-0.2) for values in ("extreme", "slopes", "normal")),
        (replace(base, scale=scale, dlse="bhs") for scale in (0.0, -0.3, 5.0, 1e-6)),
        (backward_case(d, (20, 33), i % 2 == 1) for i, d in enumerate(dims)),
        (backward_case(16, lengths, True) for lengths in around),
        (backward_case(16, (9, 17), heads=heads) for heads in ((3, 1), (7, 1), (6, 2), (16, 1))),
        (replace(base, return_lse=False, deterministic=deterministic) for deterministic in _BOTH),
        (backward_case(16, lengths) for lengths in ((0, 5), (5, 0), (0, 0))),
        (backward_case(16, (5, 7), batch=0), backward_case(16, (5, 7), heads=(0, 0))),
    )
    return list(dict.fromkeys(cases))


def sanitizer() -> list[Case]:
    """One or two tiles of each family of kernels; of the families that draw tiles, also so many that a scheduler warp finds two."""
    return [
        backward_case(64, (100, 200)),
        backward_case(64, (150, 140), True, heads=(2, 1), dlse="bhs"),
        backward_case(128, (130, 170)),
        backward_case(128, (20, 66), True, batch=4, heads=(35, 5), dtype=FP16),
        backward_case(64, (130, 100), deterministic=True),
        backward_case(64, (200, 210), True, deterministic=True),
        backward_case(128, (140, 150), True, heads=(2, 1), deterministic=True),
        backward_case((192, 128), (60, 120), True),
        backward_case(256, (70, 90), scale=-0.1),
        backward_case(256, (12, 90), True, batch=4, heads=(35, 35)),
        backward_case(96, (20, 66), batch=4, heads=(35, 5), grads="q", dout="expand_all"),
        backward_case(96, (20, 66), True, batch=4, heads=(35, 5), grads="kv", dout="bhsd"),
    ]
