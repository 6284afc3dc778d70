"""Which elements a warpgroup adds its accumulator to: `device/accumulate.py` as plain Python, one GPU thread after the other."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
from simt import copies

(accumulate,) = copies("flash_hopper.device.accumulate")

THREADS = 128
FACTOR = 0.5


class Matrix:
    """(rows, cols) in memory: what is added to each element, wherever it lies."""

    def __init__(self, shape, place=(0, 0), added=None) -> None:
        self.shape, self.place = shape, place
        self.added = defaultdict(list) if added is None else added
        self.iterator = SimpleNamespace(toint=lambda: self)

    def __getitem__(self, index):
        row, _ = index
        return Matrix(self.shape, (row, 0), self.added)

    def ahead(self, cols: int) -> "Matrix":
        return Matrix(self.shape, (self.place[0], self.place[1] + cols), self.added)


def add_products(address, column, columns, factor, values) -> None:
    """`ptx.add_products_f32`."""
    for i, value in enumerate(values):
        if column < columns:
            assert column % 8 == columns % 8 == 0
            address.added[address.place[0], address.place[1] + column + i].append((factor, value))


class Registers:
    """A thread's part of a 64 x N accumulator, in which each element is known by its row and column."""

    def __init__(self, thread: int, cols: int) -> None:
        self.first = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        self.size = cols // 4

    def __getitem__(self, index):
        r, i = index
        return self.first[0] + 8 * r, self.first[1] + i // 2 * 8 + i % 2


@pytest.fixture
def add_to_rows(monkeypatch):
    cute = SimpleNamespace(
        size=lambda values, mode: values.size, domain_offset=lambda offset, matrix: matrix.ahead(*offset)
    )
    cutlass = SimpleNamespace(range_constexpr=range, select_=lambda condition, a, b: a if condition else b)
    swaps = {"cute": cute, "cutlass": cutlass, "acc_as_rows": lambda acc: acc, "add_products_f32": add_products}
    for name, value in swaps.items():
        monkeypatch.setattr(accumulate, name, value)
    return accumulate.add_to_rows.__wrapped__


@pytest.mark.parametrize("cols", [32, 64, 256])
def test_each_element_in_use_gets_its_own_sum_once_and_nothing_else_is_touched(cols, add_to_rows):
    used_cols = sorted({8, cols // 2, cols - 8, cols, cols + 16})
    first_row = 70
    for used_rows, first_col, existing in product((0, 13, 64, 100), (0, 64), used_cols):
        m = Matrix((1000, first_col + existing))
        for thread in range(THREADS):
            add_to_rows(Registers(thread, cols), FACTOR, m, first_row, first_col, first_row + used_rows, thread)
        used = product(range(min(used_rows, 64)), range(min(existing, cols)))
        assert m.added == {(first_row + row, first_col + col): [(FACTOR, (row, col))] for row, col in used}


def test_nothing_is_touched_by_a_piece_whose_columns_do_not_exist(add_to_rows):
    m = Matrix((1000, 40))
    for thread in range(THREADS):
        add_to_rows(Registers(thread, 64), FACTOR, m, 0, 64, 64, thread)
    assert not m.added
