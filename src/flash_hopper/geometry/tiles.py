"""The order in which output tiles are handed to CTAs.

A tile is (block, head, batch). Within a section of `heads_per_section` (batch, head) pairs the blocks run from the
longest causal tile to the shortest, with the pairs of the section side by side: the section's keys and values stay
in L2, and the last tiles are the short ones. One pair a section runs head by head.
"""

from typing import NamedTuple

from flash_hopper.geometry.arith import Int, clamp, maximum, minimum

# Keys and values of a section; 32 MiB was best up to 4k tokens, and never fewer than 16 pairs: with fewer, CTAs run out
# of long tiles to start with (H200, 2026-11, docs/findings/causal_order.md).
SECTION_BYTES = 32 << 20
SECTION_PAIRS = 16


class TileCoord(NamedTuple):
    """Which output tile: block of query rows (or of keys), head, batch entry."""

    block: Int
    head: Int
    batch: Int


def tile_coord(
    tile: Int, blocks: Int, heads: Int, batch: Int, heads_per_section: Int, is_descending: bool = True
) -> TileCoord:
    """Coordinates of tile number `tile` of blocks * heads * batch. The last section may hold fewer pairs.

    Blocks of query rows are handed out in descending order, blocks of keys in ascending order: causal makes the last
    rows and the first keys the longest tiles.
    """
    section = tile // (blocks * heads_per_section)
    first_pair = section * heads_per_section
    pairs = minimum(heads_per_section, heads * batch - first_pair)
    rest = tile - first_pair * blocks
    rank = rest // pairs
    pair = first_pair + rest - rank * pairs
    batch_idx = pair // heads
    return TileCoord(blocks - 1 - rank if is_descending else rank, pair - batch_idx * heads, batch_idx)


def heads_per_section(key_bytes: int, is_uneven: bool, heads: int, batch: int, qhead_per_kvhead: int) -> int:
    """How many (batch, head) pairs share a section. `key_bytes`: K and V of one key head of one batch entry, or what a window
    sees of them.

    Full attention runs head by head: interleaving heads cost 1-4 % (H200, 2026-11). Where tiles are uneven, causal or at the
    start of a window, what fits `SECTION_BYTES` is interleaved, query heads of one key head counted once, and at least
    `SECTION_PAIRS`: the last tiles are then the short ones.
    """
    if not is_uneven:
        return 1
    pairs = SECTION_BYTES // max(key_bytes, 1) * qhead_per_kvhead
    return max(1, min(heads * batch, max(pairs, SECTION_PAIRS)))


def rows_per_section(row_bytes: int, is_uneven: bool) -> int:
    """Of a ragged batch: how many rows of all heads together may share a section; 0 where heads run one after the other.

    `row_bytes`: of one row of one head, keys and values.
    """
    return SECTION_BYTES // max(row_bytes, 1) if is_uneven else 0


def sequence_section(rows: Int, length: Int, heads: Int, group: Int) -> Int:
    """How many heads of a sequence share a section, given `rows_per_section`; as `heads_per_section`, at run time.

    length: rows of one head; group: heads that share them.
    """
    pairs = maximum(rows // maximum(length, 1) * group, SECTION_PAIRS)
    is_uneven = minimum(rows, 1)
    return clamp(is_uneven * pairs, 1, heads)
