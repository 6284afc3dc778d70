"""Masking scores in registers: which accumulator elements a row may see."""

from flash_hopper.device.dsl import Boolean, Constexpr, Float32, Int32, const_expr, cute, cutlass


@cute.jit
def mask_columns(rows: cute.Tensor, visible: tuple, first_col: Int32, has_first: Constexpr, has_end: Constexpr) -> None:
    """Set to -inf every score at a column that its row does not see.

    rows: (2, N/4) view of this thread's scores (`acc_as_rows`); visible: the `Interval` of keys that each row sees;
    first_col: column of this thread's first element; has_first: whether intervals may start after the block's first
    column, has_end: end before its last. Element i lies at column first_col + 8 (i // 2) + i % 2.
    """
    for r in cutlass.range_constexpr(2):
        first, end = visible[r].first - first_col, visible[r].end - first_col
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            column = 8 * (i // 2) + i % 2
            is_seen = Boolean(True)
            if const_expr(has_end):
                is_seen = column < end
            if const_expr(has_first):
                is_seen = is_seen & (column >= first)
            rows[r, i] = rows[r, i] if is_seen else -Float32.inf
