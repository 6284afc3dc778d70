"""What the forward kernel supports. Plain Python: the launcher asks before anything is compiled."""

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.features import Feature

DTYPES = (DType.BF16, DType.FP16)
# DETERMINISTIC: every output tile is computed by one CTA in a fixed order of blocks, whatever the scheduler does.
SUPPORTED = frozenset({
    Feature.CAUSAL, Feature.GQA, Feature.HEAD_DIM_V, Feature.NEGATIVE_SCALE, Feature.LSE, Feature.DETERMINISTIC,
    Feature.SM_MARGIN, Feature.WINDOW, Feature.CHUNK, Feature.VARLEN, Feature.SEQUSED,
})  # fmt: skip
