"""Which block a number stands for: of a dense batch by division, of a ragged one by a search in `cu_seqlens`.

Heads are next to each other, so that CTAs that run at the same time read neighbouring memory. Sequence b of a ragged batch
has the blocks from number cu_seqlens[b] / 128 + b on (`geometry/fp8.py`); the rows behind the last sequence are one more.
"""

from flash_hopper.device.dsl import Int32, const_expr, cute
from flash_hopper.geometry.arith import clamp
from flash_hopper.geometry.fp8 import packed_block
from flash_hopper.geometry.strips import BLOCK_ROWS
from flash_hopper.kernels.quantize.args import Block, LengthArgs
from flash_hopper.plan.roles import WARP
from flash_hopper.problem.fp8 import block_count, packed_block_count


class DenseBlocks:
    """Every entry has as many blocks as its rows fill."""

    def entries(self, t: cute.Tensor | None) -> cute.Tensor | None:
        """A tensor of the call, with its batch."""
        return t

    def count(self, mX: cute.Tensor, lengths: LengthArgs | None) -> Int32:
        """Blocks of one head of one entry."""
        return block_count(mX.shape[1])

    @cute.jit
    def block(self, number: Int32, columns: Int32, mX: cute.Tensor, lengths: LengthArgs | None) -> Block:
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
    def block(self, number: Int32, columns: Int32, mX: cute.Tensor, lengths: LengthArgs) -> Block:
        """The block of a number. All lanes of a warp, with the same number."""
        column, head = number // mX.shape[2], number % mX.shape[2]
        sequences, rows = lengths.cu_seqlens.shape[0] - 1, mX.shape[1]
        sequence = self.find(lengths.cu_seqlens, column, rows)
        start, end = clamp(lengths.cu_seqlens[sequence], 0, rows), rows
        used = Int32(0)
        if sequence < sequences:
            end = clamp(lengths.cu_seqlens[sequence + 1], start, rows)
            used = end - start
            if const_expr(lengths.seqused is not None):
                used = clamp(lengths.seqused[sequence], 0, end - start)
        position = (column - packed_block(start, sequence)) * BLOCK_ROWS
        return Block(
            Int32(0), sequence, head, column, start + position, position, clamp(used - position, 0, BLOCK_ROWS),
            clamp(end - start - position, 0, BLOCK_ROWS),
        )  # fmt: skip

    @cute.jit
    def find(self, cu_seqlens: cute.Tensor, column: Int32, rows: Int32) -> Int32:
        """The last sequence that starts at or before a block; 32 sequences a step."""
        lane = cute.arch.lane_idx()
        before = Int32(0)
        first = Int32(0)
        while first < cu_seqlens.shape[0]:
            starts = Int32(0)
            if first + lane < cu_seqlens.shape[0]:
                start = clamp(cu_seqlens[first + lane], 0, rows)
                if packed_block(start, first + lane) <= column:
                    starts = Int32(1)
            found = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(starts != 0)))
            before = before + found
            first = first + WARP
            if found < WARP:
                first = cu_seqlens.shape[0]
        return before - 1


def make_blocks(is_ragged: bool) -> DenseBlocks | RaggedBlocks:
    """The object for a plan."""
    return RaggedBlocks() if is_ragged else DenseBlocks()
