"""Ragged requests: their canonical form, and a typed error naming the argument for each way to describe one wrongly."""

import dataclasses
import math
from itertools import product

import numpy
import pytest

from flash_hopper.problem.attention import AttentionOptions, varlen_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError, FlashHopperError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask
from flash_hopper.problem.ragged import Ragged
from flash_hopper.problem.tensor import TensorSpec

BATCH, TOTAL_Q, TOTAL_K, SEQLEN_Q, SEQLEN_K = 3, 70, 90, 40, 50
SIDES = [*product((False, True), repeat=4)]  # packed q, packed k, seqused q, seqused k


def spec(name, shape, **changes):
    """A contiguous bf16 tensor on cuda:0, with some fields changed."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    fields = {"strides": strides, "dtype": DType.BF16, "dtype_name": "torch.bfloat16", "device": "cuda:0"}
    return TensorSpec(name, shape, **{**fields, **changes})


def lengths_spec(name, size, **changes):
    return spec(name, (size,), **{"dtype": None, "dtype_name": "torch.int32", **changes})


def arguments(packed_q=True, packed_k=True, used_q=False, used_k=False):
    """A right call of this layout: 8 query heads, 2 key heads, head dims 128 and 96."""
    rows_q = (TOTAL_Q,) if packed_q else (BATCH, SEQLEN_Q)
    rows_k = (TOTAL_K,) if packed_k else (BATCH, SEQLEN_K)
    return {
        "q": spec("q", (*rows_q, 8, 128)),
        "k": spec("k", (*rows_k, 2, 128)),
        "v": spec("v", (*rows_k, 2, 96)),
        "out": spec("out", (*rows_q, 8, 96)),
        "cu_seqlens_q": lengths_spec("cu_seqlens_q", BATCH + 1) if packed_q else None,
        "cu_seqlens_k": lengths_spec("cu_seqlens_k", BATCH + 1) if packed_k else None,
        "seqused_q": lengths_spec("seqused_q", BATCH) if used_q else None,
        "seqused_k": lengths_spec("seqused_k", BATCH) if used_k else None,
        "max_seqlen_q": None,
        "max_seqlen_k": None,
    }


def request(call, **options):
    tensors = {name: value for name, value in call.items() if name not in ("q", "k", "v")}
    return varlen_problem(call["q"], call["k"], call["v"], AttentionOptions(**options), dtypes=KERNEL_DTYPES, **tensors)


def refused(call, error, *holds, **options):
    with pytest.raises(FlashHopperError) as raised:
        request(call, **options)
    assert type(raised.value) is error, raised.value
    missing = [part for part in holds if part not in str(raised.value)]
    assert not missing, f"{missing} not in: {raised.value}"


@pytest.mark.parametrize("sides", [sides for sides in SIDES if any(sides)])
def test_every_layout_becomes_its_canonical_form(sides):
    packed_q, packed_k, used_q, used_k = sides
    for out, causal in product((True, False), repeat=2):
        call = {**arguments(*sides), "max_seqlen_q": 40, "max_seqlen_k": None}
        problem = request(call if out else {**call, "out": None}, causal=causal, window_size=(5, -1))
        rows_q, rows_k = TOTAL_Q if packed_q else BATCH * SEQLEN_Q, TOTAL_K if packed_k else BATCH * SEQLEN_K
        assert problem.ragged == Ragged(*sides, rows_q, rows_k, 40, None)
        assert (problem.batch, problem.heads, problem.heads_k, problem.head_dim, problem.head_dim_v) == (
            3,
            8,
            2,
            128,
            96,
        )
        assert (problem.rows_q, problem.rows_k) == (rows_q, rows_k)
        # bounds of every sequence's length
        assert problem.seqlen_q == (TOTAL_Q if packed_q else SEQLEN_Q)
        assert problem.seqlen_k == (TOTAL_K if packed_k else SEQLEN_K)
        assert problem.mask == Mask(5, 0 if causal else None)
        assert (Feature.VARLEN in problem.features) == (packed_q or packed_k)
        assert (Feature.SEQUSED in problem.features) == (used_q or used_k)
        assert {Feature.GQA, Feature.HEAD_DIM_V, Feature.WINDOW} <= problem.features
        assert hash(problem) == hash(request(call, causal=causal, window_size=(5, -1)))


def test_without_any_lengths_the_dense_function_is_pointed_to():
    refused(arguments(False, False), ArgumentError, "cu_seqlens_q", "seqused_k", "must be given", "flash_attn_func")


@pytest.mark.parametrize("sides", [sides for sides in SIDES if any(sides)])
def test_ranks_follow_from_which_offsets_are_given(sides):
    call = arguments(*sides)
    for name, side in (("q", "q"), ("out", "q"), ("k", "k"), ("v", "k")):
        packed = call[f"cu_seqlens_{side}"] is not None
        layout = "(total rows, heads, head_dim) with" if packed else "(batch, seqlen, heads, head_dim) without"
        right = call[name].shape
        for shape in ((1, *right), right[1:], (*right, 8, 8), ()):
            if len(shape) != len(right):
                refused({**call, name: spec(name, shape)}, ArgumentError, f"{name} must be", layout, str(shape))
                refused({**call, name: spec(name, shape)}, ArgumentError, f"cu_seqlens_{side}")


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"])
def test_lengths_are_contiguous_vectors_of_int32_on_the_device_of_q(name):
    call = arguments(True, True, True, True)
    size = call[name].shape[0]
    for other in ("torch.int64", "torch.int16", "torch.float32", "torch.bool"):
        wrong = lengths_spec(name, size, dtype_name=other)
        refused({**call, name: wrong}, DTypeError, f"{name} must have dtype torch.int32", other, f"{name}.int()")
    for shape in ((), (size, 1), (1, size)):
        refused({**call, name: dataclasses.replace(call[name], shape=shape)}, ArgumentError, name, "one dimension")
    for stride in (0, 2, -1):
        wrong = dataclasses.replace(call[name], strides=(stride,))
        refused({**call, name: wrong}, ArgumentError, f"{name} must be contiguous", str(stride), f"{name}.contiguous()")
    for device in ("cpu", "cuda:1"):
        wrong = lengths_spec(name, size, device=device)
        refused({**call, name: wrong}, DeviceError, "one device", f"{name}: {device}", "q: cuda:0")


@pytest.mark.parametrize("sides", [sides for sides in SIDES if any(sides)])
def test_all_arguments_agree_on_the_number_of_sequences(sides):
    call = arguments(*sides)
    tellers = [name for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k") if call[name] is not None]
    for name, change in product(tellers, (-1, 1, 5)):
        wrong = lengths_spec(name, call[name].shape[0] + change)
        refused({**call, name: wrong}, ArgumentError, "number of sequences", name, str(wrong.shape))
    if call["q"].rank == 4:
        padded = {"q": spec("q", (7, SEQLEN_Q, 8, 128)), "out": spec("out", (7, SEQLEN_Q, 8, 96))}
        refused({**call, **padded}, ArgumentError, "number of sequences", "7 by q")
    if call["k"].rank == 4:
        padded = {"k": spec("k", (7, SEQLEN_K, 2, 128)), "v": spec("v", (7, SEQLEN_K, 2, 96))}
        refused({**call, **padded}, ArgumentError, "number of sequences", "7 by k")


def test_offsets_have_at_least_one_entry():
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        refused({**arguments(), name: lengths_spec(name, 0)}, ArgumentError, name, "batch + 1")


def test_k_and_v_have_the_same_rows_and_heads_and_out_those_of_q():
    for sides in SIDES[1:]:
        call = arguments(*sides)
        for name, axes in (("k", range(call["k"].rank)), ("out", range(call["out"].rank))):
            for axis in axes:
                shape = tuple(size + 8 * (i == axis) for i, size in enumerate(call[name].shape))
                holds = "number of sequences" if name == "k" and call["k"].rank == 4 and axis == 0 else name
                refused({**call, name: spec(name, shape)}, ArgumentError, holds, str(shape))
        expanded = dataclasses.replace(call["out"], strides=(0, *call["out"].strides[1:]))
        refused({**call, "out": expanded}, ArgumentError, "out must not be expanded")


def test_hints_are_none_or_integers_of_any_kind():
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for value in (0, 17, numpy.int32(17), numpy.int64(17)):
            hint = getattr(request({**arguments(), name: value}).ragged, name)
            assert hint == value
            assert type(hint) is int
        for value in (1.0, "8", True, numpy.float32(8), [8]):
            refused({**arguments(), name: value}, DTypeError, name, "int", type(value).__name__)
        refused({**arguments(), name: -1}, ArgumentError, name, "at least 0", "-1")


def test_options_are_checked_as_for_dense_calls():
    for options, error, holds in (
        ({"window_size": (-2, 0)}, ArgumentError, "window_size left"),
        ({"window_size": (0, True)}, DTypeError, "window_size right"),
        ({"attention_chunk": -1}, ArgumentError, "attention_chunk"),
        ({"softmax_scale": math.nan}, ArgumentError, "softmax_scale"),
        ({"causal": 1}, DTypeError, "causal"),
    ):
        refused(arguments(), error, holds, **options)


def test_elements_heads_and_layouts_are_checked_as_for_dense_calls():
    call = arguments()
    refused({**call, "k": dataclasses.replace(call["k"], dtype_name="torch.float16")}, DTypeError, "one dtype")
    refused({**call, "v": dataclasses.replace(call["v"], strides=(192, 96, 2))}, ArgumentError, "v must have stride 1")
    heads = {"k": spec("k", (TOTAL_K, 3, 128)), "v": spec("v", (TOTAL_K, 3, 96))}
    refused({**call, **heads}, ArgumentError, "3 heads", "multiple")
    refused({**call, "v": spec("v", (TOTAL_K, 2, 100)), "out": None}, ArgumentError, "head_dim of v", "100")
    for name in ("q", "k", "v"):
        wants = {**call, name: dataclasses.replace(call[name], requires_grad=True)}
        assert Feature.GRADIENT in request(wants).features


def test_nothing_to_do_is_known_only_where_shapes_say_so():
    def packed(batch, total_q, total_k):
        return request(
            {
                **arguments(),
                "q": spec("q", (total_q, 8, 128)),
                "k": spec("k", (total_k, 2, 128)),
                "v": spec("v", (total_k, 2, 96)),
                "out": None,
                "cu_seqlens_q": lengths_spec("cu_seqlens_q", batch + 1),
                "cu_seqlens_k": lengths_spec("cu_seqlens_k", batch + 1),
            }
        )

    for batch, total_q, total_k in product((0, 3), (0, 7), (0, 9)):
        problem = packed(batch, total_q, total_k)
        assert problem.has_no_output == (total_q == 0)  # rows of no sequence are written too
        assert problem.has_no_keys == (total_k == 0 or batch == 0)


def test_flops_are_those_of_the_given_lengths():
    problem = request(arguments(), window_size=(4, 0))
    lengths = [(0, 5), (3, 3), (7, 0), (20, 31)]
    scores = sum(len(Mask(4, 0).visible_range(row, q, k)) for q, k in lengths for row in range(q))
    assert problem.flops_of(lengths) == 2 * 8 * scores * (128 + 96)
    with pytest.raises(AssertionError, match="flops_of"):
        _ = problem.flops
