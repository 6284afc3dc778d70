"""What fits: shared memory and registers of a forward tile.

Whatever is rejected is rejected with the arithmetic. Sizes in bytes unless said. `forward.py` asks for the best layout of a tile of
the tables, `candidates.py` and `own_tiles.py` whether a given layout can be.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from flash_hopper.geometry.blocks import WARPGROUP_ROWS
from flash_hopper.plan.tables.forward import CHUNK_MAX_M, Tile
from flash_hopper.problem.errors import CompileError
from flash_hopper.problem.mask import MaskKind

SMEM_LIMIT_BYTES = 232_448  # per CTA on compute capability 9.0
SMEM_RESERVED_BYTES = 1024  # taken by the runtime at the bottom
SMEM_BARRIER_BYTES = 1024  # mbarriers and the tile mailbox, in front of the first 1024-byte aligned buffer

# (producer, consumer) registers a thread by number of a CTA's consumer warpgroups, steps of 8. A producer with 24 spills in
# the causal forward at head dim 224; some kernels need every register in their consumers.
REGISTERS = {1: (56, 256), 2: (40, 232), 3: (32, 160), 4: (32, 112)}
# Beside S, P and O a consumer thread of the forward holds addresses, its softmax state and operands on the way. With 24 left every
# tile tried spills, with 28 some do not (DSL 4.8, 2026-11); for the rest only the compiler knows.
OTHER_REGISTERS = 28

HDIM_STEP = 32  # head dims are padded to this in shared memory: one 64-byte swizzle row of a 16-bit type
KEY_STEP = 16  # a step of PV
FEWEST_KEYS, MOST_KEYS = 32, 256  # what a chain of the softmax takes, and the widest QK
MOST_Q_STAGES, MOST_KV_STAGES = 2, 8
MOST_STREAMS = 2  # each takes two warps of the producer's warpgroup


# Where O is staged on its way out: in a buffer of its own, in its tile's stage of Q, or in stages of V, one a warpgroup.
OPlace = Literal["apart", "q", "v"]
O_PLACES: tuple[OPlace, ...] = get_args(OPlace)
PLACE_WORDS: dict[OPlace, str] = {"apart": "apart", "q": "in Q", "v": "in V"}


@dataclass(frozen=True, slots=True)
class Layout:
    """A forward tile with its stages: all of a `ForwardPlan` that may be chosen freely, in its words."""

    m: int
    n: int
    has_pingpong: bool
    q_stages: int
    kv_stages: int
    o_place: OPlace
    streams: int = 1

    def __str__(self) -> str:
        flags = (" turns" if self.has_pingpong else "") + (
            "" if self.o_place == "apart" else f" O {PLACE_WORDS[self.o_place]}"
        )
        flags += f" {self.streams} streams" if self.streams > 1 else ""
        return f"{self.m}x{self.n} q{self.q_stages} kv{self.kv_stages}{flags}"


@dataclass(frozen=True, slots=True)
class Buffers:
    """How the tensor buffers of a forward tile are laid out, and their size."""

    q_stages: int
    kv_stages: int
    o_place: OPlace
    tensor_bytes: int


def forward_smem_bytes(
    tile: Tile, hdim: int, hdimv: int, itemsize: int, q_stages: int, kv_stages: int, o_place: OPlace
) -> int:
    """Shared memory of the Q, K, V and O buffers of all streams."""
    q = tile.m * hdim * q_stages
    kv = tile.n * (hdim + hdimv) * kv_stages
    o = tile.m * hdimv
    # O in its tile's stage of Q, as large as the larger of the two
    each = {"apart": q + kv + o, "q": max(q, o * q_stages) + kv, "v": q + kv}[o_place]
    return each * itemsize * tile.streams


# (stages of Q, stages of K and V, where O is staged), the best first. Usually a second stage of Q comes first, as it hides the
# tile's start, then a buffer for O. With one stage of Q, O is better in V, as the next tile's Q is loaded meanwhile (H200, 2026-11,
# docs/findings/one_q_stage.md).
USUAL: tuple[tuple[int, int, OPlace], ...] = ((2, 2, "apart"), (1, 2, "apart"), (1, 2, "v"), (1, 2, "q"))


def _layouts(most: int) -> Iterator[tuple[int, int, OPlace]]:
    """What to try for a tile: the stages of K and V that it asks for, or fewer, before what is usual."""
    for kv_stages in range(most, 2, -1):
        yield from ((2, kv_stages, "apart"), (2, kv_stages, "q"))
    yield from USUAL


def _layouts_with_o_in_v(tile: Tile) -> Iterator[tuple[int, int, OPlace]]:
    """What to try for a tile that stages O in V: its stages of Q before those of K and V."""
    for q_stages in range(tile.q_stages, 0, -1):
        yield from ((q_stages, kv_stages, "v") for kv_stages in range(tile.kv_stages, 1, -1))


def _fits_v(m: int, n: int, kv_stages: int) -> bool:
    """Whether each warpgroup finds a stage of V for its 64 rows of O."""
    return n >= WARPGROUP_ROWS and kv_stages >= m // WARPGROUP_ROWS


def choose_buffers(tile: Tile, hdim: int, hdimv: int, itemsize: int) -> Buffers:
    """The best layout that fits."""

    def size(q_stages: int, kv_stages: int, o_place: OPlace) -> int | None:
        if o_place == "v" and not _fits_v(tile.m, tile.n, kv_stages):
            return None
        return forward_smem_bytes(tile, hdim, hdimv, itemsize, q_stages, kv_stages, o_place)

    streams = f" in {tile.streams} streams" if tile.streams > 1 else ""
    layouts = _layouts_with_o_in_v(tile) if tile.o_in_v else _layouts(tile.kv_stages)
    return _first_that_fits(layouts, size, f"tile {tile.m}x{tile.n}{streams} with head dims {hdim}/{hdimv}")


def choose_layout(tile: Tile, hdim: int, hdimv: int, itemsize: int) -> Layout:
    """A tile of the tables with the best buffers that fit."""
    best = choose_buffers(tile, hdim, hdimv, itemsize)
    return Layout(tile.m, tile.n, tile.has_pingpong, best.q_stages, best.kv_stages, best.o_place, tile.streams)


def held_registers(n: int, hdimv: int) -> int:
    """Registers of a consumer thread for 64 rows: S in float32, P as its 16-bit copy, O in float32."""
    return n // 2 + n // 4 + hdimv // 2


def layout_fault(layout: Layout, hdim: int, hdimv: int, itemsize: int, mask: MaskKind) -> str | None:
    """Why a layout cannot be for padded head dims and a mask, with the field and the arithmetic; None if it can, as far as is known
    without compiling."""
    if not 1 <= layout.streams <= MOST_STREAMS:
        return f"streams must be 1 to {MOST_STREAMS}, got {layout.streams}"
    rows = layout.m * layout.streams
    warpgroups, of_streams = rows // WARPGROUP_ROWS, f" in {layout.streams} streams" if layout.streams > 1 else ""
    if layout.m % WARPGROUP_ROWS or warpgroups not in REGISTERS:
        most = max(REGISTERS) * WARPGROUP_ROWS // layout.streams
        return f"m must be a multiple of {WARPGROUP_ROWS} up to {most}{of_streams}, got {layout.m}"
    if mask == "chunk" and rows > CHUNK_MAX_M:
        return f"m must be at most {CHUNK_MAX_M // layout.streams} for chunks{of_streams}, got {layout.m}"
    if layout.n % KEY_STEP or not FEWEST_KEYS <= layout.n <= MOST_KEYS:
        return f"n must be a multiple of {KEY_STEP} from {FEWEST_KEYS} to {MOST_KEYS}, got {layout.n}"
    if layout.has_pingpong and layout.m == WARPGROUP_ROWS:
        return f"has_pingpong must be false with one warpgroup (m = {layout.m}), which has nobody to take turns with"
    if not 1 <= layout.q_stages <= MOST_Q_STAGES:
        return f"q_stages must be 1 to {MOST_Q_STAGES}, got {layout.q_stages}"
    if not 2 <= layout.kv_stages <= MOST_KV_STAGES:
        return f"kv_stages must be 2 to {MOST_KV_STAGES}, got {layout.kv_stages}"
    if layout.o_place not in O_PLACES:
        return f"o_place must be one of {', '.join(O_PLACES)}, got {layout.o_place!r}"
    if layout.o_place == "v" and not _fits_v(layout.m, layout.n, layout.kv_stages):
        return (
            f"o_place v needs n of at least {WARPGROUP_ROWS} and a stage of V for each of a tile's {layout.m // WARPGROUP_ROWS} "
            f"warpgroups, got n = {layout.n} and kv_stages = {layout.kv_stages}"
        )
    held, registers = held_registers(layout.n, hdimv), REGISTERS[warpgroups][1]
    if held + OTHER_REGISTERS > registers:
        return (
            f"n = {layout.n} with head dim {hdimv} of v takes {held} registers for S, P and O and at least "
            f"{OTHER_REGISTERS} more, a thread of {warpgroups} warpgroups has {registers}"
        )
    tile = Tile(layout.m, layout.n, streams=layout.streams)
    stages = layout.q_stages, layout.kv_stages, layout.o_place
    size, room = forward_smem_bytes(tile, hdim, hdimv, itemsize, *stages), _room()
    if size > room:
        return f"kv_stages and q_stages of {layout} with head dims {hdim}/{hdimv} take {size} bytes, there are {room}"
    return None


def choose_fp8_buffers(
    m: int, n: int, hdim: int, hdimv: int, behind: int, apart: int, out_itemsize: int, kv_stages: int
) -> Buffers:
    """The best layout that fits an e4m3 tile of m x n, whose O is wider than its Q, with so many columns of ones behind those
    of each stage of V, or apart from them."""

    def size(q_stages: int, kv_stages: int, o_place: OPlace) -> int | None:
        q, o = m * hdim, m * hdimv * out_itemsize
        kv = n * ((hdim + hdimv + behind) * kv_stages + apart)
        return {"apart": q * q_stages + kv + o, "q": max(q, o) * q_stages + kv, "v": None}[o_place]

    return _first_that_fits(_layouts(kv_stages), size, f"e4m3 tile {m}x{n} with head dims {hdim}/{hdimv}")


def _room() -> int:
    """Bytes for tensor buffers."""
    return SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES


def _first_that_fits(
    layouts: Iterable[tuple[int, int, OPlace]], size_of: Callable[[int, int, OPlace], int | None], what: str
) -> Buffers:
    """`size_of` gives bytes, or None for what cannot be."""
    room = _room()
    wanted = []
    for layout in layouts:
        size = size_of(*layout)
        if size is None:
            continue
        if size <= room:
            return Buffers(*layout, size)
        q_stages, kv_stages, o_place = layout
        wanted.append(f"{q_stages} Q stages, {kv_stages} K/V stages, O {PLACE_WORDS[o_place]}: {size}")
    raise CompileError(f"{what} needs more than {room} bytes: {wanted}")


def check_shared_memory(name: str, size_bytes: int) -> None:
    """Raise CompileError if a kernel's struct exceeds what a CTA may have; the compiler would not notice."""
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES
    if size_bytes > room:
        raise CompileError(f"{name}: {size_bytes} bytes of shared memory, {room} available")
