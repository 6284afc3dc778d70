"""What the e4m3 forward kernel supports. Plain Python: the launcher asks before anything is compiled."""

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.features import Feature

DTYPES = (DType.E4M3,)
OUT_DTYPES = (DType.BF16, DType.FP16)
SUPPORTED = frozenset({
    Feature.CAUSAL, Feature.GQA, Feature.HEAD_DIM_V, Feature.NEGATIVE_SCALE, Feature.LSE, Feature.DETERMINISTIC,
    Feature.SM_MARGIN, Feature.WINDOW, Feature.CHUNK, Feature.VARLEN, Feature.SEQUSED, Feature.FP8, Feature.DESCALE,
    Feature.FAST_ACCUM,
})  # fmt: skip
