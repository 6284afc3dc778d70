"""Views and shared-memory layouts: relabellings that move no data.

Shapes in comments are CuTe's: an accumulator of a 64 x N wgmma is ((2, 2, N/8), M, N'), four lanes share a row, and a
thread holds two rows (8 apart) of each 16-row band.
"""

from typing import Any

from flash_hopper.device.dsl import cute, warpgroup


def transposed(t: cute.Tensor) -> cute.Tensor:
    """View with modes 0 and 1 exchanged: V (n, d) as the (d, n) operand of P V."""
    order = [1, 0, *range(2, cute.rank(t))]
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=order))


def seqlen_major(t: cute.Tensor) -> cute.Tensor:
    """(batch, seqlen, heads, head_dim) as (seqlen, head_dim, heads, batch): a tile is the first two modes."""
    return cute.make_tensor(t.iterator, cute.select(t.layout, mode=[1, 3, 2, 0]))


def acc_as_rows(acc: cute.Tensor) -> cute.Tensor:
    """Accumulator ((2, 2, N/8), M, N') as (row, column): ((2, M), (2, N/8, N'))."""
    s, d = acc.layout.shape, acc.layout.stride
    layout = cute.make_layout(
        ((s[0][1], s[1]), (s[0][0], s[0][2], s[2])), stride=((d[0][1], d[1]), (d[0][0], d[0][2], d[2]))
    )
    return cute.make_tensor(acc.iterator, layout)


def acc_as_operand_a(layout: cute.Layout) -> cute.Layout:
    """Accumulator layout ((2, 2, N/8), M, N') as a 16-bit register operand ((2, 2, 2), M, (N/16, N'))."""
    v = cute.logical_divide(layout, ((None, None, 2), None, None))
    (s0, s1, s2), (d0, d1, d2) = v.shape[0], v.stride[0]
    return cute.make_layout(
        ((s0, s1, s2[0]), v.shape[1], (s2[1], v.shape[2])), stride=((d0, d1, d2[0]), v.stride[1], (d2[1], v.stride[2]))
    )


def tile_layout(rows: int, cols: int, dtype: Any) -> cute.ComposedLayout:
    """Swizzled shared-memory layout of a (rows, cols) tile of 16 or 8 bit whose columns are contiguous; a row is a multiple of
    32 bytes. The widest swizzle that divides a row: 128, 64 or 32 bytes.
    """
    kinds = warpgroup.SmemLayoutAtomKind
    row_bytes = cols * dtype.width // 8
    kind = kinds.K_SW128 if row_bytes % 128 == 0 else kinds.K_SW64 if row_bytes % 64 == 0 else kinds.K_SW32
    return cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), (rows, cols), (0, 1))


def stacked(tile: cute.ComposedLayout, count: int, stride: int) -> cute.Layout:
    """The outer layout of `count` tiles, `stride` elements apart, as a third mode."""
    return cute.append(tile.outer, cute.make_layout(count, stride=stride))
