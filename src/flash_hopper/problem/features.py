"""Names of everything that a caller can ask for beyond plain dense attention.

A problem carries the set that it requires; each backend declares the set that it supports (for a kernel: `support.py`
in its folder). The difference is what an `UnsupportedError` lists, so nothing is ever silently ignored.
"""

from collections.abc import Iterable
from enum import Enum

from flash_hopper.problem.errors import UnsupportedError


class Feature(str, Enum):
    """A capability; the value is how the feature is named to a caller (its argument first)."""

    CAUSAL = "causal=True"
    GQA = "fewer key heads than query heads"
    HEAD_DIM_V = "head_dim of v different from head_dim of q"
    NEGATIVE_SCALE = "softmax_scale below zero"
    LSE = "return_lse=True"
    GRADIENT = "gradients (an input requires grad)"
    WINDOW = "window_size"
    CHUNK = "attention_chunk"
    SOFTCAP = "softcap"
    SINKS = "sinks"
    SCORE_MOD = "score_mod"
    MASK_MOD = "mask_mod"
    AUX_TENSORS = "aux_tensors"
    BLOCK_MASK = "block_mask"
    DESCALE = "q_descale / k_descale / v_descale"
    SPLIT_KV = "num_splits above 1"
    PACK_GQA = "pack_gqa=True"
    BATCH_INVARIANT = "batch_invariant=True"
    DETERMINISTIC = "deterministic=True"
    SM_MARGIN = "sm_margin above 0"
    FAST_ACCUM = "fast_accum=True"
    FAST_ACCUM_OF_BLOCKS = "fast_accum=True with descales of blocks"
    VARLEN = "ragged batches (cu_seqlens)"
    SEQUSED = "seqused"
    PAGED_KV = "page_table"
    KV_CACHE = "attention over a kv cache"
    COMBINE = "merging partial results"
    FP8 = "fp8 inputs"
    HADAMARD = "the Hadamard transform"

    def __str__(self) -> str:
        return self.value


def check_supported(required: Iterable[Feature], supported: frozenset[Feature], backend: str) -> None:
    """Raise `UnsupportedError` naming every feature in `required` that `backend` lacks."""
    missing = sorted(str(f) for f in set(required) - supported)
    if missing:
        raise UnsupportedError(f"{backend} does not support: {'; '.join(missing)}")
