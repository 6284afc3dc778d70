"""Where the rows of a tile's sequence lie: in a dense batch, or in a ragged one.

A kernel has one of two objects, `DenseBatch` or `RaggedBatch`, and asks it for everything that depends on the difference: the
views that TMA gets, the rows of a tile's sequence in them, its lengths. In a dense batch a tile is a `TileCoord`; in a ragged
one a `RaggedTile`, which carries its sequence's row of the table (`plan/schedule.py`) along.

TMA fills what lies outside a tensor with zeros and stores nothing there. To have it do so at the end of a sequence of `n`
rows, a ragged view counts rows from the other end: its rows are LAST in number, and row i of a sequence that starts at row
`first` of the tensor is at LAST - n + i, inside for i < n only. Two more modes bring the address back: LAST steps of the first
make -LAST rows modulo 2^64, `first + n` steps of the second make the rest. (A view that starts LAST rows in front of the tensor
would do without the former; but TMA faults where the address of a tensor's start is not mapped. H200, 2026-11.)
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Constexpr, Int32, Int64, cute
from flash_hopper.device.layouts import seqlen_major
from flash_hopper.geometry.arith import maximum
from flash_hopper.geometry.masks import Lengths
from flash_hopper.geometry.tiles import TileCoord
from flash_hopper.plan.schedule import COLUMNS, HEADER, table_ints


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


class LengthArgs(NamedTuple):
    """What says how long sequences are: addresses of contiguous int32 tensors on the device, 0 where a call lacks one.

    cu_seqlens_*: (sequences + 1,), of a packed side only; seqused_*: (sequences,). rows_*: of a packed tensor, or of each padded
    entry. multiple_*: what the first row of a sequence is rounded to in padded buffers.
    """

    cu_seqlens_q: Int64
    cu_seqlens_k: Int64
    seqused_q: Int64
    seqused_k: Int64
    rows_q: Int32
    rows_k: Int32
    multiple_q: Int32
    multiple_k: Int32


class RaggedArgs(NamedTuple):
    """What a launch of a ragged batch gets beside its tensors, of which each is the first padded entry, or the packed rows.

    table: address of the table (`plan/schedule.py`), on a 32-byte boundary, or of a counter alone for the forward of few
    sequences; sequences: how many, without the one of unused rows; entries: of each tensor with rows, in the order of the
    call, how many elements lie between two padded entries, 0 if packed; lengths: for the first kernel of a call, which has the
    table written.
    """

    table: Int64
    sequences: Int32
    entries: tuple[Int64, ...]
    lengths: LengthArgs | None


LAST = 1 << 30  # no sequence has more rows
MOST = (1 << 31) - 1  # nor does any lie further from the start of its tensor, in rows


class DenseBatch:
    """Every entry of the batch is one whole sequence."""

    tile_type = TileCoord

    def table(self, ragged: RaggedArgs | None) -> None:
        """There is none."""

    def entries(self, tensors: tuple[Any, ...], ragged: RaggedArgs | None) -> tuple[Any, ...]:
        """Tensors of a call as batches: they are."""
        return tensors

    def view(self, t: cute.Tensor) -> cute.Tensor:
        """(batch, seqlen, heads, cols) for TMA: (seqlen, cols, heads, batch)."""
        return seqlen_major(t)

    def with_batch(self, m: cute.Tensor, t: cute.Tensor) -> cute.Tensor:
        """The TMA tensor `m` of the view of `t`: it has the batch already."""
        return m

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

    def padded_entry(self, tile: Any) -> Int32:
        """The batch entry of a buffer where each sequence starts a new block."""
        return tile.batch

    def padded_query(self, tile: Any) -> Any:
        """Where the sequence's queries start in such a buffer."""
        return 0

    def padded_key(self, tile: Any) -> Any:
        """Where its keys start."""
        return 0


