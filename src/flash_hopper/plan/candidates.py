"""Which forward plans could serve a problem: what `flash-hopper tune` compiles, checks and measures.

All layouts that `budget.layout_fault` lets pass, in the order in which they are worth trying. Not consulted by calls. Plain Python.
"""

from itertools import product

from flash_hopper.geometry.blocks import WARPGROUP_ROWS
from flash_hopper.plan.budget import (
    FEWEST_KEYS,
    KEY_STEP,
    MOST_KEYS,
    MOST_KV_STAGES,
    MOST_Q_STAGES,
    MOST_STREAMS,
    O_PLACES,
    REGISTERS,
    Layout,
    choose_layout,
    layout_fault,
)
from flash_hopper.plan.forward import ForwardPlan, choice_of, plan_with, table_layout
from flash_hopper.plan.tables.forward import Tile, choose_row
from flash_hopper.problem.attention import AttentionProblem

HEIGHTS = [WARPGROUP_ROWS * warpgroups for warpgroups in sorted(REGISTERS)]
WIDTHS = range(FEWEST_KEYS, MOST_KEYS + 1, KEY_STEP)
KV_STAGES = range(2, MOST_KV_STAGES + 1)
STREAMS = range(1, MOST_STREAMS + 1)


def candidates(problem: AttentionProblem, most: int | None = None) -> list[ForwardPlan]:
    """Every plan that fits, each once: at most `most` of them, and that of the tables first (not one of the user's own rows).

    Behind it come those whose buffers are the ones that the tables would give to their tile, and those with O in V and all stages of Q,
    the nearest to any tile of the tables' row first: a step is 64 query rows, 16 keys, a stage, turns, where O lies, or a stream. Then the others, in the same order.
    """
    hdim, hdimv, mask, _, _ = choice_of(problem)
    itemsize, start = problem.dtype.itemsize, table_layout(problem)
    known = [choose_layout(tile, hdim, hdimv, itemsize) for tile in choose_row(hdim, hdimv).tiles.values()]
    fitting = [x for x in _every_layout() if layout_fault(x, hdim, hdimv, itemsize, mask) is None]
    tiles = {(x.m, x.n, x.has_pingpong, x.streams) for x in fitting}
    usual = {
        choose_layout(Tile(m, n, has_pingpong, kv_stages, streams), hdim, hdimv, itemsize)
        for (m, n, has_pingpong, streams), kv_stages in product(tiles, KV_STAGES)
    }
    usual |= {*known, *(x for x in fitting if x.o_place == "v" and x.q_stages == MOST_Q_STAGES)}

    def place(x: Layout) -> tuple[bool, int, int, int, int, bool]:
        return x not in usual, min(_steps(x, y) for y in known), x.streams, -x.m, -x.n, not x.has_pingpong

    fitting.sort(key=place)
    layouts = [start, *(x for x in fitting if x != start)]
    return [plan_with(problem, layout) for layout in layouts[:most]]


def _every_layout() -> list[Layout]:
    """Whether they fit or not."""
    booleans = (True, False)
    choices = product(HEIGHTS, WIDTHS, booleans, range(1, MOST_Q_STAGES + 1), KV_STAGES, O_PLACES, STREAMS)
    return [Layout(*choice) for choice in choices]


def _steps(a: Layout, b: Layout) -> int:
    """How far two layouts are apart."""
    tile = abs(a.m - b.m) // WARPGROUP_ROWS + abs(a.n - b.n) // KEY_STEP
    stages = abs(a.q_stages - b.q_stages) + abs(a.kv_stages - b.kv_stages) + abs(a.streams - b.streams)
    return tile + stages + (a.has_pingpong != b.has_pingpong) + (a.o_place != b.o_place)
