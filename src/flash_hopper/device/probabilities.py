"""P and dS from recomputed scores (specification 7.1): pointwise steps of the backward, in registers.

P = exp2(S * scale_log2 - LSE * log2(e)), dS = P (dP - D). Statistics belong to query rows: in the query-parallel kernel
these are the accumulator's rows, two a thread; in the key-parallel kernel, which computes S^T, they are its columns.
A masked score gives P = 0 after the exponential, so that neither sign nor size of the scale matters.

What a row or a key sees is an interval; `has_first` or `has_end` (compile-time) say whether that end can cut anything.
"""

from flash_hopper.device.dsl import Float32, Int32, const_expr, cute, cutlass
from flash_hopper.device.layouts import acc_as_rows


@cute.jit
def exponentials(rows: cute.Tensor, scale_log2: Float32, lse_log2: cute.Tensor, first: int, end: int) -> None:
    """Scores (2, N/4), a query row per mode-0 index, to P in place, elements [first, end) of each row; lse_log2: (2,)."""
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(first, end):
            rows[r, i] = cute.math.exp2(rows[r, i] * scale_log2 - lse_log2[r], fastmath=True)


@cute.jit
def hide_columns(rows: cute.Tensor, visible: tuple, first_col: Int32, has_first: cutlass.Constexpr) -> None:
    """P (2, N/4) = 0 at keys that a row does not see.

    visible: the `Interval` of keys that each row sees; first_col: key of this thread's first element.
    """
    for r in cutlass.range_constexpr(2):
        end = visible[r].end - first_col
        for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
            is_seen = 8 * (i // 2) + i % 2 < end
            if const_expr(has_first):
                is_seen = is_seen & (8 * (i // 2) + i % 2 >= visible[r].first - first_col)
            rows[r, i] = rows[r, i] if is_seen else Float32(0.0)


@cute.jit
def grad_rows(p_rows: cute.Tensor, dp_rows: cute.Tensor, delta: cute.Tensor) -> None:
    """dP (2, N/4) to dS in place; delta: (2,) rowsum(dO o O) - dLSE."""
    for r in cutlass.range_constexpr(2):
        for i in cutlass.range_constexpr(cute.size(p_rows, mode=[1])):
            dp_rows[r, i] = p_rows[r, i] * (dp_rows[r, i] - delta[r])


def of_columns(statistics: cute.Tensor, lane_col: Int32) -> cute.Tensor:
    """Of statistics (M,) in shared memory those of a thread's columns, (M/4,): two of every eight, from `lane_col` on."""
    columns = cute.make_layout((2, cute.size(statistics) // 8), stride=(1, 8))
    return cute.make_tensor(statistics.iterator + lane_col, columns)


@cute.jit
def recompute_columns(
    rows: cute.Tensor, scale_log2: Float32, lse_log2: cute.Tensor, visible: tuple, first_row: Int32, lane_col: Int32,
    is_masked: bool, has_end: cutlass.Constexpr,
) -> None:  # fmt: skip
    """Transposed scores (2, M/4), a key per mode-0 index, to P^T in place.

    lse_log2: (M/4,), of this thread's columns; visible: the `Interval` of queries that see each key; first_row: first query of the
    block; lane_col: the first query of this thread within it. `is_masked` may be a run-time condition.
    """
    for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
        for r in cutlass.range_constexpr(2):
            rows[r, i] = cute.math.exp2(rows[r, i] * scale_log2 - lse_log2[i], fastmath=True)
    if is_masked:
        for r in cutlass.range_constexpr(2):
            first = visible[r].first - first_row - lane_col
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                is_seen = 8 * (i // 2) + i % 2 >= first
                if const_expr(has_end):
                    is_seen = is_seen & (8 * (i // 2) + i % 2 < visible[r].end - first_row - lane_col)
                rows[r, i] = rows[r, i] if is_seen else Float32(0.0)


@cute.jit
def grad_columns(p_rows: cute.Tensor, dp_rows: cute.Tensor, delta: cute.Tensor) -> None:
    """dP^T (2, M/4) to dS^T in place; delta: (M/4,), of this thread's columns."""
    for i in cutlass.range_constexpr(cute.size(p_rows, mode=[1])):
        for r in cutlass.range_constexpr(2):
            dp_rows[r, i] = p_rows[r, i] * (dp_rows[r, i] - delta[i])


@cute.jit
def clear_rows(acc: cute.Tensor, end: Int32) -> None:
    """Zero what an accumulator holds for rows that are not used, whatever it is.

    acc: 64 x N of a warpgroup; end: rows in use, counted from this thread's first one, of which the other is 8 below.
    """
    if end <= 8:
        rows = acc_as_rows(acc)
        for r in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(cute.size(rows, mode=[1])):
                rows[r, i] = rows[r, i] if 8 * r < end else Float32(0.0)