class RaggedBatch:
    """Sequences of any length, packed in one entry or padded, each as its row of the table says."""

    tile_type = RaggedTile

    def table(self, ragged: RaggedArgs) -> cute.Tensor:
        """The table, (`table_ints(sequences)`,)."""
        return device_ints(ragged.table, table_ints(ragged.sequences), align=32)

    def entries(self, tensors: tuple[cute.Tensor | None, ...], ragged: RaggedArgs) -> tuple[Any, ...]:
        """Tensors of a call, (rows, heads, cols) or (heads, rows), as batches of as many entries as there are sequences; packed
        sequences share their entry."""
        pairs = zip(tensors, ragged.entries, strict=True)
        return tuple(None if t is None else self._batch(t, entry, ragged.sequences) for t, entry in pairs)

    def _batch(self, t: cute.Tensor, entry: Int64, sequences: Int32) -> cute.Tensor:
        if t.element_type.width < 32:
            entry = cute.assume(
                entry, divby=128 // t.element_type.width
            )  # else rows would not be read 16 bytes at a time
        layout = cute.make_layout((sequences + 1, *t.shape), stride=(entry, *t.stride))
        return cute.make_tensor(t.iterator, layout)

    def view(self, t: cute.Tensor) -> cute.Tensor:
        """(batch, seqlen, heads, cols) for TMA: (LAST, cols, heads, back, forth), see the module's text. The batch stride is
        a multiple of the row stride: `with_batch` says where an entry starts."""
        m = seqlen_major(t)
        rows, cols, heads, _ = m.stride
        shape = (Int32(LAST), m.shape[1], m.shape[2], Int32(LAST + 1), Int32(MOST))
        back = (Int64(1) << 34) - Int64(rows)  # elements; times LAST a multiple of 2^64 bytes, less LAST rows
        return cute.make_tensor(m.iterator, cute.make_layout(shape, stride=(rows, cols, heads, back, rows)))

    def with_batch(self, m: cute.Tensor, t: cute.Tensor) -> cute.Tensor:
        """The TMA tensor `m` of the view of `t`, with the batch as one more mode: so many rows an entry."""
        rows_per_entry = Int32(Int64(t.stride[0]) // maximum(Int64(t.stride[1]), Int64(1)))
        layout = cute.make_layout(
            (*m.layout.shape, t.shape[0]), stride=(*m.layout.stride, rows_per_entry * m.layout.stride[4])
        )
        return cute.make_tensor(m.iterator, layout)

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
        """The batch entry of such a tensor."""
        return tile.batch

    def stored_rows(self, tile: RaggedTile, mQ: cute.Tensor) -> Int32:
        """How many query rows are written."""
        return tile.allocated_q

    def stored_keys_count(self, tile: RaggedTile, mK: cute.Tensor) -> Int32:
        """How many key rows are written."""
        return tile.allocated_k

    def padded_entry(self, tile: RaggedTile) -> Int32:
        """The batch entry of a buffer where each sequence starts a new block: there is one for all."""
        return Int32(0)

    def padded_query(self, tile: RaggedTile) -> Int32:
        """Where the sequence's queries start in such a buffer."""
        return tile.padded_q

    def padded_key(self, tile: RaggedTile) -> Int32:
        """Where its keys start."""
        return tile.padded_k

    def _rows(self, m: cute.Tensor, tile: RaggedTile, head: Int32, first: Int32, count: Int32) -> cute.Tensor:
        sequence = m[None, None, head, LAST, first + count, tile.batch]
        return cute.domain_offset((LAST - count, 0), sequence)


def device_ints(address: Int64, count: Any, align: int = 4) -> cute.Tensor:
    """(count,) int32 at an address in global memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout((count,)))


def make_batch(is_ragged: bool) -> DenseBatch | RaggedBatch:
    """The object for a plan."""
    return RaggedBatch() if is_ragged else DenseBatch()


def table_sequences(table: cute.Tensor) -> Int32:
    """How many sequences a table holds, the last one of unused rows included."""
    return (table.shape[0] - HEADER) // (2 * len(COLUMNS) + 1)


def table_row(table: cute.Tensor, sequence: Int32) -> cute.Tensor:
    """A sequence's row, `COLUMNS` in order."""
    return cute.make_tensor(table.iterator + HEADER + sequence * len(COLUMNS), cute.make_layout(len(COLUMNS)))


def table_ranked_row(table: cute.Tensor, rank: Int32) -> cute.Tensor:
    """The row of the sequence that is computed so late; 32 bytes, on a boundary of as many."""
    return table_row(table, table_sequences(table) + rank)


def table_order(table: cute.Tensor) -> cute.Tensor:
    """The sequences' numbers in the order of computation."""
    count = table_sequences(table)
    return cute.make_tensor(table.iterator + HEADER + 2 * count * len(COLUMNS), cute.make_layout(count))


@cute.jit
def sequence_of_row(table: cute.Tensor, column: Constexpr, row: Int32) -> Int32:
    """The sequence that owns a row of a buffer where each sequence starts a new block; column: "padded_q" or "padded_k"."""
    index = COLUMNS.index(column)
    low, high = Int32(0), table_sequences(table)  # low starts at or before the row, high after it
    while high - low > 1:
        middle = (low + high) // 2
        if table_row(table, middle)[index] <= row:
            low = middle
        else:
            high = middle
    return low
