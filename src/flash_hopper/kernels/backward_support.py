"""What the backward kernels support. Plain Python: asked at the forward call, so that nothing fails late."""

from flash_hopper.problem.features import Feature

SUPPORTED = frozenset({
    Feature.CAUSAL, Feature.GQA, Feature.HEAD_DIM_V, Feature.NEGATIVE_SCALE, Feature.LSE, Feature.GRADIENT,
    Feature.DETERMINISTIC, Feature.SM_MARGIN, Feature.WINDOW, Feature.CHUNK,
    Feature.VARLEN, Feature.SEQUSED,
})  # fmt: skip
