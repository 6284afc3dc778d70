"""The prepare kernel and the scheduler warp, run as plain Python (`simt.py`): the very code that is traced for the GPU.

Claims are those of specification 9.3.1 and 9.4.1: the table says what the lengths say, every tile of every sequence is found by
one CTA, with its sequence's lengths, and every warp ends, whatever the number of CTAs and however their draws interleave.
"""

import random
import time
from collections import Counter
from itertools import product
from typing import NamedTuple

import pytest
from simt import WARP, Device, Tensor, copies

from flash_hopper.geometry.arith import ceil_div
from flash_hopper.geometry.tiles import TileCoord, shares
from flash_hopper.plan.schedule import COLUMNS, FEW, HEADER, table_ints

TILE = 64
warp_sum, sequences, lengths, numbering, source, schedule = copies(
    "flash_hopper.device.warp_sum",
    "flash_hopper.device.sequences",
    "flash_hopper.device.lengths",
    "flash_hopper.device.schedulers.numbering",
    "flash_hopper.device.schedulers.source",
    "flash_hopper.kernels.schedule.kernel",
)


MEMORY: dict[int, Tensor] = {}  # by address


@pytest.fixture
def device(monkeypatch) -> Device:
    assert schedule.BUCKETS <= schedule.THREADS, "a thread a bucket"
    MEMORY.clear()
    monkeypatch.setattr(lengths, "device_ints", lambda address, count: MEMORY[address])
    monkeypatch.setattr(schedule, "THREADS", schedule.BUCKETS)
    found = Device(monkeypatch, warp_sum, sequences, lengths, numbering, source, schedule)
    monkeypatch.setattr(source, "draw", numbering.draw)
    return found


class Lengths:
    """One side of a batch. `gaps`: rows behind the used ones of each sequence; `unused`: packed rows behind the last one."""

    def __init__(self, used, gaps=None, unused=0, size=None) -> None:
        self.used, self.has_gaps = list(used), gaps is not None
        self.gaps = list(gaps) if gaps is not None else [0] * len(self.used)
        self.unused, self.size = unused, size

    @property
    def allocated(self) -> list[int]:
        if self.size is not None:
            return [self.size] * len(self.used)
        return [n + gap for n, gap in zip(self.used, self.gaps, strict=True)]

    @property
    def starts(self) -> list[int]:
        """In its entry of the batch, of all sequences and the rows behind them."""
        if self.size is not None:
            return [0] * (len(self.used) + 1)
        return [sum(self.allocated[:i]) for i in range(len(self.used) + 1)]

    @property
    def side(self) -> "Side":
        seqused = self.used if self.has_gaps or self.size is not None else None
        cu_seqlens = self.starts if self.size is None else None
        return Side(cu_seqlens, seqused, self.size if self.size is not None else sum(self.allocated) + self.unused)


class Side(NamedTuple):
    """Queries or keys as a call gives them; None for a tensor that is not there."""

    cu_seqlens: list[int] | None
    seqused: list[int] | None
    rows: int


def length_args(q: Side, k: Side, multiples=(1, 1)):
    """As the host code makes them."""
    addresses = [address_of(values) for values in (q.cu_seqlens, k.cu_seqlens, q.seqused, k.seqused)]
    return sequences.LengthArgs(*addresses, q.rows, k.rows, *multiples)


def address_of(values) -> int:
    if values is None:
        return 0
    address = 0x1000 * (len(MEMORY) + 1)
    MEMORY[address] = Tensor.of(values)
    return address


def prepared(device: Device, q: Lengths, k: Lengths, multiples=(1, 1)) -> Tensor:
    return written(device, length_args(q.side, k.side, multiples), len(q.used))


def written(device: Device, args, batch: int) -> Tensor:
    table = Tensor.of([None] * table_ints(batch))
    kernel = schedule.ScheduleKernel()
    device.run(1, schedule.BUCKETS, lambda: kernel.kernel(args, table))
    return table


def rows_of(table: Tensor) -> list[dict[str, int]]:
    count = sequences.table_sequences(table)
    return [dict(zip(COLUMNS, sequences.table_row(table, i).values, strict=True)) for i in range(count)]


def drawn(batch: int, longest: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.choice((0, 1, draw.randint(0, longest))) for _ in range(batch)]


