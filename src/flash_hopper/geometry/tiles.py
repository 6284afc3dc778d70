"""The order in which output tiles are handed to CTAs.

A tile is (block, head, batch). Within a section of `heads_per_section` (batch, head) pairs the blocks run from the
longest causal tile to the shortest, with the pairs of the section side by side: the section's keys and values stay
in L2, and the last tiles are the short ones. One pair a section runs head by head.
"""

from typing import NamedTuple

from flash_hopper.geometry.arith import Int, ceil_div, clamp, maximum, minimum
from flash_hopper.geometry.blocks import WARPGROUP_ROWS as BAND_ROWS

# Keys and values of a section, and the fewest pairs: with fewer, CTAs run out of long tiles to start with. Of a dense batch up to
# twice as much, if the tiles in flight have so many rows of each pair, and at least eight pairs. Head dim 128, 4k: 697 TFLOP/s with
# 16 pairs, 706 with 32, 682 with 48; 1k: 506 with 64, 458 with 128 (H200, 2026-11, docs/findings/causal_order.md).
SECTION_BYTES = 32 << 20
SECTION_PAIRS = 16
SHARED_ROWS = 384
FEWEST_PAIRS = 8

# Of the backward by keys, Q, dO and the accumulator of dQ, to which a section's tiles come back; never fewer tiles than two for each
# CTA. Head dim 64, 1k: 281 TFLOP/s with 128 pairs, 312 with 64 or fewer; 4k: 458 with 64, 481 with 16, 468 with 1; head dim 128, 16k:
# 626 with 16, 641 with 1 or 2 (H200, 2026-11, docs/findings/causal_order.md).
KEY_SECTION_BYTES = 16 << 20
KEY_SECTION_ROUNDS = 2


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


def heads_per_section(
    pair_bytes: int,
    is_uneven: bool,
    heads: int,
    batch: int,
    qhead_per_kvhead: int,
    most_bytes: int = SECTION_BYTES,
    least_pairs: int = SECTION_PAIRS,
) -> int:
    """How many (batch, head) pairs share a section. `pair_bytes`: what the tiles of a pair come back to, as K and V of one key head
    of one batch entry, or what a window sees of them.

    Full attention runs head by head: interleaving heads cost 1-4 % (H200, 2026-11). Where tiles are uneven, causal or at the
    start of a window, what fits `most_bytes` is interleaved, query heads of one key head counted once, and at least
    `least_pairs`: the last tiles are then the short ones.
    """
    if not is_uneven:
        return 1
    pairs = most_bytes // max(pair_bytes, 1) * qhead_per_kvhead
    return max(1, min(heads * batch, max(pairs, least_pairs)))


def query_heads_per_section(
    pair_bytes: int, is_uneven: bool, heads: int, batch: int, qhead_per_kvhead: int, rows_in_flight: int
) -> int:
    """The same for tiles of queries of a dense batch, of which CTAs compute `rows_in_flight` rows at a time.

    What the tiles in flight of a pair share is loaded once for all of them, so that a section may exceed L2 if each pair has several.
    Sections are alike: a last one of few pairs would end with long tiles.
    """
    if not is_uneven:
        return 1
    fitting, most = (size // max(pair_bytes, 1) * qhead_per_kvhead for size in (SECTION_BYTES, 2 * SECTION_BYTES))
    pairs = max(fitting, min(most, rows_in_flight // SHARED_ROWS), FEWEST_PAIRS)
    pairs = 1 << (pairs.bit_length() - 1)  # as heads and batches mostly are
    every = max(heads * batch, 1)
    return int(ceil_div(every, ceil_div(every, pairs)))


def rows_per_section(row_bytes: int, is_uneven: bool, most_bytes: int = SECTION_BYTES) -> int:
    """Of a ragged batch: how many rows of all heads together may share a section; 0 where heads run one after the other.

    `row_bytes`: what tiles come back to for each row of one head, as keys and values.
    """
    return most_bytes // max(row_bytes, 1) if is_uneven else 0


def sequence_section(rows: Int, length: Int, heads: Int, group: Int) -> Int:
    """How many heads of a sequence share a section, given `rows_per_section`; as `heads_per_section`, at run time.

    length: rows of one head; group: heads that share them.
    """
    pairs = maximum(rows // maximum(length, 1) * group, SECTION_PAIRS)
    is_uneven = minimum(rows, 1)
    return clamp(is_uneven * pairs, 1, heads)


MOST_BANDS = 2  # rows of more bands fill a tile well enough by themselves


class Shares(NamedTuple):
    """How the tiles of a short sequence are shared by its heads, a band of 64 rows a warpgroup.

    Bands of all heads are numbered head by head, and a tile takes as many as it has warpgroups; its `TileCoord` or `RaggedTile`
    then holds the number of the first in place of a head, and block 0. `bands`: of one head; `is_shared`: 1, or 0 for a
    sequence whose tiles are of one head each.
    """

    bands: Int
    is_shared: Int
    warpgroups: int

    def tiles(self, heads: Int) -> Int:
        """Tiles of all heads of the sequence."""
        alone = ceil_div(self.bands, self.warpgroups) * heads
        return alone + self.is_shared * (ceil_div(self.bands * heads, self.warpgroups) - alone)

    def head(self, tile_head: Int, warpgroup: Int) -> Int:
        """The head of a warpgroup's rows; one past the last if there is nothing left for it."""
        return (tile_head + self.is_shared * warpgroup) >> (self.is_shared * (self.bands - 1))

    def band(self, tile_block: Int, tile_head: Int, warpgroup: Int) -> Int:
        """Which band of that head."""
        alone = tile_block * self.warpgroups + warpgroup
        return alone + self.is_shared * (((tile_head + warpgroup) & (self.bands - 1)) - alone)

    def heads(self, tile_head: Int, heads: Int) -> Int:
        """How many heads have a band in the tile."""
        last = minimum(tile_head + self.warpgroups, heads * self.bands) - 1
        return 1 + self.is_shared * ((last >> (self.is_shared * (self.bands - 1))) - self.head(tile_head, 0))


def shares(rows: Int, warpgroups: int) -> Shares:
    """How a sequence of so many query rows shares tiles of so many warpgroups: one or two bands, of which several fit."""
    bands = ceil_div(rows, BAND_ROWS)
    most = min(MOST_BANDS, warpgroups - 1)
    return Shares(bands, clamp(bands, 0, 1) * (1 - clamp(bands - most, 0, 1)), warpgroups)
