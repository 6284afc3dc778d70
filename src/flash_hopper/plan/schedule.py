"""The table of a ragged batch: where a prepare kernel puts what the attention kernels need to know of each sequence.

One flat int32 buffer: `HEADER` ints, of which each kernel of a call takes one as its counter of tiles handed out, all zero;
then a row of `COLUMNS` ints a sequence; then the same rows in the order in which sequences are computed; then the sequences'
numbers in that order. A last sequence, without a used row, owns the rows behind `cu_seqlens[-1]`. `kernels/schedule` writes the
table, `device/schedulers` and `device/sequences.py` read it, `launch` allocates it. The forward of few sequences has none.
"""

from typing import Any

HEADER = 8
FEW = 32  # sequences, with the one of unused rows, of which a warp can do without a table
COLUMNS = ("seqlen_q", "seqlen_k", "allocated_q", "allocated_k", "row_q", "row_k", "padded_q", "padded_k")
COUNTERS = {"forward": 0, "backward_dq": 0, "backward_dkdv": 1}  # which int of the header a kernel draws from


def table_ints(batch: Any) -> Any:
    """Ints of the table for this many sequences, on the host or on the device."""
    return HEADER + (2 * len(COLUMNS) + 1) * (batch + 1)


def is_few(sequences: Any) -> Any:
    """True if a forward of so many sequences, without the one of unused rows, has no table but a counter only."""
    return sequences < FEW