BATCHES = {
    "packed": (Lengths([5, 0, 700]), Lengths([9, 3, 0])),
    "packed, rows behind it": (Lengths([1, 64, 65], unused=77), Lengths([0, 0, 0], unused=1)),
    "packed with used lengths": (Lengths([1, 0, 40], [3, 5, 0], 2), Lengths([64, 64, 0], [0, 1, 7])),
    "padded": (Lengths([10, 0, 3], size=12), Lengths([300, 1, 0], size=300)),
    "packed queries, padded keys": (Lengths(drawn(40, 90, 1)), Lengths(drawn(40, 500, 2), size=500)),
    "padded queries, packed keys": (Lengths(drawn(33, 90, 3), size=90), Lengths(drawn(33, 500, 4), unused=3)),
    "no sequence": (Lengths([], unused=5), Lengths([])),
    "lengths of every size": (
        Lengths([0, 1, 1 << 28, 3, 1 << 20, 17, 1 << 12]),
        Lengths([0, 5, 1 << 28, 0, 1 << 19, 0, 0]),
    ),
    "more sequences than threads": (Lengths(drawn(600, 3000, 5)), Lengths(drawn(600, 3000, 6))),
}


@pytest.mark.parametrize("batch", BATCHES)
def test_the_table_says_what_the_lengths_say_and_puts_the_longest_first(batch, device):
    sides, multiples = BATCHES[batch], (1, 1) if batch == "packed" else (64, 128)
    table = prepared(device, *sides, multiples)
    check_rows(table, sides, multiples)
    check_order(table)


def check_rows(table, sides, multiples):
    found = rows_of(table)
    for letter, side, multiple in zip("qk", sides, multiples, strict=True):
        rows = [{name[:-2]: row[name] for name in COLUMNS if name.endswith(letter)} for row in found]
        assert [row["seqlen"] for row in rows] == [*side.used, 0]
        assert [row["allocated"] for row in rows] == [*side.allocated, side.unused]
        assert [row["row"] for row in rows[:-1]] == side.starts[:-1]
        assert side.unused == 0 or rows[-1]["row"] == side.starts[-1]
        padded = [row["padded"] for row in rows]
        assert all(first % multiple == 0 for first in padded)
        ends = [first + ceil_div(row["seqlen"], multiple) * multiple for first, row in zip(padded, rows, strict=True)]
        assert all(end <= first for end, first in zip(ends, padded[1:], strict=False))
    assert table.values[:HEADER] == [0] * HEADER


def check_order(table):
    """Every sequence once, with its row; none comes behind one that is shorter by more than an eighth."""
    order, rows = sequences.table_order(table).values, rows_of(table)
    assert sorted(order) == list(range(len(rows)))
    ranked = [sequences.table_ranked_row(table, rank).values for rank in range(len(rows))]
    assert [list(rows[i].values()) for i in order] == ranked
    lengths = [row["seqlen_q"] + row["seqlen_k"] for row in rows]
    shortest = max(lengths)
    for sequence in order:
        assert 8 * lengths[sequence] <= 9 * max(shortest, 1), (sequence, lengths[sequence], shortest)
        shortest = min(shortest, lengths[sequence])


@pytest.mark.parametrize("seed", range(2))
def test_lengths_that_make_no_sense_lead_to_no_row_outside_the_tensors(seed, device):
    """Decreasing, negative or too large offsets and used lengths: results are undefined, memory is not."""
    draw, batch, rows = random.Random(seed), 40, 1000
    wild = [[draw.randint(-2000, 3000) for _ in range(batch + 1)] for _ in range(4)]
    args = length_args(Side(wild[0], wild[1], rows), Side(None, wild[2], 100), (64, 64))
    for row in rows_of(written(device, args, batch)):
        assert 0 <= row["row_q"] <= row["row_q"] + row["allocated_q"] <= rows
        assert row["row_k"] == 0 and 0 <= row["allocated_k"] <= 100
        assert 0 <= row["seqlen_q"] <= row["allocated_q"] and 0 <= row["seqlen_k"] <= row["allocated_k"]


