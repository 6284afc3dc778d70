"""What a launch of a ragged batch is told beside its tensors: where the table is, where lengths are, how entries lie.

`launch/forward.py` and `launch/backward.py` bind a problem to a `RaggedLaunch` once, and make the kernels' `RaggedArgs`
(`device/sequences.py`) of it call by call. Nothing is read back: the values of cu_seqlens and seqused stay on the device.
"""

from dataclasses import dataclass

import torch

from flash_hopper.launch.device import sequence_table, tile_counter
from flash_hopper.launch.sequences import Sequences
from flash_hopper.launch.tensors import addressable
from flash_hopper.plan.schedule import is_few, table_ints
from flash_hopper.problem.attention import AttentionProblem

MOST_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class RaggedLaunch:
    """A checked ragged problem. rows_*: of a packed tensor, or of each padded entry."""

    sequences: int
    ints: int  # of the table
    packed_q: bool
    packed_k: bool
    rows_q: int
    rows_k: int
    is_few: bool

    def table(self, device_index: int) -> torch.Tensor:
        """Memory for the table of a call on the current stream; it must outlive the launches."""
        return sequence_table(device_index, self.ints)

    def forward_table(self, device_index: int) -> torch.Tensor:
        """The same for a forward, which needs no more than a counter if sequences are few."""
        return tile_counter(device_index) if self.is_few else sequence_table(device_index, self.ints)

    def lengths(self, given: Sequences, multiple_q: int = 1, multiple_k: int = 1) -> tuple[int, ...]:
        """`LengthArgs`; multiples are those to which padded buffers round a sequence's first row."""
        cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, _, _ = given
        return (
            0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),
            0 if cu_seqlens_k is None else cu_seqlens_k.data_ptr(),
            0 if seqused_q is None else seqused_q.data_ptr(),
            0 if seqused_k is None else seqused_k.data_ptr(),
            self.rows_q,
            self.rows_k,
            multiple_q,
            multiple_k,
        )


def ragged_launch(problem: AttentionProblem) -> RaggedLaunch:
    """For a checked ragged problem."""
    ragged = problem.ragged
    assert ragged is not None, "a dense batch needs no table"
    return RaggedLaunch(
        sequences=problem.batch,
        ints=table_ints(problem.batch),
        packed_q=ragged.packed_q,
        packed_k=ragged.packed_k,
        rows_q=problem.seqlen_q,
        rows_k=problem.seqlen_k,
        is_few=is_few(problem.batch),
    )


def first_entry(padded: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The first entry of a padded batch, and how many elements lie between two of them."""
    return padded[0], padded.stride(0)


def most_tiles(rows: int, batch: int, tile_rows: int) -> int:
    """An upper bound for the tiles of one head: each sequence, and the rows behind them, may end in a partial tile."""
    return rows // tile_rows + batch + 2


def has_whole_rows(tensor: torch.Tensor) -> bool:
    """True if every entry of a batch (batch, rows, ...) starts a whole number of rows behind the first, as the kernels'
    ragged views want it (`device/sequences.py`)."""
    batch, rows = tensor.shape[:2]
    entry, row = tensor.stride()[:2]
    rows_per_entry = entry // max(row, 1)
    return batch == 1 or (rows_per_entry * row == entry and (batch - 1) * rows_per_entry + rows < MOST_ROWS)


def with_whole_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements of a batch; entries of a single row are one row apart, whatever the strides. No copy."""
    if tensor.shape[1] != 1 or has_whole_rows(tensor):
        return tensor
    entry, _, *inner = tensor.stride()
    return tensor.as_strided(tensor.shape, (entry, entry, *inner))


def is_viewable(tensor: torch.Tensor) -> bool:
    """True for packed rows, and for a padded batch whose entries are whole rows apart."""
    return tensor.dim() == 3 or has_whole_rows(tensor)


def viewable(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements so that `is_viewable` holds, if that takes no copy."""
    return tensor if tensor.dim() == 3 else with_whole_rows(tensor)


def addressable_rows(tensor: torch.Tensor) -> torch.Tensor:
    """As `addressable`, for the kernels' ragged views: padded entries are whole rows apart, too."""
    tensor = addressable(tensor)
    if tensor.dim() == 3:
        return tensor
    tensor = with_whole_rows(tensor)
    return tensor if has_whole_rows(tensor) else tensor.clone(memory_format=torch.contiguous_format)
