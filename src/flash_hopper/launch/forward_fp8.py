"""The e4m3 forward on a GPU: from checked tensors, descales and values to a running kernel.

As `forward.py` for 16-bit tensors: a call is prepared once per signature and found in a dictionary afterwards. Nothing of
a call is read back from the GPU. There are no gradients: a call whose inputs require some is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_hopper.compile.load import as_argument
from flash_hopper.compile.store import get_kernel
from flash_hopper.geometry.masks import kernel_bounds
from flash_hopper.kernels.forward_fp8.support import DTYPES, OUT_DTYPES, SUPPORTED
from flash_hopper.launch.device import device_facts, tile_counter, unit_descale
from flash_hopper.launch.forward import SMALLEST_SCALE, Result, grid_of
from flash_hopper.launch.fp8_values import Reordering, prepare_reordering
from flash_hopper.launch.ragged import (
    RaggedLaunch,
    addressable_rows,
    first_entry,
    is_viewable,
    ragged_launch,
    viewable,
)
from flash_hopper.launch.sequences import Sequences, length_specs
from flash_hopper.launch.tensors import (
    ALIGN_BYTES,
    addressable,
    describe,
    has_plain_strides,
    is_aligned,
    result_shapes,
    with_plain_unit_strides,
)
from flash_hopper.launch.tensors import DTYPES as SHORT_DTYPES
from flash_hopper.plan.forward_fp8 import ForwardFp8Plan, plan_forward_fp8
from flash_hopper.problem.attention import AttentionOptions, AttentionProblem, attention_problem, varlen_problem
from flash_hopper.problem.checks import check_devices
from flash_hopper.problem.features import Feature, check_supported
from flash_hopper.problem.fp8 import (
    FP8_BLOCK,
    DescaleForm,
    DescalePlaces,
    Fp8Values,
    Scaled,
    check_fp8_head_dims,
    check_fp8_out,
    descale_form,
    descale_places,
    value_spec,
)
from flash_hopper.problem.tensor import TensorSpec

DEFAULT_OUT = torch.bfloat16


class Descales(NamedTuple):
    """The factors of q, k and v: float32 tensors in a form of `problem/fp8.py`, or None."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None


@dataclass(frozen=True, slots=True)
class PreparedFp8:
    """A checked signature, bound to its kernel. `kernel` is None if there is nothing to compute; `reordering` is for a v in rows;
    `places` are those of q, k, v."""

    kernel: Callable[..., Any] | None
    reordering: Reordering | None
    problem: AttentionProblem
    out_dtype: torch.dtype
    out_shape: tuple[int, ...]
    lse_shape: tuple[int, ...] | None
    device: torch.device
    places: tuple[DescalePlaces, ...]
    scale: float
    bounds: tuple[int | None, int | None, int | None]
    ctas: int
    section: int
    is_dynamic: bool
    ragged: RaggedLaunch | None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None,
        descales: Descales,
        sequences: Sequences | None = None,
    ) -> Result:
        """(out, lse or None) for tensors of exactly the signature that was prepared; v: codes, of `Fp8Values` too."""
        index = self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self.run(q, k, v, out, descales, sequences)
        if out is None:
            out = torch.empty(self.out_shape, dtype=self.out_dtype, device=self.device)
        lse = None
        if self.lse_shape is not None:
            lse = torch.empty(self.lse_shape, dtype=torch.float32, device=self.device)
        if self.kernel is None:
            out.zero_()
            return out, None if lse is None else lse.fill_(float("-inf"))
        is_ragged = sequences is not None
        q, k = map(addressable_rows if is_ragged else addressable, (q, k))
        v = addressable(v) if self.reordering is None else self.reordering.run(v, sequences)
        plain = out
        if out.data_ptr() % ALIGN_BYTES or not has_plain_strides(out) or (is_ragged and not is_viewable(out)):
            plain = with_plain_unit_strides(out)
            if is_ragged:
                plain = viewable(plain)
            if not is_aligned(out) or (is_ragged and not is_viewable(plain)):
                plain = torch.empty(out.shape, dtype=out.dtype, device=self.device)
        self._launch(q, k, v, plain, lse, descales, sequences)
        if plain.data_ptr() != out.data_ptr():
            out.copy_(plain)
        return out, lse

    def _launch(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor | None,
        descales: Descales,
        sequences: Sequences | None,
    ) -> None:
        """Tensors that the kernel's views can address, to one call into the compiled library."""
        assert self.kernel is not None
        index, launch = self.device.index, self.ragged
        # held until the launch: in a capture the counter would get its memory
        unit = unit_descale(index) if any(t is None for t in descales) else None
        of_scores_q, of_scores_k, of_values = (
            ((unit if t is None else t).data_ptr(), *places)  # type: ignore[union-attr]
            for t, places in zip(descales, self.places, strict=True)
        )
        factors = as_argument((of_scores_q, of_scores_k, of_values, self.problem.batch))
        if launch is None or sequences is None:
            counter = tile_counter(index) if self.is_dynamic else None
            self.kernel(
                q, k, v, out, lse, factors, None, counter, None, *self.bounds, self.scale, self.ctas, self.section
            )
            return
        of_q = of_k = of_out = of_lse = 0
        if not launch.packed_q:
            q, of_q = first_entry(q)
            out, of_out = first_entry(out)
            if lse is not None:
                lse, of_lse = first_entry(lse)
        if launch.packed_k:
            v = v[None]
        else:
            k, of_k = first_entry(k)
        values = as_argument((int(not launch.packed_k), int(launch.packed_k)))
        table = launch.forward_table(index)
        lengths = launch.lengths(sequences, FP8_BLOCK, FP8_BLOCK)
        ragged = as_argument((table.data_ptr(), launch.sequences, (of_q, of_k, of_out, of_lse), lengths))
        self.kernel(q, k, v, out, lse, factors, values, None, ragged, *self.bounds, self.scale, self.ctas, self.section)


