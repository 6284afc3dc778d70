"""What fits: shared memory and registers of a forward tile.

Whatever is rejected is rejected with the arithmetic. Sizes in bytes unless said.
"""

from collections.abc import Iterator
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


def _layouts(tile: Tile) -> Iterator[tuple[int, int, bool]]:
    """What to try for a tile: the stages of K and V that it asks for, or fewer, before what is usual."""
    for kv_stages in range(tile.kv_stages, 2, -1):
        yield from ((2, kv_stages, False), (2, kv_stages, True))
    yield from USUAL


def choose_buffers(tile: Tile, hdim: int, hdimv: int, itemsize: int) -> Buffers:
    """The best layout that fits."""
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES - SMEM_BARRIER_BYTES
    wanted = []
    for q_stages, kv_stages, o_aliases_q in _layouts(tile):
        size = forward_smem_bytes(tile, hdim, hdimv, itemsize, q_stages, kv_stages, o_aliases_q)
        if size <= room:
            return Buffers(q_stages, kv_stages, o_aliases_q, size)
        wanted.append(f"{q_stages} Q stages, {kv_stages} K/V stages, O {'in Q' if o_aliases_q else 'apart'}: {size}")
    raise CompileError(f"tile {tile.m}x{tile.n} with head dims {hdim}/{hdimv} needs more than {room} bytes: {wanted}")


def check_shared_memory(name: str, size_bytes: int) -> None:
    """Raise CompileError if a kernel's struct exceeds what a CTA may have; the compiler would not notice."""
    room = SMEM_LIMIT_BYTES - SMEM_RESERVED_BYTES
    if size_bytes > room:
        raise CompileError(f"{name}: {size_bytes} bytes of shared memory, {room} available")
