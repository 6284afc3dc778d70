"""Masking scores in registers: which accumulator elements a row may see."""

from flash_hopper.device.dsl import Float32, Int32, cute, cutlass


@cute.jit
def mask_columns(rows: cute.Tensor, limits: tuple, first_col: Int32) -> None:
    """Set to -inf every score at a column >= its row's limit.

    rows: (2, N/4) view of this thread's scores (`acc_as_rows`); limits: per row, the number of keys it sees; first_col:
    column of this thread's first element. Element i lies at column first_col + 8 (i // 2) + i % 2.
    """
    for r in cutlass.range_constexpr(2):
        limit = limits[r] - first_col
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            rows[r, i] = rows[r, i] if 8 * (i // 2) + i % 2 < limit else -Float32.inf