class Posted:
    """Stands for the mailbox: what each scheduler warp posts, by CTA and stream, in order, with its end."""

    def __init__(self, device: Device) -> None:
        self.device, self.tiles, self.ended = device, {}, Counter()

    def post(self, state, tile) -> None:
        if self.device.lane_idx() == 0:
            self.tiles.setdefault(self.warp, []).append(tile)

    def wait_read(self, state) -> None:
        if self.device.lane_idx() == 0:
            time.sleep(random.random() * 1e-3)  # other CTAs draw meanwhile

    def post_end(self, state) -> None:
        if self.device.lane_idx() == 0:
            self.ended[self.warp] += 1

    @property
    def warp(self) -> tuple[int, int]:
        return self.device.block_idx()[0], self.device.stream()

    @property
    def all(self) -> list:
        return [tile for tiles in self.tiles.values() for tile in tiles]


def searched(device: Device, tiles, work, grid: int) -> Posted:
    posted, streams = Posted(device), tiles.streams
    warp = source.SchedulerWarp(tiles)
    device.run(grid, WARP, lambda: warp.run(work, posted, device.stream()), streams)
    assert posted.ended == dict.fromkeys(product(range(grid), range(streams)), 1), "every scheduler warp ends, once"
    return posted


SEARCHES = {
    "one sequence": ([200], [300]),
    "31": (drawn(31, 70, 1), drawn(31, 70, 2)),
    "32": (drawn(32, 70, 3), drawn(32, 70, 4)),
    "62, the first 40 empty": ([0] * 40 + [5] * 22, [5] * 62),
    "97, all empty but one": ([0] * 96 + [130], [0] * 97),
    "all empty": ([0] * 33, [0] * 33),
    "one long and many short": ([3] * 20 + [1500] + [1] * 20, [20] * 41),
}


@pytest.mark.parametrize(("grid", "by_keys", "streams"), [(1, False, 1), (3, True, 1), (5, False, 1), (2, False, 2)])
@pytest.mark.parametrize("name", SEARCHES)
def test_every_tile_of_every_sequence_is_found_once_with_its_lengths(name, grid, by_keys, streams, device):
    q, k = with_gaps(*SEARCHES[name])
    table, counter = prepared(device, q, k), 3
    work = source.Work(None, table, 0, 0, HEADS, len(q.used), 1, 1000 if grid > 1 else 0)
    tiles = source.RaggedTiles(TILE, by_keys, is_descending=not by_keys, counter=counter, streams=streams)
    total = check_tiles(searched(device, tiles, work, grid), rows_of(table), by_keys)
    assert table[counter] == total, "one draw a tile, to find the next"


@pytest.mark.parametrize(
    ("grid", "sharing", "streams"), [(1, None, 1), (5, 2, 1), (1, 3, 1), (5, 4, 1), (1, 2, 2), (3, None, 2)]
)
@pytest.mark.parametrize("name", [*SEARCHES, "no sequence"])
def test_a_kernel_that_makes_rows_needs_no_table_of_few_sequences_and_leaves_its_counter_at_zero(
    name, grid, sharing, streams, device
):
    q, k = with_gaps(*SEARCHES.get(name, ([], [])))
    batch, args, table = len(q.used), length_args(q.side, k.side, (64, 1)), prepared(device, q, k, (64, 1))
    rows, is_few = rows_of(table), batch < FEW
    if is_few:
        table = Tensor.of([0] + [None] * (table_ints(batch) - 1))
    tile_rows = TILE * (sharing or 1)
    tiles = source.RaggedTiles(
        tile_rows, False, is_descending=True, counter=0, makes_rows=True, sharing=sharing, streams=streams
    )
    for _ in range(2 if is_few else 1):
        posted = searched(device, tiles, source.Work(None, table, 0, 0, HEADS, batch, 1, 0, args), grid)
        total = check_tiles(posted, rows, by_keys=False) if sharing is None else check_bands(posted, rows, sharing)
        assert table[0] == (0 if is_few else total)
        for of_cta in posted.tiles.values() if is_few else ():
            lengths_met = [rows[tile.batch]["seqlen_q"] + rows[tile.batch]["seqlen_k"] for tile in of_cta]
            assert lengths_met == sorted(lengths_met, reverse=True), "the longest first"


