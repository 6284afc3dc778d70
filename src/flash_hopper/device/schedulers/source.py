"""The scheduler warp: it finds the tiles of its CTA, in a dense batch or in a ragged one, and posts them for all others.

It finds the next tile while this one is computed, so neither the draw of a number nor the search for its sequence is waited
for; and not before everybody has started on this one, because a tile that is taken early is one that no other CTA can take
(two tiles earlier: causal 5 to 9 % slower, H200, 2026-11). Only of short tiles is one more taken. Numbers only grow from one
tile of a CTA to the next, so a ragged batch is searched once from front to back. All lanes of the warp work together.
"""

from typing import NamedTuple

from flash_hopper.device.dsl import Boolean, Int32, const_expr, cute, cutlass
from flash_hopper.device.lengths import sequence_row
from flash_hopper.device.pipelines import producer_state
from flash_hopper.device.schedulers.mailbox import TileMailbox
from flash_hopper.device.schedulers.numbering import draw, drawers, first_number, make_scheduler
from flash_hopper.device.sequences import (
    LengthArgs,
    RaggedTile,
    table_order,
    table_ranked_row,
    table_sequences,
)
from flash_hopper.device.warp_sum import inclusive_sum
from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.tiles import Shares, TileCoord, sequence_section, shares, tile_coord
from flash_hopper.plan.roles import TILE_SLOTS, WARP
from flash_hopper.plan.schedule import COLUMNS, is_few

SHORT_ROWS = 256  # that a tile visits in less time than a draw and a search take


class Work(NamedTuple):
    """What is to be computed: run-time values of one launch.

    `tiles` and `blocks` count a dense batch's; a ragged one is described by its table. `section`: heads side by side
    (`geometry/tiles.py`), for a ragged batch how many rows of all of them may be, 0 for one head after the other. `lengths`: for
    a kernel that makes a table's rows by itself where `is_few`; of the table it then has the counter only.
    """

    counter: cute.Tensor | None
    table: cute.Tensor | None
    tiles: Int32
    blocks: Int32
    heads: Int32
    batch: Int32
    group: Int32  # query heads that share a key head
    section: Int32
    lengths: LengthArgs | None = None


class Place(NamedTuple):
    """How far a ragged batch has been searched: `rank` sequences, a multiple of 32, hold the first `tiles` tiles.

    Of a kernel that makes rows by itself, if sequences are few: `mine` is the one that this lane holds, `total` the tiles of all.
    """

    rank: Int32
    tiles: Int32
    mine: Int32 | None
    total: Int32 | None


class DenseTiles:
    """`scheduler` is static or dynamic; `is_descending` hands out blocks from the last to the first; `streams` of a CTA have a scheduler
    warp each."""

    def __init__(self, scheduler: str, is_descending: bool, streams: int = 1) -> None:
        self.scheduler = scheduler
        self.is_descending = is_descending
        self.streams = streams

    def first(self, stream: Int32 | int = 0) -> Int32:
        """The stream's first number."""
        return first_number(self.streams, stream)

    def start(self, work: Work) -> Place:
        """Nothing has been searched."""
        return Place(Int32(0), Int32(0), None, None)

    def is_short(self, tile: TileCoord) -> bool:
        """True if a tile takes less time than to find one: not known in advance."""
        return False

    def following(self, work: Work, number: Int32, place: Place) -> Int32:
        """The CTA's number after `number`."""
        return make_scheduler(self.scheduler, work.tiles, work.counter, self.streams).following(number)

    @cute.jit
    def locate(self, work: Work, number: Int32, place: Place) -> tuple[TileCoord, Place]:
        """The tile of this number; its block is negative if there is none."""
        tile = TileCoord(Int32(-1), Int32(0), Int32(0))
        if number < work.tiles:
            found = tile_coord(number, work.blocks, work.heads, work.batch, work.section, self.is_descending)
            tile = TileCoord(*(Int32(x) for x in found))
        return tile, place


