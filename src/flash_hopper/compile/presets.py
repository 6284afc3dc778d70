"""Named sets of plans worth compiling ahead of time. Called by `flash-hopper compile` and the compile tests."""

from collections.abc import Iterable, Sequence
from itertools import product

from flash_hopper.compile.key import Plan
from flash_hopper.plan.backward import BackwardKernelPlan, BackwardRequest, plan_backward
from flash_hopper.plan.budget import HDIM_STEP
from flash_hopper.plan.forward import ForwardPlan, plan_forward
from flash_hopper.problem.attention import MAX_HEAD_DIM, AttentionProblem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask, MaskKind
from flash_hopper.problem.ragged import Ragged

HeadDims = Iterable[tuple[int, int]]

PAPER_HEAD_DIMS = (64, 128, 256)
COMMON_HEAD_DIMS = (64, 96, 128, 192, 256)
VARLEN_HEAD_DIMS = ((64, 64), (96, 96), (128, 128), (192, 128), (256, 256))
ALL_HEAD_DIMS = tuple(range(HDIM_STEP, MAX_HEAD_DIM + 1, HDIM_STEP))
ASYMMETRIC_HEAD_DIMS = ((192, 128),)  # (head_dim, head_dim_v) of multi-head latent attention
UNWINDOWED: tuple[MaskKind, ...] = ("full", "causal")
# A plan depends on a length, or on the reach of a window, only through how well it fills a tile: these meet every choice.
_LENGTHS = (*range(64, 1025, 64), 2048, 4096, 8192, 16384)

PRESETS = {
    "paper": "the forward kernels of the paper benchmark: bf16, head dims 64, 128, 256, full and causal",
    "common": "bf16 and fp16, head dims 64, 96, 128, 192, 256, full and causal, with and without log-sum-exp",
    "training": "bf16, head dims 64, 96, 128, 192, 256 and 192/128, full and causal: the forward and every backward of it",
    "varlen": "bf16, head dims 64, 96, 128, 256 and 192/128: ragged batches (full, causal, windows) and windows of dense "
    "ones, the forward with log-sum-exp and every backward of it",
    "all": "as common, with every head dim after padding, and 192/128",
}


def preset_plans(name: str) -> Sequence[Plan]:
    """The plans of a preset, each once. Raises ArgumentError for a name that `PRESETS` lacks."""
    bf16 = (DType.BF16,)
    if name == "training":
        dims = [*((d, d) for d in COMMON_HEAD_DIMS), *ASYMMETRIC_HEAD_DIMS]
        return [*forward_plans(dims, dtypes=bf16, lse=(True,)), *backward_plans(dims, dtypes=bf16)]
    if name == "varlen":
        return _varlen_plans()
    if name == "paper":
        return forward_plans([(d, d) for d in PAPER_HEAD_DIMS], dtypes=bf16, lse=(False,))
    if name == "common":
        return forward_plans([(d, d) for d in COMMON_HEAD_DIMS])
    if name == "all":
        return forward_plans([*((d, d) for d in ALL_HEAD_DIMS), *ASYMMETRIC_HEAD_DIMS])
    raise ArgumentError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}")


def _varlen_plans() -> list[Plan]:
    bf16 = (DType.BF16,)
    plans: list[Plan] = []
    layouts: tuple[tuple[bool, tuple[MaskKind, ...]], ...] = ((True, (*UNWINDOWED, "local")), (False, ("local",)))
    for is_ragged, masks in layouts:
        plans += forward_plans(VARLEN_HEAD_DIMS, dtypes=bf16, mask=masks, ragged=(is_ragged,), lse=(True,))
        plans += backward_plans(VARLEN_HEAD_DIMS, dtypes=bf16, mask=masks, ragged=(is_ragged,))
    return list(dict.fromkeys(plans))


def forward_plans(
    head_dims: HeadDims,
    *,
    dtypes: Iterable[DType] = KERNEL_DTYPES,
    mask: Iterable[MaskKind] = UNWINDOWED,
    ragged: Iterable[bool] = (False,),
    lse: Iterable[bool] = (False, True),
    negative_scale: Iterable[bool] = (False,),
) -> list[ForwardPlan]:
    """Every forward plan that some length or window leads to, for each (head_dim, head_dim_v) with each of the flags."""
    cells = product(head_dims, dtypes, mask, ragged, lse, negative_scale, _LENGTHS)
    return list(dict.fromkeys(plan_forward(_problem(*cell)) for cell in cells))


def backward_plans(
    head_dims: HeadDims,
    *,
    dtypes: Iterable[DType] = KERNEL_DTYPES,
    mask: Iterable[MaskKind] = UNWINDOWED,
    ragged: Iterable[bool] = (False,),
    grouped: Iterable[bool] = (False, True),
    deterministic: Iterable[bool] = (False, True),
) -> list[BackwardKernelPlan]:
    """Every kernel of a backward that needs all gradients of out, for each (head_dim, head_dim_v) with each of the flags."""
    plans: list[BackwardKernelPlan] = []
    for dims, dtype, kind, is_ragged, is_grouped, is_deterministic in product(
        head_dims, dtypes, mask, ragged, grouped, deterministic
    ):
        problem = _problem(dims, dtype, kind, is_ragged, True, False, _LENGTHS[-1], heads=2 if is_grouped else 1)
        request = BackwardRequest(True, True, has_dlse=False, is_deterministic=is_deterministic)
        plans += plan_backward(problem, request).kernels()
    return list(dict.fromkeys(plans))


def _problem(
    dims: tuple[int, int],
    dtype: DType,
    kind: MaskKind,
    is_ragged: bool,
    lse: bool,
    negative_scale: bool,
    length: int,
    heads: int = 1,
) -> AttentionProblem:
    """Sequences of this length; if they have windows or chunks they are longer, and those have the length."""
    mask = {
        "full": Mask(),
        "causal": Mask(right=0),
        "local": Mask(left=length - 1, right=0),
        "chunk": Mask(right=0, chunk=length),
    }[kind]
    seqlen = 2 * length if kind in ("local", "chunk") else length
    ragged = Ragged(True, True, False, False, seqlen, seqlen, seqlen, seqlen) if is_ragged else None
    flags = {Feature.LSE: lse, Feature.NEGATIVE_SCALE: negative_scale}
    scale = -1.0 if negative_scale else 1.0
    features = frozenset(feature for feature, wanted in flags.items() if wanted)
    return AttentionProblem(dtype, 1, seqlen, seqlen, heads, 1, *dims, scale, mask, 0, features, ragged)