def check_bands(posted: Posted, rows: list[dict[str, int]], warpgroups: int) -> int:
    """Every band of every head is some warpgroup's, once; those of a short sequence lie in as few tiles as they can. Returns how
    many tiles there are."""
    found, tiles_of = Counter(), Counter(tile.batch for tile in posted.all)
    for tile in posted.all:
        share = shares(tile.allocated_q, warpgroups)
        own = [(share.head(tile.head, wg), share.band(tile.block, tile.head, wg)) for wg in range(warpgroups)]
        bands = [(head, band) for head, band in own if head < HEADS and band * TILE < tile.allocated_q]
        found.update((tile.batch, head, band) for head, band in bands)
        heads = sorted({head for head, _ in bands})
        first = share.head(tile.head, 0)
        assert heads == list(range(first, first + share.heads(tile.head, HEADS))), "what the producer loads keys for"
    counts = [ceil_div(row["allocated_q"], TILE) for row in rows]
    assert found == Counter(
        (sequence, head, band)
        for sequence, count in enumerate(counts)
        for head, band in product(range(HEADS), range(count))
    )
    for sequence, count in enumerate(counts):
        alone = HEADS * ceil_div(count, warpgroups)
        is_short = 0 < count <= 2 and count < warpgroups
        assert tiles_of[sequence] == (ceil_div(HEADS * count, warpgroups) if is_short else alone)
    return tiles_of.total()


HEADS = 5


def with_gaps(used_q, used_k) -> tuple[Lengths, Lengths]:
    """Packed sequences, some of which own rows that they do not use, and rows behind them."""
    gaps = [i % 5 // 4 * 80 for i in range(len(used_q))]
    return Lengths(used_q, gaps, unused=70), Lengths(used_k, gaps, unused=10)


def check_tiles(posted: Posted, rows: list[dict[str, int]], by_keys: bool) -> int:
    """Every tile of the table's rows is posted once, with its row; returns how many there are."""
    visited, own = ("q", "k") if by_keys else ("k", "q")
    expected = Counter(
        (sequence, head, block)
        for sequence, row in enumerate(rows)
        for head, block in product(range(HEADS), range(ceil_div(row[f"allocated_{own}"], TILE)))
    )
    assert Counter((tile.batch, tile.head, tile.block) for tile in posted.all) == expected
    for tile in posted.all:
        row = dict(rows[tile.batch])
        if tile.block * TILE >= row[f"seqlen_{own}"]:
            row[f"seqlen_{visited}"] = 0  # nothing to visit for rows that are not used
        assert {column: getattr(tile, column) for column in COLUMNS} == row
    return expected.total()


def test_a_cta_meets_the_blocks_of_a_causal_head_from_the_longest_to_the_shortest(device):
    table = prepared(device, Lengths([640, 320]), Lengths([640, 320]))
    work = source.Work(None, table, 0, 0, 3, 2, 1, 1 << 20)
    posted = searched(device, source.RaggedTiles(TILE, False, is_descending=True, counter=0), work, 1)
    order = [(tile.batch, tile.block, tile.head) for tile in posted.tiles[0, 0]]
    assert order == [
        (sequence, block, head)
        for sequence, blocks in ((0, 10), (1, 5))
        for block, head in product(reversed(range(blocks)), range(3))
    ]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize(("grid", "streams"), [(1, 1), (3, 1), (12, 1), (1, 2), (3, 2), (16, 2)])
def test_every_tile_of_a_dense_batch_is_found_once_and_the_counter_is_zero_again(kind, grid, streams, device):
    blocks, heads, batch, counter = 5, 2, 3, Tensor.of([0])
    total = blocks * heads * batch
    grid = min(grid, total)  # as the host code launches
    work = source.Work(counter if kind == "dynamic" else None, None, total, blocks, heads, batch, 1, 4)
    expected = Counter(TileCoord(*cell) for cell in product(range(blocks), range(heads), range(batch)))
    for _ in range(2):
        posted = searched(device, source.DenseTiles(kind, is_descending=True, streams=streams), work, grid)
        assert Counter(posted.all) == expected
        assert counter.values == [0]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_second_stream_gets_no_tile_before_every_cta_has_one(kind, device):
    total, grid = 5, 4
    work = source.Work(Tensor.of([0]) if kind == "dynamic" else None, None, total, total, 1, 1, 1, 1)
    posted = searched(device, source.DenseTiles(kind, is_descending=True, streams=2), work, grid)
    assert {cta for cta, _ in posted.tiles} == set(range(grid))
