"""Draw the figures of docs/algorithm.md. Run from anywhere: python docs/figures/make_figures.py

The figures of blocks ask `geometry.blocks.key_blocks`, so they show what the kernel visits. A test compares the files with
what this script draws.
"""

from pathlib import Path

from flash_hopper.geometry.blocks import key_blocks
from flash_hopper.geometry.masks import UNBOUNDED, Lengths, MaskBounds, visible_keys

INK, PALE, GRID = "#333333", "#9a9a9a", "#d8d8d8"
QK, PV, SOFTMAX, LOAD, STORE = "#30638e", "#6ba368", "#e8964f", "#8e7dbe", "#d1495b"


class Canvas:
    """Shapes in pixels, collected as SVG."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width, height)
        self.parts: list[str] = []

    def box(
        self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = "none", opacity: float = 1
    ) -> None:
        """A rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="{fill}" stroke="{stroke}" '
            f'fill-opacity="{opacity:g}"/>'
        )

    def text(self, x: float, y: float, words: str, *, size: int = 12, fill: str = INK, anchor: str = "middle") -> None:
        """A line of text, centred on y."""
        self.parts.append(
            f'<text x="{x:g}" y="{y + size * 0.35:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}">{words}</text>'
        )

    def arrow(self, x0: float, y0: float, x1: float, y1: float) -> None:
        """A straight arrow."""
        self.parts.append(
            f'<line x1="{x0:g}" y1="{y0:g}" x2="{x1:g}" y2="{y1:g}" stroke="{INK}" stroke-width="1.3" '
            'marker-end="url(#head)"/>'
        )

    def svg(self) -> str:
        """The finished drawing."""
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            'font-family="sans-serif">\n'
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            f'<path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>\n'
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>\n' + "\n".join(self.parts) + "\n</svg>\n"
        )


def blocks() -> str:
    """Which key blocks the query tiles of a causal problem visit, and which of them are masked."""
    seqlen_q, seqlen_k, tile_m, tile_n, cell = 20, 27, 6, 4, 14
    canvas = Canvas(720, 352)
    left, top = 70, 34
    canvas.text(left + seqlen_k * cell / 2, 16, f"{seqlen_k} keys, blocks of {tile_n}")
    for row in range(0, seqlen_q, tile_m):
        found = key_blocks(row, tile_m, Lengths(seqlen_q, seqlen_k), tile_n, MaskBounds("causal"))
        rows = min(tile_m, seqlen_q - row)
        for block in range(found.end):
            first = block * tile_n
            keys = min(tile_n, seqlen_k - first)
            colour = SOFTMAX if block >= found.inner_end else QK
            canvas.box(
                left + first * cell, top + row * cell, keys * cell, rows * cell, colour, stroke="#ffffff", opacity=0.75
            )
        canvas.text(left - 8, top + (row + rows / 2) * cell, f"tile {row // tile_m}", anchor="end")
    for row in range(seqlen_q):
        seen = row + seqlen_k - seqlen_q + 1
        canvas.box(left + seen * cell, top + row * cell, (seqlen_k - seen) * cell, cell, "#ffffff", opacity=0.45)
    canvas.box(left, top, seqlen_k * cell, seqlen_q * cell, "none", stroke=PALE)
    for line, (colour, words) in enumerate(
        ((QK, "visited without a mask"), (SOFTMAX, "visited with a mask"), ("#ffffff", "not visited"))
    ):
        canvas.box(470, 60 + 28 * line, 16, 16, colour, stroke=PALE, opacity=0.75)
        canvas.text(494, 68 + 28 * line, words, anchor="start")
    canvas.text(470, 168, "paler: keys that the row does not see", anchor="start", size=11, fill=PALE)
    canvas.text(left + seqlen_k * cell / 2, 332, f"{seqlen_q} queries, causal, aligned bottom-right")
    return canvas.svg()


CUT_RIGHT, WHOLE, CUT_LEFT, SKIPPED = SOFTMAX, QK, PV, "#e9e9e9"


