"""Descales of e4m3 tensors inside a kernel: read where they lie, folded into factors that the softmax needs anyway.

A kernel has one of two objects, `SequenceDescales` (factors of a whole sequence and head) or `BlockDescales` (of each block of
rows), and asks it for everything that depends on the difference. Descales of Q and K multiply the scores, in base 2 and
together with the softmax scale; they are positive, so maxima of raw scores are maxima (specification 6.4). Those of V are
factors of O: of the whole of it, or, block by block, of what O is counted in.
"""

from typing import Any, NamedTuple

from flash_hopper.device.dsl import Boolean, Float32, Int32, Int64, cute
from flash_hopper.geometry.arith import clamp, minimum
from flash_hopper.problem.fp8 import FP8_BLOCK

# A factor of scores outside of these leaves scores all equal, or all but the largest out; inside, no product overflows.
SMALLEST_FACTOR, LARGEST_FACTOR = 2.0**-100, 2.0**70
SMALLEST_VALUE, LARGEST_VALUE = 2.0**-120, 2.0**120
# O is counted in the descale of the last block of V, unless that is smaller than the largest so far by more than this: then
# the block's part is made smaller instead, as O might overflow.
UNIT_RANGE = 2.0**-60


class Descale(NamedTuple):
    """Where a tensor's descales lie: float32 from `address` on, so many further for each batch entry, head, key head,
    and block of rows; `packed`: for each block that lies in front of a packed sequence."""

    address: Int64
    batch: Int32
    head: Int32
    key_head: Int32
    packed: Int32
    block: Int32


class DescaleArgs(NamedTuple):
    """What a launch gets. entries: how many sequences, or batch entries, have descales."""

    q: Descale
    k: Descale
    v: Descale
    entries: Int32


class BlockFactors(NamedTuple):
    """Of one key block: what scores are multiplied with, and its reciprocal."""

    scores: Float32
    inverse: Float32


class SequenceScales(NamedTuple):
    """Of a tile: the factor of its scores, and V's descale."""

    scores: Float32
    value: Float32


class BlockScales(NamedTuple):
    """Of a warpgroup's rows: the factor of scores but for K's descale, and where the descales of the sequence's K and V are."""

    scores: Float32
    k_first: Int32
    v_first: Int32


def _read(descale: Descale, place: Int32) -> Float32:
    pointer = cute.make_ptr(Float32, descale.address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(1 << 30))[place]


def _first(descale: Descale, entry: Int32, head: Int32, key_head: Int32, first_block: Any) -> Int32:
    """Where the descales of a sequence and head start."""
    place = entry * descale.batch + head * descale.head + key_head * descale.key_head
    return place + first_block * descale.packed


def _bounded_factor(x: Float32) -> Float32:
    return cute.arch.fmax(cute.arch.fmin(x, Float32(LARGEST_FACTOR)), Float32(SMALLEST_FACTOR))


class SequenceDescales:
    """One descale of each tensor for a sequence and head."""

    has_units = False

    def of_tile(self, args: Any, batch: Any, tile: Any, row: Int32) -> SequenceScales:
        """Read at the start of a tile."""
        d, key_head = args.descales, tile.head // args.work.group
        entry = minimum(tile.batch, d.entries - 1)
        q, k, v = (_read(x, _first(x, entry, tile.head, key_head, 0)) for x in (d.q, d.k, d.v))
        return SequenceScales(_bounded_factor(args.scale_log2 * q * k), v)

    def of_block(self, args: Any, scales: SequenceScales, n_block: Int32) -> BlockFactors:
        """The tile's."""
        return BlockFactors(scales.scores, cute.arch.rcp_approx(scales.scores))

    def of_values(self, args: Any, scales: SequenceScales, n_block: Int32) -> None:
        """O has one factor, at its end."""

    def of_output(self, scales: SequenceScales, units: cute.Tensor) -> Float32:
        """What O is counted in."""
        return scales.value


class BlockDescales:
    """Descales of blocks of `FP8_BLOCK` rows; a tensor may still have fewer of them, with steps of 0."""

    has_units = True

    def of_tile(self, args: Any, batch: Any, tile: Any, row: Int32) -> BlockScales:
        """Read at the start of a tile; `row` is a row of the warpgroup, used or not."""
        d, key_head = args.descales, tile.head // args.work.group
        entry = minimum(tile.batch, d.entries - 1)
        block = clamp(row, 0, batch.lengths(tile, args.mQ, args.mK).q - 1) // FP8_BLOCK
        at = _first(d.q, entry, tile.head, key_head, batch.padded_query(tile) // FP8_BLOCK)
        first_key = batch.padded_key(tile) // FP8_BLOCK
        return BlockScales(
            args.scale_log2 * _read(d.q, at + block * d.q.block),
            Int32(_first(d.k, entry, key_head, key_head, first_key)),
            Int32(_first(d.v, entry, key_head, key_head, first_key)),
        )

    def of_block(self, args: Any, scales: BlockScales, n_block: Int32) -> BlockFactors:
        """Read at the start of a step. Whatever a block without keys has for descales, factors are finite."""
        k = args.descales.k
        factor = _bounded_factor(scales.scores * _read(k, scales.k_first + n_block * k.block))
        return BlockFactors(factor, cute.arch.rcp_approx(factor))

    def of_values(self, args: Any, scales: BlockScales, n_block: Int32) -> Float32:
        """V's descale of a block that is to be added to O; finite, too."""
        v = args.descales.v
        value = _read(v, scales.v_first + n_block * v.block)
        return cute.arch.fmax(cute.arch.fmin(value, Float32(LARGEST_VALUE)), Float32(SMALLEST_VALUE))

    def of_output(self, scales: BlockScales, units: cute.Tensor) -> Float32:
        """What O is counted in."""
        return units[UNIT]


# Elements of `units`: what O is counted in, the largest descale so far, and that of a tile's last block.
UNIT, LARGEST, LAST = range(3)


def start_units(units: cute.Tensor) -> None:
    """O is 0, in whatever it is counted."""
    units[UNIT] = Float32(1.0)
    units[LARGEST] = Float32(0.0)


def change_unit(units: cute.Tensor, value: Float32) -> tuple[Float32, Float32, Boolean]:
    """Count O in the descale of a block that is to be added: the factor for O, and one for the block's part where it is
    needed."""
    largest = cute.arch.fmax(units[LARGEST], value)
    unit = cute.arch.fmax(value, largest * UNIT_RANGE)
    inverse = cute.arch.rcp_approx(unit)
    factor, part = units[UNIT] * inverse, value * inverse
    units[UNIT], units[LARGEST] = unit, largest
    return factor, part, value < unit


def make_descales(form: str) -> SequenceDescales | BlockDescales:
    """The object for a plan."""
    return BlockDescales() if form == "block" else SequenceDescales()
