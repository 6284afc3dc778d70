"""Problems and plans of the e4m3 forward, for tests of plans and of machine code."""

from itertools import product

from flash_hopper.plan.forward_fp8 import ForwardFp8Plan, plan_forward_fp8
from flash_hopper.problem.attention import AttentionProblem
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged

MASKS = ("full", "causal", "local", "chunk")


def fp8_problem(d, dv=None, mask="full", length=16_384, *, ragged=False, lse=True, negated=False) -> AttentionProblem:
    """Of sequences of this length; with windows or chunks of this length, of sequences twice as long."""
    kinds = {
        "full": Mask(),
        "causal": Mask(right=0),
        "local": Mask(length - 1, 0),
        "chunk": Mask(right=0, chunk=length),
    }
    rows = 2 * length if mask in ("local", "chunk") else length
    lengths = Ragged(True, True, False, False, rows, rows, rows, rows) if ragged else None
    flags = {Feature.LSE: lse, Feature.NEGATIVE_SCALE: negated}
    features = frozenset(feature for feature, wanted in flags.items() if wanted)
    scale = -1.0 if negated else 1.0
    return AttentionProblem(DType.E4M3, 1, rows, rows, 1, 1, d, dv or d, scale, kinds[mask], 0, features, lengths)


def fp8_plan(
    d, dv=None, mask="full", length=16_384, *, out=DType.BF16, form="scalar", accumulation="two_level", **flags
):
    """The plan of such a problem."""
    problem = fp8_problem(d, dv, mask, length, **flags)
    return plan_forward_fp8(problem, out, form, accumulation)


def fp8_plans(dims, lengths, *, masks=MASKS, **flags) -> list[ForwardFp8Plan]:
    """Each once: dense and ragged batches, with either form of descales."""
    cells = product(dims, masks, lengths, (False, True), ("scalar", "block"))
    found = (fp8_plan(*d, mask, n, ragged=ragged, form=form, **flags) for d, mask, n, ragged, form in cells)
    return list(dict.fromkeys(found))