class RaggedTiles:
    """Draws numbers from a counter of the table, and finds a number's sequence by prefix sums, 32 sequences at a time
    (specification 9.3.1).

    Tiles are `tile_rows` rows of queries or, if `by_keys`, of keys. `counter`: which int of the table's header is drawn from.
    With `makes_rows` there is no table of few sequences: each lane holds one, in the order of their lengths; the counter is then
    zero before the first launch, and set back by the last draw, as that of `DynamicScheduler`. Of `sharing` warpgroups, tiles of
    queries are shared by the heads of a short sequence (`geometry/tiles.py`). `streams` of a CTA have a scheduler warp each.
    """

    def __init__(
        self,
        tile_rows: int,
        by_keys: bool,
        is_descending: bool,
        counter: int,
        makes_rows: bool = False,
        sharing: int | None = None,
        streams: int = 1,
    ) -> None:
        self.tile_rows = tile_rows
        self.by_keys = by_keys
        self.is_descending = is_descending
        self.counter = counter
        self.makes_rows = makes_rows
        self.sharing = sharing
        self.streams = streams

    def first(self, stream: Int32 | int = 0) -> Int32:
        """The stream's first number: its own, without a draw."""
        return first_number(self.streams, stream)

    @cute.jit
    def start(self, work: Work) -> Place:
        """Nothing has been searched."""
        if const_expr(not self.makes_rows):
            return Place(Int32(0), Int32(0), None, None)
        mine, last = Int32(0), table_sequences(work.table) - 1
        if is_few(last):
            mine = self.ranked(work.lengths, last)
        return Place(Int32(0), Int32(0), mine, Int32(0))

    @cute.jit
    def ranked(self, lengths: LengthArgs, last: Int32) -> Int32:
        """The sequence, up to number `last`, that is to be computed as this lane's: the longest first."""
        lane = cute.arch.lane_idx()
        length, rank, mine = Int32(-1), Int32(0), Int32(0)
        if lane <= last:
            values = sequence_row(lengths, lane, last)
            length = values[0] + values[1]
        for other in cutlass.range(last + 1, unroll=1):
            its = cute.arch.shuffle_sync(length, offset=other)
            if its > length or (its == length and other < lane):
                rank = rank + 1
        for other in cutlass.range(last + 1, unroll=1):
            if cute.arch.shuffle_sync(rank, offset=other) == lane:
                mine = other
        return mine

    def is_short(self, tile: RaggedTile) -> Boolean:
        """True if a tile takes less time than to find one."""
        return (tile.seqlen_q if self.by_keys else tile.seqlen_k) <= SHORT_ROWS

    @cute.jit
    def following(self, work: Work, number: Int32, place: Place) -> Int32:
        """The CTA's number after `number`: a draw."""
        counter = work.table.iterator + self.counter
        drawn = draw(counter)
        if const_expr(self.makes_rows):
            if is_few(table_sequences(work.table) - 1) and drawn == place.total - 1:
                if cute.arch.lane_idx() == 0:
                    work.table[self.counter] = Int32(0)
        return drawn + drawers(self.streams)

    @cute.jit
    def locate(self, work: Work, number: Int32, place: Place) -> tuple[RaggedTile, Place]:
        """The tile of this number; its block is negative if there is none."""
        rank, before, mine, _ = place
        lane = cute.arch.lane_idx()
        count = table_sequences(work.table)
        own, prefix, total = Int32(0), Int32(0), Int32(0)
        is_here, is_searching = Boolean(False), Boolean(True)
        while is_searching:
            own = Int32(0)
            if rank + lane < count:
                own = self.tiles(self.row(work, rank + lane, mine), work.heads)
            prefix = inclusive_sum(own, lane)
            total = cute.arch.shuffle_sync(prefix, offset=WARP - 1)
            is_here = number < before + total
            is_searching = not is_here and rank + WARP < count
            if is_searching:
                rank = rank + WARP
                before = before + total
        tile = RaggedTile(Int32(-1), *(Int32(0) for _ in RaggedTile._fields[1:]))
        if is_here:
            # the first lane whose sequences reach past the number
            hit = cute.arch.popc(cute.arch.vote_ballot_sync(before + prefix <= number))
            own_first = before + cute.arch.shuffle_sync(prefix - own, offset=hit)
            if const_expr(self.makes_rows):
                mine = cute.arch.shuffle_sync(mine, offset=hit)
            tile = self.tile_of(work, rank + hit, mine, number - own_first)
        return tile, Place(rank, before, place.mine, total if const_expr(self.makes_rows) else None)

    @cute.jit
    def row(self, work: Work, rank: Int32, mine: Int32 | None) -> tuple[Int32, ...]:
        """The sequence of this rank, which of few sequences is `mine`: its number, then its row of the table."""
        if const_expr(not self.makes_rows):
            return self.written_row(work.table, rank)
        found = tuple(Int32(0) for _ in range(1 + len(COLUMNS)))
        last = table_sequences(work.table) - 1
        if is_few(last):
            found = (mine, *sequence_row(work.lengths, mine, last))
        else:
            found = self.written_row(work.table, rank)
        return found

    def written_row(self, table: cute.Tensor, rank: Int32) -> tuple[Int32, ...]:
        """The same from the table."""
        row = table_ranked_row(table, rank)
        return (table_order(table)[rank], *(row[i] for i in range(len(COLUMNS))))

    def tiles(self, row: tuple[Int32, ...], heads: Int32) -> Int32:
        """Tiles of a sequence, those of unused rows included; `row` as above."""
        return self.blocks(row) * heads if self.sharing is None else self.shares(row).tiles(heads)

    def blocks(self, row: tuple[Int32, ...]) -> Int32:
        """Those of one head."""
        return ceil_div(row[1 + COLUMNS.index("allocated_k" if self.by_keys else "allocated_q")], self.tile_rows)

    def shares(self, row: tuple[Int32, ...]) -> Shares:
        """How heads share them."""
        return shares(row[1 + COLUMNS.index("allocated_q")], self.sharing)

    @cute.jit
    def tile_of(self, work: Work, rank: Int32, mine: Int32 | None, number: Int32) -> RaggedTile:
        """Tile `number` of the sequence with this rank. A tile without used rows gets a sequence without anything to visit."""
        row = self.row(work, rank, mine)
        sequence, seqlen_q, seqlen_k, *rest = row
        visited = seqlen_q if self.by_keys else seqlen_k
        section = sequence_section(work.section, visited, work.heads, work.group)
        coord = tile_coord(number, self.blocks(row), work.heads, 1, section, self.is_descending)
        block, head = Int32(coord.block), Int32(coord.head)
        if const_expr(self.sharing is not None):
            if self.shares(row).is_shared != 0:
                block, head = Int32(0), number * self.sharing
        first = block * self.tile_rows
        if self.by_keys:
            seqlen_q = seqlen_q if first < seqlen_k else Int32(0)
        else:
            seqlen_k = seqlen_k if first < seqlen_q else Int32(0)
        return RaggedTile(block, head, sequence, seqlen_q, seqlen_k, *rest)


class SchedulerWarp:
    """Posts what a source hands out. One warp, which waits for nothing but the mailbox."""

    def __init__(self, source: DenseTiles | RaggedTiles) -> None:
        self.source = source

    @cute.jit
    def run(self, work: Work, tiles: TileMailbox, stream: Int32 | int = 0) -> None:
        """All tiles of this CTA, or of this stream of it, then the end marker."""
        state = producer_state(TILE_SLOTS)
        number = self.source.first(stream)
        tile, place = self.source.locate(work, number, self.source.start(work))
        while tile.block >= 0:
            tiles.post(state, tile)
            state.advance()
            after = state.clone()
            after.advance()
            if self.source.is_short(tile):
                tiles.wait_read(state)  # the tile before this one
            else:
                tiles.wait_read(after)  # this one
            number = self.source.following(work, number, place)
            tile, place = self.source.locate(work, number, place)
        tiles.post_end(state)
