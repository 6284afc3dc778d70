"""Which block a number stands for: of a dense batch by division, of a ragged one by a search in `cu_seqlens`.

Heads are next to each other, so that CTAs that run at the same time read neighbouring memory. Sequence b of a ragged batch
has the blocks from number cu_seqlens[b] / 128 + b on (`geometry/fp8.py`); the rows behind the last sequence are one more.
"""

from flash_hopper.device.dsl import Int32, const_expr, cute
from flash_hopper.geometry.arith import clamp, maximum
from flash_hopper.geometry.fp8 import packed_block
from flash_hopper.geometry.strips import BLOCK_ROWS
from flash_hopper.kernels.quantize.args import Block, LengthArgs
from flash_hopper.plan.roles import WARP
from flash_hopper.problem.fp8 import block_count, packed_block_count

BASE, START, USED = range(
    3
)  # of a window: the first lane's sequence, where this lane's starts, and its rows that count


class DenseBlocks:
    """Every entry has as many blocks as its rows fill."""

    def entries(self, t: cute.Tensor | None) -> cute.Tensor | None:
        """A tensor of the call, with its batch."""
        return t

    def count(self, mX: cute.Tensor, lengths: LengthArgs | None) -> Int32:
        """Blocks of one head of one entry."""
        return block_count(mX.shape[1])

    def make_window(self, mX: cute.Tensor, lengths: LengthArgs | None) -> None:
        """Nothing is searched."""

    @cute.jit
    def block(self, number: Int32, columns: Int32, mX: cute.Tensor, lengths: LengthArgs | None, window: None) -> Block:
        """The block of a number; columns: of one head of one entry."""
        rest, head = number // mX.shape[2], number % mX.shape[2]
        entry, column = rest // columns, rest % columns
        row = column * BLOCK_ROWS
        used = mX.shape[1]
        if const_expr(lengths is not None):
            used = clamp(lengths.seqused[entry], 0, mX.shape[1])
        return Block(
            entry, entry, head, column, row, row, clamp(used - row, 0, BLOCK_ROWS),
            clamp(mX.shape[1] - row, 0, BLOCK_ROWS),
        )  # fmt: skip


class RaggedBlocks:
    """All rows are in one entry; each sequence starts a new block."""

    def entries(self, t: cute.Tensor | None) -> cute.Tensor | None:
        """A tensor of the call, as a batch of one."""
        if t is None:
            return None
        return cute.make_tensor(t.iterator, cute.make_layout((1, *t.shape), stride=(0, *t.stride)))

    def count(self, mX: cute.Tensor, lengths: LengthArgs) -> Int32:
        """Blocks of one head, more than there can be."""
        return packed_block_count(mX.shape[1], lengths.cu_seqlens.shape[0] - 1)

    @cute.jit
    def block(self, number: Int32, columns: Int32, mX: cute.Tensor, lengths: LengthArgs, window: cute.Tensor) -> Block:
        """The block of a number, at least that of the call before. All lanes of a warp, with the same number."""
        column, head = number // mX.shape[2], number % mX.shape[2]
        sequences, rows = lengths.cu_seqlens.shape[0] - 1, mX.shape[1]
        at = self.find(column, rows, lengths, window)
        sequence = window[BASE] + at
        start = cute.arch.shuffle_sync(window[START], offset=at)
        end = maximum(cute.arch.shuffle_sync(window[START], offset=at + 1), start)
        used = end - start
        if const_expr(lengths.seqused is not None):
            used = clamp(cute.arch.shuffle_sync(window[USED], offset=at), 0, end - start)
        if sequence == sequences:  # rows of no sequence
            used = Int32(0)
        position = (column - packed_block(start, sequence)) * BLOCK_ROWS
        return Block(
            Int32(0), sequence, head, column, start + position, position, clamp(used - position, 0, BLOCK_ROWS),
            clamp(end - start - position, 0, BLOCK_ROWS),
        )  # fmt: skip

    @cute.jit
    def find(self, column: Int32, rows: Int32, lengths: LengthArgs, window: cute.Tensor) -> Int32:
        """Which lane has the last sequence that starts at or before a block; not the last lane, so that the next start is known."""
        found = self.started(column, lengths, window)
        while found == WARP:
            self.show(window[BASE] + WARP - 1, rows, lengths, window)
            found = self.started(column, lengths, window)
        return found - 1

    def started(self, column: Int32, lengths: LengthArgs, window: cute.Tensor) -> Int32:
        """How many sequences of the window start at or before a block."""
        sequence = window[BASE] + cute.arch.lane_idx()
        starts = (sequence < lengths.cu_seqlens.shape[0]) & (packed_block(window[START], sequence) <= column)
        return Int32(cute.arch.popc(cute.arch.vote_ballot_sync(starts)))

    def make_window(self, mX: cute.Tensor, lengths: LengthArgs) -> cute.Tensor:
        """Registers that show the first 32 sequences, one a lane: numbers of blocks rise, so that it is seldom moved on."""
        window = cute.make_rmem_tensor(3, Int32)
        self.show(Int32(0), mX.shape[1], lengths, window)
        return window

    @cute.jit
    def show(self, base: Int32, rows: Int32, lengths: LengthArgs, window: cute.Tensor) -> None:
        """Move the window to the sequences from `base` on; behind the last one everything starts at the end."""
        sequence = base + cute.arch.lane_idx()
        window[BASE] = base
        window[START] = rows
        window[USED] = Int32(0)
        if sequence < lengths.cu_seqlens.shape[0]:
            window[START] = clamp(lengths.cu_seqlens[sequence], 0, rows)
        if const_expr(lengths.seqused is not None):
            if sequence < lengths.seqused.shape[0]:
                window[USED] = lengths.seqused[sequence]


def make_blocks(is_ragged: bool) -> DenseBlocks | RaggedBlocks:
    """The object for a plan."""
    return RaggedBlocks() if is_ragged else DenseBlocks()