def prepare_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor | Fp8Values,
    options: AttentionOptions,
    out: Tensor | None,
    descales: Descales,
    sequences: Sequences | None = None,
) -> PreparedFp8:
    """Check a call and bind it to a kernel, compiling it if need be.

    Raises the errors of `problem`, DeviceError for another GPU, UnsupportedError for missing features, and
    MissingDependencyError or CompileError from the compile layer. Nothing is allocated.
    """
    p, places, form = checked_call(q, k, v, options, out, descales, sequences)
    facts = device_facts(q.device.index)
    out_dtype = DEFAULT_OUT if out is None else out.dtype
    plan = supported_plan(p, form, out_dtype, f"the e4m3 forward kernel ({facts.name})")
    is_trivial = p.has_no_output or p.has_no_keys
    ctas, section = grid_of(p, plan, facts.sm_count)
    out_shape, lse_shape = result_shapes(p)
    return PreparedFp8(
        kernel=None if is_trivial else get_kernel(plan),
        reordering=None if is_trivial or isinstance(v, Fp8Values) else prepare_reordering(p, facts.sm_count),
        problem=p,
        out_dtype=out_dtype,
        out_shape=out_shape,
        lse_shape=lse_shape if options.return_lse else None,
        device=q.device,
        places=places,
        scale=max(abs(p.softmax_scale), SMALLEST_SCALE),
        bounds=kernel_bounds(p.mask.simplified(p.seqlen_q, p.seqlen_k)),
        ctas=ctas,
        section=section,
        is_dynamic=plan.scheduler == "dynamic" and not plan.is_ragged,
        ragged=None if p.ragged is None else ragged_launch(p),
    )


def supported_plan(p: AttentionProblem, form: DescaleForm, out_dtype: torch.dtype, backend: str) -> ForwardFp8Plan:
    """The plan for a checked call. Raises UnsupportedError, with the backend's name, for features that the kernel lacks."""
    is_fast = Feature.FAST_ACCUM in p.features
    features = p.features | ({Feature.FAST_ACCUM_OF_BLOCKS} if is_fast and form == "block" else set())
    check_supported(features, SUPPORTED, backend)
    return plan_forward_fp8(p, SHORT_DTYPES[out_dtype], form, "plain" if is_fast else "two_level")


def checked_call(
    q: Tensor,
    k: Tensor,
    v: Tensor | Fp8Values,
    options: AttentionOptions,
    out: Tensor | None,
    descales: Descales,
    sequences: Sequences | None,
) -> tuple[AttentionProblem, tuple[DescalePlaces, ...], DescaleForm]:
    """The problem of an e4m3 call, and where its descales are."""
    packed_q, packed_k = (sequences is not None and t is not None for t in (sequences or (None, None))[:2])
    described = (describe("q", q), describe("k", k), _value_spec(v, sequences), options)
    if sequences is None:
        p = attention_problem(*described, dtypes=DTYPES)
    else:
        p = varlen_problem(*described, dtypes=DTYPES, **length_specs(sequences))
    check_fp8_head_dims(p.head_dim, p.head_dim_v)
    if out is not None:
        check_fp8_out(describe("out", out), result_shapes(p)[0], OUT_DTYPES, str(q.device))
    scaled = (
        Scaled("q", p.heads, p.rows_q if packed_q else p.seqlen_q, packed_q, True),
        Scaled("k", p.heads_k, p.rows_k if packed_k else p.seqlen_k, packed_k, False),
        Scaled("v", p.heads_k, p.rows_k if packed_k else p.seqlen_k, packed_k, False),
    )
    specs = [None if t is None else describe(f"{s.name}_descale", t) for s, t in zip(scaled, descales, strict=True)]
    check_devices([describe("q", q), *(t for t in specs if t is not None)])
    places = tuple(descale_places(t, s, p.batch, p.heads_k) for s, t in zip(scaled, specs, strict=True))
    return p, places, descale_form(places)


def _value_spec(v: Any, sequences: Sequences | None) -> TensorSpec:
    if not isinstance(v, Fp8Values):
        return describe("v", v)
    cu_seqlens = None if sequences is None else sequences.cu_seqlens_k
    count = None if cu_seqlens is None else max(cu_seqlens.shape[0] - 1, 0)
    return value_spec(describe("v", v.codes), v.seqlen, count)
