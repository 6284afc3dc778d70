"""Integer arithmetic that means the same on the host and inside a kernel.

The functions take Python ints or the DSL's run-time integers. They are exact for negative values, where the DSL's
own `%` would truncate. This is the only module of `geometry` that touches the DSL, and only when it is handed a
run-time value.
"""

from typing import Any

Int = Any  # a Python int or a run-time integer of the DSL; results are Python ints when all inputs are


def ceil_div(a: Int, b: Int) -> Int:
    """a / b rounded up, for b > 0 and any a."""
    return (a + b - 1) // b


def floor_div(a: Int, b: Int) -> Int:
    """a / b rounded down, for b > 0 and any a. Not `a // b`, which truncates for the sizes of the DSL's tensors."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    return maximum(a, 0) // b - ceil_div(maximum(-a, 0), b)


def round_up(a: Int, b: Int) -> Int:
    """The smallest multiple of b that is not below a."""
    return ceil_div(a, b) * b


def minimum(a: Int, b: Int) -> Int:
    """The smaller of two integers."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    import cutlass

    return cutlass.min(a, b)


def maximum(a: Int, b: Int) -> Int:
    """The larger of two integers."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    import cutlass

    return cutlass.max(a, b)


def clamp(x: Int, low: Int, high: Int) -> Int:
    """x limited to [low, high]; low wins if the interval is empty."""
    return maximum(low, minimum(x, high))
