"""From what a call says about lengths to a sequence's row of the table (`plan/schedule.py`).

Whatever combination of cu_seqlens and seqused a call has, kernels see only rows. Values that make no sense are cut so that no
kernel leaves its tensors. The prepare kernel calls this, and scheduler warps of batches of few sequences.
"""

from typing import NamedTuple

from flash_hopper.device.dsl import Int32, Int64, cute
from flash_hopper.device.sequences import LengthArgs, device_ints
from flash_hopper.geometry.arith import clamp
from flash_hopper.plan.schedule import COLUMNS


class Rows(NamedTuple):
    """Of one sequence: used, allocated, where they start, and where they start in padded buffers."""

    seqlen: Int32
    allocated: Int32
    first: Int32
    padded: Int32


@cute.jit
def sequence_row(lengths: LengthArgs, i: Int32, batch: Int32) -> tuple[Int32, ...]:
    """Sequence i's row, `COLUMNS` in order; number `batch` owns the rows behind the last sequence."""
    queries = _rows(lengths.cu_seqlens_q, lengths.seqused_q, lengths.rows_q, lengths.multiple_q, i, batch)
    keys = _rows(lengths.cu_seqlens_k, lengths.seqused_k, lengths.rows_k, lengths.multiple_k, i, batch)
    values = tuple(value for pair in zip(queries, keys, strict=True) for value in pair)
    assert len(values) == len(COLUMNS)
    return values


@cute.jit
def _rows(cu_seqlens: Int64, seqused: Int64, rows: Int32, multiple: Int32, i: Int32, batch: Int32) -> Rows:
    """Queries or keys; arguments as the fields of `LengthArgs`. An address of 0 stands for a tensor that is not there."""
    first, end, before = Int32(0), rows, i * rows
    if i == batch:
        end = Int32(0)
    if cu_seqlens != 0:
        offsets = device_ints(cu_seqlens, batch + 1)
        first, end = offsets[i], rows
        if i < batch:
            end = offsets[i + 1]
        first = clamp(first, 0, rows)
        end = clamp(end, first, rows)
        before = first
    seqlen = end - first
    if seqused != 0 and i < batch:
        seqlen = clamp(device_ints(seqused, batch)[i], 0, end - first)
    if i == batch:
        seqlen = Int32(0)
    padded = (before + i * multiple) // multiple * multiple
    return Rows(seqlen, end - first, first, padded)
