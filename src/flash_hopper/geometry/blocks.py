"""Which key blocks a query tile visits, and which of them need a mask.

Pure integer functions of block index, lengths and tile sizes; the kernels trace them, the CPU tests compare them with
a brute-force mask. Causal is aligned bottom-right: row i sees keys 0 .. i + seqlen_k - seqlen_q.
"""

from typing import NamedTuple

from flash_hopper.geometry.arith import Int, ceil_div, clamp, maximum, minimum


class KeyBlocks(NamedTuple):
    """Blocks [0, end) are visited, from the last to the first; [full, end) need a mask, [0, full) do not.

    `end` is at least 1, so that every tile has a first block; for rows that see no key it is masked throughout.
    """

    full: Int
    end: Int


def key_blocks(row: Int, rows: int, seqlen_q: Int, seqlen_k: Int, tile_n: int, is_causal: bool) -> KeyBlocks:
    """Key blocks for query rows [row, row + rows), for seqlen_k >= 1.

    Rows at or past `seqlen_q` need nothing: they do not lengthen the range.
    """
    end, full = ceil_div(seqlen_k, tile_n), seqlen_k // tile_n
    if is_causal:
        shift = seqlen_k - seqlen_q
        last_row = minimum(row + rows, seqlen_q) - 1
        end = minimum(end, ceil_div(last_row + shift + 1, tile_n))
        full = minimum(full, (row + shift + 1) // tile_n)
    end = maximum(end, 1)
    return KeyBlocks(clamp(full, 0, end), end)


def visible_keys(row: Int, seqlen_q: Int, seqlen_k: Int, is_causal: bool) -> Int:
    """Row `row` sees keys [0, result); the result may be negative or exceed the end of a block."""
    return minimum(seqlen_k, row + seqlen_k - seqlen_q + 1) if is_causal else seqlen_k


class QueryBlocks(NamedTuple):
    """Blocks [start, end) of query rows see a range of keys; [start, full) need a mask, [full, end) do not."""

    start: Int
    full: Int
    end: Int


def query_blocks(key: Int, keys: int, seqlen_q: Int, seqlen_k: Int, tile_m: int, is_causal: bool) -> QueryBlocks:
    """Query blocks for keys [key, key + keys), for key < seqlen_k and seqlen_q >= 1. Never empty: the last query sees
    every key. Keys at or past `seqlen_k` do not count."""
    end = ceil_div(seqlen_q, tile_m)
    if not is_causal:
        return QueryBlocks(0, 0, end)
    shift = seqlen_k - seqlen_q
    start = maximum(key - shift, 0) // tile_m
    last_key = minimum(key + keys, seqlen_k) - 1
    return QueryBlocks(start, clamp(ceil_div(last_key - shift, tile_m), start, end), end)


def first_query(key: Int, seqlen_q: Int, seqlen_k: Int, is_causal: bool) -> Int:
    """The first query row that sees `key`: at most 0 if all do, seqlen_q or more if none does (key >= seqlen_k)."""
    unseen = clamp(key - seqlen_k + 1, 0, 1) * seqlen_q  # 0 for a key that exists
    return maximum(unseen, key - (seqlen_k - seqlen_q)) if is_causal else unseen
