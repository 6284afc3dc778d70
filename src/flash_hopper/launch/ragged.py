"""The table of a ragged batch, from the tensors of a call: allocated and written here, read by the kernels of the call.

`launch/forward.py` and `launch/backward.py` bind a problem to a `TableWriter` once and call it per launch. Nothing is read back:
the values of cu_seqlens and seqused stay on the device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from flash_hopper.compile.store import get_kernel
from flash_hopper.launch.sequences import Sequences
from flash_hopper.launch.tensors import addressable
from flash_hopper.plan.schedule import SchedulePlan, table_ints
from flash_hopper.problem.attention import AttentionProblem

MOST_ROWS = 1 << 31


@dataclass(frozen=True, slots=True)
class TableWriter:
    """A ragged problem bound to the prepare kernel. `sides` are the kernel's sizes and rows of q and k."""

    kernel: Callable[..., Any]
    ints: int
    given: int
    sides: tuple[int, int, int, int]

    def __call__(
        self, sequences: Sequences, device: torch.device, multiple_q: int = 1, multiple_k: int = 1
    ) -> torch.Tensor:
        """The table; multiples are those to which padded buffers round a sequence's first row."""
        table = torch.empty(self.ints, dtype=torch.int32, device=device)
        lengths = (table if t is None else t for t in sequences.tensors)
        self.kernel(*lengths, table, self.given, *self.sides, multiple_q, multiple_k)
        return table


@lru_cache(maxsize=4096)
def table_writer(problem: AttentionProblem) -> TableWriter:
    """For a checked ragged problem; compiles the prepare kernel if need be."""
    ragged = problem.ragged
    assert ragged is not None, "a dense batch needs no table"
    given = ragged.packed_q | ragged.packed_k << 1 | ragged.has_seqused_q << 2 | ragged.has_seqused_k << 3
    return TableWriter(
        kernel=get_kernel(SchedulePlan()),
        ints=table_ints(problem.batch),
        given=given,
        sides=(
            0 if ragged.packed_q else problem.seqlen_q,
            0 if ragged.packed_k else problem.seqlen_k,
            ragged.rows_q if ragged.packed_q else problem.seqlen_q,
            ragged.rows_k if ragged.packed_k else problem.seqlen_k,
        ),
    )


def most_tiles(rows: int, batch: int, tile_rows: int) -> int:
    """An upper bound for the tiles of one head: each sequence, and the rows behind them, may end in a partial tile."""
    return rows // tile_rows + batch + 2


def as_batch(tensor: torch.Tensor, is_packed: bool) -> torch.Tensor:
    """Packed rows (total, heads, cols), or statistics (heads, total), as a batch of one entry; a padded batch as it is."""
    return tensor.unsqueeze(0) if is_packed else tensor


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


def addressable_batch(tensor: torch.Tensor) -> torch.Tensor:
    """As `addressable`, for the kernels' ragged views: entries are whole rows apart, too."""
    tensor = with_whole_rows(addressable(tensor))
    return tensor if has_whole_rows(tensor) else tensor.clone(memory_format=torch.contiguous_format)
