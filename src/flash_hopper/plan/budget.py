"""What fits: shared memory and registers of a forward tile.

Whatever is rejected is rejected with the arithmetic. Sizes in bytes unless said.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flash_hopper.plan.tables.forward import Tile
from flash_hopper.problem.errors import CompileError

SMEM_LIMIT_BYTES = 232_448  # per CTA on compute capability 9.0
SMEM_RESERVED_BYTES = 1024  # taken by the runtime at the bottom
SMEM_BARRIER_BYTES = 1024  # mbarriers and the tile mailbox, in front of the first 1024-byte aligned buffer


@dataclass(frozen=True, slots=True)
class Buffers:
    """How the tensor buffers of a forward tile are laid out, and their size."""

    q_stages: int
    kv_stages: int
    o_aliases_q: bool
    tensor_bytes: int


def forward_smem_bytes(
    tile: Tile, hdim: int, hdimv: int, itemsize: int, q_stages: int, kv_stages: int, o_aliases_q: bool
) -> int:
    """Shared memory of the Q, K, V and O buffers."""
    q = tile.m * hdim * q_stages
    kv = tile.n * (hdim + hdimv) * kv_stages
    o = tile.m * hdimv
    # O in its tile's stage of Q, as large as the larger of the two
    return (max(q, o * q_stages) + kv if o_aliases_q else q + kv + o) * itemsize


# (stages of Q, stages of K and V, O in Q's buffer), the best first. Usually a second stage of Q comes first, as it hides the
# tile's start, then a buffer for O.
USUAL = ((2, 2, False), (1, 2, False), (1, 2, True))


def _layouts(most: int) -> Iterator[tuple[int, int, bool]]:
    """What to try for a tile: the stages of K and V that it asks for, or fewer, before what is usual."""
    for kv_stages in range(most, 2, -1):
        yield from ((2, kv_stages, False), (2, kv_stages, True))
    yield from USUAL


def choose_buffers(tile: Tile, hdim: int, hdimv: int, itemsize: int) -> Buffers:
    """The best layout that fits."""

    def size(q_stages: int, kv_stages: int, o_aliases_q: bool) -> int:
        return forward_smem_bytes(tile, hdim, hdimv, itemsize, q_stages, kv_stages, o_aliases_q)

    return _first_that_fits(tile.kv_stages, size, f"tile {tile.m}x{tile.n} with head dims {hdim}/{hdimv}")


def choose_fp8_buffers(
    m: int, n: int, hdim: int, hdimv: int, behind: int, apart: int, out_itemsize: int, kv_stages: int
) -> Buffers:
    """The best layout that fits an e4m3 tile of m x n, whose O is wider than its Q, with so many columns of ones behind those
    of each stage of V, or apart from them."""

    def size(q_stages: int, kv_stages: int, o_aliases_q: bool) -> int:
        q, o = m * hdim, m * hdimv * out_itemsize
        kv = n * ((hdim + hdimv + behind) * kv_stages + apart)
        return max(q, o) * q_stages + kv if o_aliases_q else q * q_stages + kv + o

    return _first_that_fits(kv_stages, size, f"e4m3 tile {m}x{n} with head dims {hdim}/{hdimv}")


def _first_that_fits(kv_stages: int, size_of: Callable[[int, int, bool], int], what: str) -> Buffers:
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES
    wanted = []
    for layout in _layouts(kv_stages):
        size = size_of(*layout)
        if size <= room:
            return Buffers(*layout, size)
        q_stages, kv_stages, o_aliases_q = layout
        wanted.append(f"{q_stages} Q stages, {kv_stages} K/V stages, O {'in Q' if o_aliases_q else 'apart'}: {size}")
    raise CompileError(f"{what} needs more than {room} bytes: {wanted}")


def check_shared_memory(name: str, size_bytes: int) -> None:
    """Raise CompileError if a kernel's struct exceeds what a CTA may have; the compiler would not notice."""
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES
    if size_bytes > room:
        raise CompileError(f"{name}: {size_bytes} bytes of shared memory, {room} available")
