"""Which blocks a tile visits, and which of them need a mask.

Pure integer functions of block index, lengths and tile sizes; the kernels trace them, the CPU tests compare them with
a brute-force mask. What a single row or key sees is in `masks.py`.
"""

from typing import NamedTuple

from flash_hopper.geometry.arith import Int, ceil_div, clamp, maximum, minimum
from flash_hopper.geometry.masks import Lengths, MaskBounds, visible_keys, visible_queries

WARPGROUP_ROWS = 64  # of a tile, what one wgmma computes


class Blocks(NamedTuple):
    """Blocks [start, end) are visited; those before inner_start are cut at the front, those from inner_end on at the end.

    Both lie between start and end; if inner_end < inner_start, the blocks between them are cut at both sides, and none is
    whole. end > start: every tile has a block, masked throughout if nothing in it is visible.
    """

    start: Int
    inner_start: Int
    inner_end: Int
    end: Int


def key_blocks(row: Int, rows: Int, lengths: Lengths, tile_n: int, mask: MaskBounds) -> Blocks:
    """Key blocks for query rows [row, row + rows), visited from the last to the first.

    Rows at or past lengths.q need nothing: they do not lengthen the range. Without keys the one block is number 0.
    """
    last_row = minimum(row + rows, lengths.q) - 1
    first, last = visible_keys(row, lengths, mask), visible_keys(last_row, lengths, mask)
    end = maximum(ceil_div(last.end, tile_n), 1)
    if mask.kind in ("full", "causal"):
        return Blocks(0, 0, clamp(first.end // tile_n, 0, end), end)
    start = clamp(first.first // tile_n, 0, end - 1)
    inner_start = clamp(ceil_div(last.first, tile_n), start, end)
    return Blocks(start, inner_start, clamp(first.end // tile_n, start, end), end)


def warpgroup_blocks(row: Int, warpgroup: Int, lengths: Lengths, tile_n: int, mask: MaskBounds) -> Blocks:
    """Key blocks for one warpgroup's 64 rows of a tile that starts at `row`.

    A warpgroup without a row of the sequence gets those of the last row, so that no warpgroup's range starts or ends more
    than its distance from the tile's first or last row would explain.
    """
    first = minimum(row + warpgroup * WARPGROUP_ROWS, maximum(lengths.q - 1, row))
    return key_blocks(first, WARPGROUP_ROWS, lengths, tile_n, mask)


def query_blocks(key: Int, keys: Int, lengths: Lengths, tile_m: int, mask: MaskBounds) -> Blocks:
    """Query blocks for keys [key, key + keys), visited upwards.

    Keys at or past lengths.k need nothing here (a kernel to which they matter masks them by itself), and rows at or past
    lengths.q need no mask.
    """
    last_key = minimum(key + keys, lengths.k) - 1
    blocks = maximum(ceil_div(lengths.q, tile_m), 1)
    if mask.kind == "full":
        return Blocks(0, 0, blocks, blocks)
    first, last = visible_queries(key, lengths, mask), visible_queries(last_key, lengths, mask)
    start = clamp(first.first // tile_m, 0, blocks - 1)
    if mask.kind == "causal":
        return Blocks(start, clamp(ceil_div(last.first, tile_m), start, blocks), blocks, blocks)
    end = clamp(ceil_div(last.end, tile_m), start + 1, blocks)
    # [0, first.end) see every key; where that is all rows, the last block counts as whole
    sees_all = clamp(first.end - lengths.q + 1, 0, 1)
    inner_end = (first.end + sees_all * (tile_m - 1)) // tile_m
    inner_start = clamp(ceil_div(last.first, tile_m), start, end)
    return Blocks(start, inner_start, clamp(inner_end, start, end), end)
