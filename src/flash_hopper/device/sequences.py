"""Where the rows of a tile's sequence lie: in a dense batch, or in a ragged one.

A kernel has one of two objects, `DenseBatch` or `RaggedBatch`, and asks it for everything that depends on the difference: the
views that TMA gets, the rows of a tile's sequence in them, its lengths. In a dense batch a tile is a `TileCoord`; in a ragged
one a `RaggedTile`, which carries its sequence's row of the table (`plan/schedule.py`) along.

TMA fills what lies outside a tensor with zeros and stores nothing there. To have it do so at the end of a sequence of `n`
rows, a ragged view has one more dimension, with the stride of a row, and starts as many rows in front of the tensor as it has
rows, R. Row i of a sequence that starts at `first` is at (R - n + i, first + n): inside for i < n only.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Int32, Int64, cute
from flash_hopper.device.layouts import seqlen_major
from flash_hopper.geometry.arith import minimum
from flash_hopper.geometry.masks import Lengths
from flash_hopper.geometry.tiles import TileCoord
from flash_hopper.plan.schedule import COLUMNS, HEADER


class RaggedTile(NamedTuple):
    """Which output tile: block, head and sequence, and the sequence's row of the table.

    `seqlen_*`: rows that are used; `allocated_*`: rows that belong to the sequence, of which the unused get zeros; `row_*`: the
    first row within the batch entry; `padded_*`: the first row in buffers where each sequence starts a new block.
    """

    block: Int32
    head: Int32
    batch: Int32
    seqlen_q: Int32
    seqlen_k: Int32
    allocated_q: Int32
    allocated_k: Int32
    row_q: Int32
    row_k: Int32
    padded_q: Int32
    padded_k: Int32


assert RaggedTile._fields[3:] == COLUMNS


class DenseBatch:
    """Every entry of the batch is one whole sequence."""

    tile_type = TileCoord

    def view(self, t: cute.Tensor) -> cute.Tensor:
        """(batch, seqlen, heads, cols) for TMA: (seqlen, cols, heads, batch)."""
        return seqlen_major(t)

    def lengths(self, tile: Any, mQ: cute.Tensor, mK: cute.Tensor) -> Lengths:
        """Queries and keys of the tile's sequence."""
        return Lengths(mQ.shape[0], mK.shape[0])

    def queries(self, m: cute.Tensor, tile: Any, head: Int32) -> cute.Tensor:
        """(rows, cols) of the tile's sequence in a view of queries, to be read."""
        return m[None, None, head, tile.batch]

    def keys(self, m: cute.Tensor, tile: Any, head: Int32) -> cute.Tensor:
        """The same in a view of keys."""
        return m[None, None, head, tile.batch]

    def stored_queries(self, m: cute.Tensor, tile: Any, head: Int32) -> cute.Tensor:
        """(rows, cols) to be written: with rows that are allocated but not used."""
        return m[None, None, head, tile.batch]

    def stored_keys(self, m: cute.Tensor, tile: Any, head: Int32) -> cute.Tensor:
        """The same in a view of keys."""
        return m[None, None, head, tile.batch]

    def query_row(self, tile: Any) -> Any:
        """Where the sequence's queries start in a tensor that is read or written without TMA."""
        return 0

    def key_row(self, tile: Any) -> Any:
        """Where its keys start."""
        return 0

    def entry(self, tile: Any, batch: Int32) -> Int32:
        """The batch entry of such a tensor."""
        return tile.batch

    def stored_rows(self, tile: Any, mQ: cute.Tensor) -> Int32:
        """How many query rows are written."""
        return mQ.shape[0]

    def stored_keys_count(self, tile: Any, mK: cute.Tensor) -> Int32:
        """How many key rows are written."""
        return mK.shape[0]


class RaggedBatch:
    """Sequences of any length, packed in one entry or padded, each as its row of the table says."""

    tile_type = RaggedTile

    def view(self, t: cute.Tensor) -> cute.Tensor:
        """(batch, seqlen, heads, cols) for TMA: (seqlen, cols, heads, batch, end), see the module's text."""
        m = seqlen_major(t)
        rows, stride = m.shape[0], m.stride[0]
        iterator = (m.iterator - Int64(rows) * stride).align(16)
        return cute.make_tensor(iterator, cute.make_layout((*m.shape, rows + 1), stride=(*m.stride, stride)))

    def lengths(self, tile: RaggedTile, mQ: cute.Tensor, mK: cute.Tensor) -> Lengths:
        """Queries and keys of the tile's sequence."""
        return Lengths(tile.seqlen_q, tile.seqlen_k)

    def queries(self, m: cute.Tensor, tile: RaggedTile, head: Int32) -> cute.Tensor:
        """(rows, cols) of the tile's sequence in a view of queries, to be read."""
        return self._rows(m, tile, head, tile.row_q, tile.seqlen_q)

    def keys(self, m: cute.Tensor, tile: RaggedTile, head: Int32) -> cute.Tensor:
        """The same in a view of keys."""
        return self._rows(m, tile, head, tile.row_k, tile.seqlen_k)

    def stored_queries(self, m: cute.Tensor, tile: RaggedTile, head: Int32) -> cute.Tensor:
        """(rows, cols) to be written: with rows that are allocated but not used."""
        return self._rows(m, tile, head, tile.row_q, tile.allocated_q)

    def stored_keys(self, m: cute.Tensor, tile: RaggedTile, head: Int32) -> cute.Tensor:
        """The same in a view of keys."""
        return self._rows(m, tile, head, tile.row_k, tile.allocated_k)

    def query_row(self, tile: RaggedTile) -> Int32:
        """Where the sequence's queries start in a tensor that is read or written without TMA."""
        return tile.row_q

    def key_row(self, tile: RaggedTile) -> Int32:
        """Where its keys start."""
        return tile.row_k

    def entry(self, tile: RaggedTile, batch: Int32) -> Int32:
        """The batch entry of such a tensor: packed sequences share the only one."""
        return minimum(tile.batch, batch - 1)

    def stored_rows(self, tile: RaggedTile, mQ: cute.Tensor) -> Int32:
        """How many query rows are written."""
        return tile.allocated_q

    def stored_keys_count(self, tile: RaggedTile, mK: cute.Tensor) -> Int32:
        """How many key rows are written."""
        return tile.allocated_k

    def _rows(self, m: cute.Tensor, tile: RaggedTile, head: Int32, first: Int32, count: Int32) -> cute.Tensor:
        sequence = m[None, None, head, self.entry(tile, m.shape[3]), first + count]
        return cute.domain_offset((m.shape[0] - count, 0), sequence)


def make_batch(is_ragged: bool) -> DenseBatch | RaggedBatch:
    """The object for a plan."""
    return RaggedBatch() if is_ragged else DenseBatch()


def table_sequences(table: cute.Tensor) -> Int32:
    """How many sequences a table holds, the last one of unused rows included."""
    return (table.shape[0] - HEADER) // (len(COLUMNS) + 1)


def table_row(table: cute.Tensor, sequence: Int32) -> cute.Tensor:
    """A sequence's row, `COLUMNS` in order."""
    return cute.make_tensor(table.iterator + HEADER + sequence * len(COLUMNS), cute.make_layout(len(COLUMNS)))


def table_order(table: cute.Tensor) -> cute.Tensor:
    """The sequences' numbers in the order of computation."""
    count = table_sequences(table)
    return cute.make_tensor(table.iterator + HEADER + count * len(COLUMNS), cute.make_layout(count))
