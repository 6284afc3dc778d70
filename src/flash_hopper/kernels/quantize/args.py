"""What a launch of the quantise kernel takes beside its tensors, and what the kernel knows of a block."""

from typing import NamedTuple

from flash_hopper.device.dsl import Int32, cute


class RotaryArgs(NamedTuple):
    """Rotary embedding: row i of a sequence is turned by the angles of position i + offset.

    cos, sin: (positions, rotary_dim / 2); offsets: (batch,) int32, added to `offset`, or None.
    """

    cos: cute.Tensor
    sin: cute.Tensor
    offsets: cute.Tensor | None
    offset: Int32


class ScaleArgs(NamedTuple):
    """Where scales are.

    descale: float32, (batch, heads, blocks) for a scale a block, else (batch, heads_k, 1); a ragged batch has one entry of all
    its blocks, or `sequences` entries. absmax: (batch, heads_k) float32, of a group, 0 at first; strides of 0 where groups are
    one. group: heads that share a scale.
    """

    descale: cute.Tensor | None
    absmax: cute.Tensor | None
    group: Int32


class LengthArgs(NamedTuple):
    """cu_seqlens: (sequences + 1,) int32 of a ragged batch; seqused: (batch,) int32, rows that count; None where absent."""

    cu_seqlens: cute.Tensor | None
    seqused: cute.Tensor | None


class Block(NamedTuple):
    """128 rows of one head. All int32.

    entry: of the tensors with rows; sequence: of lengths and groups, `sequences` for rows that belong to none; head; column:
    which of the entry's blocks; row: the first one, in the tensor; position: the first one, in its sequence; used: rows that
    count, at most 128, perhaps none; written: rows that exist.
    """

    entry: Int32
    sequence: Int32
    head: Int32
    column: Int32
    row: Int32
    position: Int32
    used: Int32
    written: Int32


BLOCK_INTS = len(Block._fields)