def masks() -> str:
    """The key blocks of one tile under a window and under chunks, and the three loops in which they are visited."""
    lengths, tile_m, tile_n, cell = Lengths(32, 36), 8, 4, 13
    left, height, row = 150, tile_m * cell, 16
    canvas = Canvas(left + lengths.k * cell + 30, 398)
    bounds = (
        ("window (13, 0)", MaskBounds("local", 13, 0)),
        ("chunks of 14, causal", MaskBounds("chunk", UNBOUNDED, 0, 14)),
    )
    for line, (words, mask) in enumerate(bounds):
        top = 46 + line * 160
        found = key_blocks(row, tile_m, lengths, tile_n, mask)
        canvas.text(left - 12, top + height / 2 - 9, words, anchor="end")
        canvas.text(left - 12, top + height / 2 + 9, f"rows {row} to {row + tile_m - 1}", anchor="end", fill=PALE)
        for block in range(lengths.k // tile_n):
            x = left + block * tile_n * cell
            is_visited = found.start <= block < found.end
            cut_right, cut_left = block >= found.inner_end, block < found.inner_start
            colour = CUT_RIGHT if cut_right else CUT_LEFT if cut_left else WHOLE
            colour, opacity = (colour, 0.75) if is_visited else (SKIPPED, 1)
            canvas.box(x, top, tile_n * cell, height, colour, stroke="#ffffff", opacity=opacity)
            if is_visited:
                canvas.text(x + tile_n * cell / 2, top + height + 12, f"{found.end - block}.", size=11)
        for i in range(tile_m):
            first, end = visible_keys(row + i, lengths, mask)
            for begin, stop in ((found.start * tile_n, max(first, 0)), (end, found.end * tile_n)):
                if stop > begin:
                    canvas.box(
                        left + begin * cell, top + i * cell, (stop - begin) * cell, cell, "#ffffff", opacity=0.55
                    )
        canvas.box(left, top, lengths.k * cell, height, "none", stroke=PALE)
    canvas.text(left + lengths.k * cell / 2, 24, f"{lengths.k} keys, blocks of {tile_n}, numbered as they are visited")
    for place, (colour, words) in enumerate(
        ((CUT_RIGHT, "cut on the right, or on both sides"), (WHOLE, "whole: no mask"), (CUT_LEFT, "cut on the left"))
    ):
        canvas.box(left + (0, 230, 360)[place], 350, 16, 16, colour, opacity=0.75)
        canvas.text(left + (0, 230, 360)[place] + 22, 358, words, anchor="start")
    canvas.text(left, 384, "paler: keys that the row does not see; grey: blocks that are not visited", anchor="start", size=11, fill=PALE)  # fmt: skip
    return canvas.svg()


def ragged() -> str:
    """A packed batch: its sequences, their row tiles, and the view that ends with one of them."""
    sequences, tile, cell, left, top = (("a", 12), ("b", 13), ("c", 0), ("d", 11)), 8, 14, 110, 40
    total = sum(length for _, length in sequences)
    canvas = Canvas(left + total * cell + 40, 240)
    canvas.text(left - 12, top + 15, "packed rows", anchor="end")
    canvas.text(left - 12, top + 65, "tiles", anchor="end")
    first = 0
    for (name, length), colour in zip(sequences, (QK, PV, LOAD, SOFTMAX), strict=True):
        x = left + first * cell
        canvas.box(x, top, length * cell, 30, colour, stroke="#ffffff", opacity=0.85)
        if length:
            canvas.text(x + length * cell / 2, top + 15, name, fill="#ffffff", size=14)
        for block, begin in enumerate(range(0, length, tile)):
            rows = min(tile, length - begin)
            canvas.box(x + begin * cell, top + 50, rows * cell, 30, colour, stroke="#ffffff", opacity=0.5)
            canvas.text(x + (begin + rows / 2) * cell, top + 65, f"{name}{block}", size=11)
        first += length
    canvas.text(left + total * cell / 2, 22, f"lengths {', '.join(str(n) for _, n in sequences)}; tiles of {tile} rows")
    begin, end = 12, 12 + 13
    y = top + 112
    canvas.text(left - 12, y + 15, "view of b", anchor="end")
    canvas.box(left + begin * cell, y, (end - begin) * cell, 30, PV, opacity=0.85)
    canvas.text(left + (begin + end) / 2 * cell, y + 15, "rows LAST - 13 .. LAST - 1", fill="#ffffff", size=11)
    canvas.box(left + end * cell, y, 3 * cell, 30, SKIPPED, stroke=PALE)
    canvas.text(left + (end + 1.5) * cell, y + 15, "zeros", size=11)
    canvas.text(left + (begin - 0.7) * cell, y + 15, "...", anchor="end")
    canvas.text(left, y + 52, "For TMA the tensor ends where the sequence ends: tile b1 gets zeros in place of d's", anchor="start", size=11, fill=PALE)  # fmt: skip
    canvas.text(left, y + 68, "rows, and what it stores there is dropped. c, of no rows, has no tile.", anchor="start", size=11, fill=PALE)  # fmt: skip
    return canvas.svg()


def pingpong() -> str:
    """How two consumer warpgroups share the tensor cores: while one computes scores, the other exponentiates."""
    unit, left, height = 17, 120, 34
    canvas = Canvas(left + 44 * unit + 20, 268)
    lanes = {"producer": 44, "warpgroup 1": 94, "warpgroup 2": 144, "tensor cores": 206}
    for name, y in lanes.items():
        canvas.text(left - 10, y + height / 2, name, anchor="end")
        canvas.box(left, y, 44 * unit, height, "#f5f5f5")

    def segment(lane: str, start: float, length: float, colour: str, words: str) -> None:
        canvas.box(left + start * unit, lanes[lane], length * unit, height, colour, stroke="#ffffff", opacity=0.9)
        canvas.text(left + (start + length / 2) * unit, lanes[lane] + height / 2, words, size=11, fill="#ffffff")

    for load, words in enumerate(("Q, K3", "K2", "V3", "K1", "V2", "K0", "V1", "V0")):
        segment("producer", load * 4, 4, LOAD, words)
    for offset, lane in ((3, "warpgroup 1"), (7, "warpgroup 2")):
        segment(lane, offset, 2, QK, "QK3")
        segment(lane, offset + 2, 6, SOFTMAX, "softmax 3")
        segment("tensor cores", offset, 2, QK, "QK3")
        for step in range(3):
            begin, block = offset + 8 + 8 * step, 2 - step
            segment(lane, begin, 4, QK, f"QK{block} PV{block + 1}")
            segment(lane, begin + 4, 4, SOFTMAX, f"softmax {block}")
            segment("tensor cores", begin, 2, QK, f"QK{block}")
            segment("tensor cores", begin + 2, 2, PV, f"PV{block + 1}")
        segment(lane, offset + 32, 2, PV, "PV0")
        segment("tensor cores", offset + 32, 2, PV, "PV0")
        segment(lane, offset + 34, 2.8, STORE, "store")
    canvas.text(
        left, 20, "time, one output tile with four key blocks (3 is the last, visited first)", anchor="start", size=12
    )
    canvas.text(left, 258, "Each warpgroup issues QK(j) and PV(j + 1) in its turn; the other's softmax runs meanwhile.", anchor="start", size=11, fill=PALE)  # fmt: skip
    return canvas.svg()


def roles() -> str:
    """Where the data goes: global memory, shared memory, warpgroups, and the barriers between them."""
    canvas = Canvas(760, 300)
    for x, w, words in ((20, 110, "global memory"), (290, 150, "shared memory"), (560, 180, "registers")):
        canvas.text(x + w / 2, 20, words, size=13)
        canvas.box(x, 34, w, 250, "#f7f7f7", stroke=GRID)
    rows = (("Q", 50, LOAD), ("K", 100, QK), ("V", 150, PV), ("O", 230, STORE))
    for name, y, colour in rows:
        canvas.box(35, y, 80, 34, colour, opacity=0.85)
        canvas.text(75, y + 17, name, fill="#ffffff", size=14)
        stages = 1 if name == "O" else 2
        for stage in range(stages):
            w = 120 / stages
            canvas.box(305 + stage * w, y, w - 4, 34, colour, opacity=0.85)
            canvas.text(305 + stage * w + (w - 4) / 2, y + 17, f"s{name}", fill="#ffffff", size=13)
    for warpgroup in range(3):
        y = 50 + 48 * warpgroup
        canvas.box(575, y, 150, 38, SOFTMAX, opacity=0.85)
        canvas.text(650, y + 19, f"warpgroup {warpgroup + 1}: S, P, O", fill="#ffffff", size=12)
    for _, y, _ in rows[:3]:
        canvas.arrow(118, y + 17, 302, y + 17)
        canvas.arrow(428, y + 17, 572, y + 17)
    canvas.arrow(572, 247, 428, 247)
    canvas.arrow(302, 247, 118, 247)
    canvas.text(210, 44, "TMA loads, one warp", size=11)
    canvas.text(500, 44, "wgmma", size=11)
    canvas.text(650, 247, "normalised O, LSE", size=12)
    canvas.text(500, 236, "stmatrix", size=11)
    canvas.text(210, 236, "TMA store", size=11)
    canvas.text(210, 202, "full barrier: bytes arrived", size=11, fill=PALE)
    canvas.text(500, 202, "empty barrier: stage read", size=11, fill=PALE)
    return canvas.svg()


def backward_products() -> str:
    """The five products of the backward: where each operand lives, in the fused kernel for 64 keys of a warpgroup."""
    places = {"shared memory": QK, "registers": SOFTMAX}
    rows = (
        ("S\u1d40 = K Q\u1d40", ("K, stays", "shared memory"), ("Q, by stage", "shared memory"), ("S\u1d40, then P\u1d40", "registers")),
        ("dP\u1d40 = V dO\u1d40", ("V, stays", "shared memory"), ("dO, by stage", "shared memory"), ("dP\u1d40, then dS\u1d40", "registers")),
        ("dV += P\u1d40 dO", ("P\u1d40, 16 bit", "registers"), ("dO, by stage", "shared memory"), ("dV, stays", "registers")),
        ("dK += dS\u1d40 Q", ("dS\u1d40, 16 bit", "registers"), ("Q, by stage", "shared memory"), ("dK, stays", "registers")),
        ("dQ = dS K", ("dS, two buffers", "shared memory"), ("K, stays", "shared memory"), ("dQ, to the mailbox", "registers")),
    )  # fmt: skip
    canvas = Canvas(760, 330)
    left, width, height, gap = 150, 190, 36, 10
    for column, words in enumerate(("left operand", "right operand", "result")):
        canvas.text(left + column * (width + gap) + width / 2, 20, words, size=13)
    for line, (product, *operands) in enumerate(rows):
        y = 38 + line * (height + gap)
        canvas.text(left - 12, y + height / 2, product, anchor="end", size=13)
        for column, (words, place) in enumerate(operands):
            x = left + column * (width + gap)
            canvas.box(x, y, width, height, places[place], opacity=0.85)
            canvas.text(x + width / 2, y + height / 2, words, fill="#ffffff")
    y = 38 + len(rows) * (height + gap) + 12
    for column, (place, colour) in enumerate(places.items()):
        canvas.box(left + column * (width + gap), y, 16, 16, colour, opacity=0.85)
        canvas.text(left + column * (width + gap) + 24, y + 8, place, anchor="start")
    canvas.text(left, y + 34, "dS needs both warpgroups' rows for dQ: it is the only score that passes through shared memory", anchor="start", size=11, fill=PALE)  # fmt: skip
    return canvas.svg()


def backward_routes() -> str:
    """The kernels of the two routes, and what they hand to each other."""
    canvas = Canvas(760, 348)

    def kernel(x: float, y: float, width: float, name: str, work: str, colour: str) -> None:
        canvas.box(x, y, width, 52, colour, opacity=0.85)
        canvas.text(x + width / 2, y + 18, name, fill="#ffffff", size=13)
        canvas.text(x + width / 2, y + 37, work, fill="#ffffff", size=11)

    def route(y: float, title: str, note: str) -> None:
        canvas.box(10, y, 740, 158, "#f7f7f7", stroke=GRID)
        canvas.text(24, y + 16, title, anchor="start", size=13)
        canvas.text(736, y + 16, note, anchor="end", size=11, fill=PALE)

    route(8, "fused", "5 products; additions in no fixed order; head dims up to 128")
    kernel(24, 58, 130, "preprocess", "D, LSE; clears", LOAD)
    kernel(250, 58, 190, "backward_dkdv", "S, dP, dV, dK, dQ", QK)
    kernel(600, 58, 136, "postprocess", "scale, 16 bit", PV)
    canvas.arrow(154, 84, 248, 84)
    canvas.text(201, 74, "statistics", size=11)
    canvas.arrow(440, 84, 598, 84)
    canvas.text(519, 74, "dQ, float32, added up", size=11)
    canvas.text(519, 98, "in global memory", size=11)
    canvas.arrow(345, 110, 345, 140)
    canvas.text(345, 151, "dK, dV", size=12, fill=STORE)
    canvas.arrow(668, 110, 668, 140)
    canvas.text(668, 151, "dQ", size=12, fill=STORE)

    route(182, "two kernels", "7 products; every sum in a fixed order; every head dim")
    kernel(24, 250, 130, "preprocess", "D, LSE", LOAD)
    kernel(250, 206, 190, "backward_dq", "S, dP, dQ: owns queries", QK)
    kernel(250, 276, 190, "backward_dkdv", "S, dP, dV, dK: owns keys", QK)
    canvas.arrow(154, 270, 248, 234)
    canvas.arrow(154, 282, 248, 302)
    canvas.text(190, 234, "statistics", size=11)
    canvas.arrow(440, 232, 520, 232)
    canvas.text(526, 232, "dQ", size=12, fill=STORE, anchor="start")
    canvas.arrow(440, 302, 520, 302)
    canvas.text(526, 302, "dK, dV", size=12, fill=STORE, anchor="start")
    return canvas.svg()


def backward_step() -> str:
    """Two query blocks of the fused kernel: what the roles do, and the barrier at which the warpgroups meet."""
    unit, left, height, width = 15.2, 120, 32, 41
    canvas = Canvas(left + 640, 330)
    lanes = {"producer": 40, "warpgroup 1": 86, "warpgroup 2": 132, "tensor cores": 192, "dQ writer": 252}
    for name, y in lanes.items():
        canvas.text(left - 10, y + height / 2, name, anchor="end")
        canvas.box(left, y, width * unit, height, "#f5f5f5")

    def segment(lane: str, start: float, length: float, colour: str, words: str) -> None:
        canvas.box(left + start * unit, lanes[lane], length * unit, height, colour, stroke="#ffffff", opacity=0.9)
        canvas.text(left + (start + length / 2) * unit, lanes[lane] + height / 2, words, size=11, fill="#ffffff")

    for load in range(4):
        segment("producer", load * 9, 4, LOAD, f"Q{load + 1}, LSE")
        segment("producer", load * 9 + 4, 4, LOAD, f"dO{load + 1}, D")
    for block in range(2):
        begin = 4 + 18.4 * block
        for lane in ("warpgroup 1", "warpgroup 2"):
            segment(lane, begin, 2.5, QK, "S dP")
            segment(lane, begin + 2.5, 3.2, SOFTMAX, "P")
            segment(lane, begin + 5.7, 1.7, PV, "dV")
            segment(lane, begin + 7.4, 2.2, SOFTMAX, "dS")
            segment(lane, begin + 9.6, 2.9, STORE, "dS out")
            segment(lane, begin + 12.5, 2.8, PV, "dQ dK")
            segment(lane, begin + 15.3, 3, STORE, "mail")
        canvas.box(left + (begin + 12.5) * unit - 1, lanes["warpgroup 1"] - 6, 2, 90, INK)
        segment("tensor cores", begin + 0.5, 5.2, QK, "S, dP")
        segment("tensor cores", begin + 5.7, 4, PV, "dV")
        segment("tensor cores", begin + 12.5, 5.5, PV, "dQ, dK")
    segment("dQ writer", 22.3, 5, STORE, "add dQ1")
    canvas.text(left, 20, "time, two query blocks of a tile of keys", anchor="start", size=12)
    canvas.text(left, 304, "The thick line is the barrier after which dS of both warpgroups is visible. The mailbox of a", anchor="start", size=11, fill=PALE)  # fmt: skip
    canvas.text(left, 319, "warpgroup is emptied by the dQ writer with one bulk reduction while the next block is computed.", anchor="start", size=11, fill=PALE)  # fmt: skip
    return canvas.svg()


FIGURES = {
    "blocks.svg": blocks,
    "masks.svg": masks,
    "ragged.svg": ragged,
    "pingpong.svg": pingpong,
    "roles.svg": roles,
    "backward_products.svg": backward_products,
    "backward_routes.svg": backward_routes,
    "backward_step.svg": backward_step,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (Path(__file__).parent / name).write_text(draw())
