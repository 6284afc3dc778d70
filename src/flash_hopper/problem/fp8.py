"""What an e4m3 call has beyond q, k and v: descales, and values whose keys are in the tensor core's order.

Real q = codes of q * q_descale, and likewise k and v. A descale is given for all of a tensor, for each sequence and key
head, or for each block of `FP8_BLOCK` rows (specification 6.4); `checked_descales` tells the forms apart and checks them.
`geometry/fp8.py` has the order of keys; `attention.py` checks everything else.
"""

from typing import Any, Literal, NamedTuple

# What a kernel must be able to do: factors of a whole sequence and head, or of each block of rows.
DescaleForm = Literal["scalar", "block"]
FP8_BLOCK = 128  # rows that share a descale; also what the keys of `Fp8Values` are padded to


class Fp8Values(NamedTuple):
    """v in e4m3 as the second product reads it: transposed, keys in the order of `geometry.fp8.key_at`, unused keys zero.

    codes: float8_e4m3fn, (batch, heads_k, head_dim_v, padded_rows(seqlen)), or, of packed sequences, (heads_k, head_dim_v,
    packed_rows(seqlen, sequences)) where sequence b starts at (cu_seqlens_k[b] // FP8_BLOCK + b) * FP8_BLOCK; last stride 1.
    seqlen: rows of the v that it stands for, of packed sequences all of them together.
    """

    codes: Any
    seqlen: int


def block_count(rows: int) -> int:
    """Blocks of a sequence, the last one possibly short."""
    return (rows + FP8_BLOCK - 1) // FP8_BLOCK


def padded_rows(rows: int) -> int:
    """Keys of `Fp8Values` for a sequence of so many rows."""
    return block_count(rows) * FP8_BLOCK


def packed_block_count(rows: int, sequences: int) -> int:
    """Columns of a descale of packed sequences: sequence b starts at column cu_seqlens[b] // FP8_BLOCK + b."""
    return rows // FP8_BLOCK + sequences + 1


def packed_rows(rows: int, sequences: int) -> int:
    """Keys of `Fp8Values` for packed sequences of so many rows in all."""
    return packed_block_count(rows, sequences) * FP8_BLOCK
