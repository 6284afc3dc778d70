"""What kernels, reference and error table of e4m3 attention agree on: the range of weights, and which key stands where in V^T.

The accumulator of S gives a lane q of each quad the columns 8 i + 2 q + e (e < 2); as an 8-bit operand A the same registers
stand for the positions 4 q + 2 (i % 2) + e of a group of 16. So P needs no shuffle if V^T has its keys in that order: at
position p of each group the key `key_at(p)` (specification 6.2 moves bytes and words instead). Both functions take Python
ints, the DSL's integers, or integer tensors, none negative.
"""

from flash_hopper.geometry.arith import Int
from flash_hopper.problem.fp8 import FP8_BLOCK

KEY_GROUP = 16  # keys that are permuted among themselves

# Powers of two of weights. A row's reference is set so that its largest score weighs 2^WEIGHT, and moves when a score is more than LAG
# above that one; so the reference itself weighs their sum, and no weight is more than 2^8.75 = 430.5 (e4m3 ends at 448).
WEIGHT_LOG2 = 6.0
LAG_LOG2 = 2.75
REFERENCE_LOG2 = WEIGHT_LOG2 + LAG_LOG2


def key_at(position: Int) -> Int:
    """The key that stands at a position of V^T."""
    lane, j = position % 16 // 4, position % 4
    return position // 16 * 16 + j // 2 * 8 + lane * 2 + j % 2


def position_of(key: Int) -> Int:
    """The position in V^T of a key: the inverse of `key_at`."""
    half, rest = key % 16 // 8, key % 8
    return key // 16 * 16 + rest // 2 * 4 + half * 2 + rest % 2


def packed_block(first_row: Int, sequence: Int) -> Int:
    """The first block, of descales and of `Fp8Values`, of a packed sequence that starts at this row."""
    return first_row // FP8_BLOCK + sequence
