"""An e4m3 call with tensors in host memory, bound to the reference: the counterpart of `forward_fp8.py`.

`launch/fp8.py` calls it. Every check is that of a GPU; both forms of v are taken.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from flash_hopper.launch.attention import length_tensors
from flash_hopper.launch.forward import Result
from flash_hopper.launch.forward_fp8 import DEFAULT_OUT, Descales, checked_call
from flash_hopper.launch.sequences import Sequences
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem
from flash_hopper.problem.errors import DeviceError
from flash_hopper.problem.features import check_supported
from flash_hopper.problem.fp8 import DescalePlaces, Fp8Values
from flash_hopper.reference import tiled_fp8
from flash_hopper.reference.fp8 import decode


@dataclass(frozen=True, slots=True)
class PreparedFp8Reference:
    """A checked signature. `places`: of the descales of q, k, v; `value_rows`: of a v in rows None, of `Fp8Values` their number."""

    problem: AttentionProblem
    has_lse: bool
    out_dtype: torch.dtype
    places: tuple[DescalePlaces, ...]
    value_rows: int | None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        descales: Descales,
        sequences: Sequences | None = None,
    ) -> Result:
        """(out, lse or None) for tensors of exactly the signature that was prepared; v: codes, of `Fp8Values` too.

        Raises ArgumentError for cu_seqlens or seqused that do not fit the rows.
        """
        p = self.problem
        values = v if self.value_rows is None else Fp8Values(v, self.value_rows)
        cu_q, cu_k = (None, None) if sequences is None else (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
        given = zip((q, k, values), descales, self.places, (cu_q, cu_k, cu_k), strict=True)
        decoded = [decode(x, descale, places, p.heads_k, cu) for x, descale, places, cu in given]
        if sequences is None:
            result, lse = tiled_fp8.attention(
                *decoded, softmax_scale=p.softmax_scale, mask=p.mask, out_dtype=self.out_dtype
            )
        else:
            result, lse = tiled_fp8.varlen_attention(
                *decoded, softmax_scale=p.softmax_scale, mask=p.mask, out_dtype=self.out_dtype,
                **length_tensors(sequences),
            )  # fmt: skip
        if out is not None:
            result = out.copy_(result)
        return result, lse if self.has_lse else None


def prepare_fp8_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | Fp8Values,
    options: AttentionOptions,
    out: Tensor | None,
    descales: Descales,
    sequences: Sequences | None = None,
) -> PreparedFp8Reference:
    """Check a call. Raises the errors of `problem`, UnsupportedError for missing features, DeviceError for other devices."""
    problem, places, _ = checked_call(q, k, v, options, out, descales, sequences)
    if q.device.type != "cpu":
        raise DeviceError(f"tensors must be on a cuda device of capability 9.0 or on the cpu, got {q.device}")
    check_supported(problem.features, tiled_fp8.SUPPORTED, "the CPU reference for e4m3")
    out_dtype = DEFAULT_OUT if out is None else out.dtype
    value_rows = v.seqlen if isinstance(v, Fp8Values) else None
    return PreparedFp8Reference(problem, options.return_lse, out_dtype, places, value_rows)
