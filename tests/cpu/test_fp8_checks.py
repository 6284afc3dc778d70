"""What is checked of an e4m3 call before a kernel is looked for: forms of descales and values, what is refused and by which name."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flash_hopper
from flash_hopper.launch.forward_fp8 import Descales, checked_call, supported_plan
from flash_hopper.launch.sequences import sequences_of
from flash_hopper.problem.attention import AttentionOptions
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, DeviceError, DTypeError, UnsupportedError
from flash_hopper.problem.fp8 import (
    FP8_BLOCK,
    DescalePlaces,
    Fp8Values,
    Scaled,
    block_count,
    descale_places,
    packed_block_count,
    packed_rows,
    padded_rows,
)
from flash_hopper.problem.tensor import TensorSpec

BATCH, ROWS, KEYS, HEADS, HEADS_K, DIM = 2, 200, 300, 4, 2, 64
LENGTHS = torch.tensor([0, 100, 200], dtype=torch.int32)
NONE = Descales(None, None, None)
FORMS = {
    "one element": lambda name: torch.ones(1),
    "no dimension": lambda name: torch.ones(()),
    "heads": lambda name: torch.ones(BATCH, HEADS_K),
    "blocks": lambda name: torch.ones(BATCH, heads_of(name), block_count(rows_of(name))),
}


def heads_of(name):
    return HEADS if name == "q" else HEADS_K


def rows_of(name):
    return ROWS if name == "q" else KEYS


def codes(*shape):
    return torch.zeros(shape).to(torch.float8_e4m3fn)


def tensors(dim=DIM, dim_v=DIM):
    values = Fp8Values(codes(BATCH, HEADS_K, dim_v, padded_rows(KEYS)), KEYS)
    return codes(BATCH, ROWS, HEADS, dim), codes(BATCH, KEYS, HEADS_K, dim), values


def checked(q=None, k=None, v=None, descales=NONE, out=None, sequences=None, **options):
    usual = tensors()
    q, k, v = (x if given is None else given for x, given in zip(usual, (q, k, v), strict=True))
    return checked_call(q, k, v, AttentionOptions(**options), out, descales, sequences)


def planned(v=None, descales=NONE, **options):
    problem, _, form = checked(v=v, descales=descales, **options)
    return supported_plan(problem, form, torch.bfloat16, "the kernel")


def refuses(error, match):
    return pytest.raises(error, match=match)


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_descale_is_taken_and_only_blocks_need_factors_of_each_block(name, form):
    descales = NONE._replace(**{name: FORMS[form](name)})
    _, places, found = checked(descales=descales)
    assert found == ("block" if form == "blocks" else "scalar")
    assert [any(p) for p in places] == [n == name and form in ("heads", "blocks") for n in "qkv"]
    assert planned(descales=descales).descales == found


@given(st.data())
def test_the_factor_of_a_row_is_found_where_the_form_says(data):
    """By numbers that say where they are from."""
    is_query = data.draw(st.booleans())
    scaled = Scaled("q" if is_query else "k", HEADS if is_query else HEADS_K, ROWS, False, is_query)
    b, head, row = (data.draw(st.integers(0, n - 1)) for n in (BATCH, scaled.heads, ROWS))
    key_head = head // (HEADS // HEADS_K) if is_query else head
    shapes = {"heads": (BATCH, HEADS_K), "blocks": (BATCH, scaled.heads, block_count(ROWS))}
    form = data.draw(st.sampled_from(sorted(shapes)))
    numbers = torch.arange(float(torch.tensor(shapes[form]).prod())).view(shapes[form])
    want = numbers[b, key_head] if form == "heads" else numbers[b, head, row // FP8_BLOCK]
    strides = tuple(numbers.stride())
    spec = TensorSpec("q_descale", shapes[form], strides, DType.FP32, "torch.float32", "cpu")
    at = descale_places(spec, scaled, BATCH, HEADS_K)
    place = b * at.batch + head * at.head + key_head * at.key_head + row // FP8_BLOCK * at.block
    assert numbers.flatten()[place] == want


def test_blocks_of_packed_sequences_have_a_column_each_and_no_batch():
    columns = packed_block_count(ROWS, BATCH)
    spec = TensorSpec("k_descale", (HEADS_K, columns), (columns, 1), DType.FP32, "torch.float32", "cpu")
    places = descale_places(spec, Scaled("k", HEADS_K, ROWS, True, False), BATCH, HEADS_K)
    assert places == DescalePlaces(key_head=columns, packed=1, block=1)


@pytest.mark.parametrize("name", "qkv")
def test_other_shapes_and_dtypes_of_a_descale_are_refused_with_its_name(name):
    blocks = block_count(rows_of(name))
    wrong = [(2,), (BATCH, HEADS_K + 1), (BATCH, HEADS), (BATCH, heads_of(name), blocks + 1), (blocks, 1, 1)]
    for shape in wrong:
        with refuses(ArgumentError, f"{name}_descale must have shape"):
            checked(descales=NONE._replace(**{name: torch.ones(shape)}))
    for dtype in (torch.float64, torch.bfloat16, torch.int32):
        with refuses(DTypeError, f"{name}_descale must have dtype torch.float32"):
            checked(descales=NONE._replace(**{name: torch.ones(1, dtype=dtype)}))
    with refuses(DTypeError, f"{name}_descale must be a torch.Tensor"):
        checked(descales=NONE._replace(**{name: 1.0}))
    with refuses(DeviceError, f"{name}_descale"):
        checked(descales=NONE._replace(**{name: torch.ones(1, device="meta")}))


def test_head_dims_are_multiples_of_16():
    for dim, dim_v in ((72, 64), (64, 8)):
        q, k, v = tensors(dim, dim_v)
        with refuses(ArgumentError, "multiple of 16 in e4m3"):
            checked(q, k, v)
    for dim in range(16, 257, 16):
        checked(*tensors(dim, 272 - dim))


def test_values_hold_whole_blocks_of_keys():
    for keys in (KEYS, padded_rows(KEYS) + FP8_BLOCK):
        with refuses(ArgumentError, f"must hold {padded_rows(KEYS)} keys for {KEYS} rows"):
            checked(v=Fp8Values(codes(BATCH, HEADS_K, DIM, keys), KEYS))
    with refuses(ArgumentError, "heads_k, head_dim_v, keys"):
        checked(v=Fp8Values(codes(HEADS_K, DIM, padded_rows(KEYS)), KEYS))
    with refuses(ArgumentError, "seqlen of Fp8Values"):
        checked(v=Fp8Values(codes(BATCH, HEADS_K, DIM, 0), -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_types_are_not_mixed(dtype):
    q, k, v = tensors()
    for wrong in ((q, k.to(dtype), v), (q, k, v._replace(codes=v.codes.to(dtype)))):
        with refuses(DTypeError, "dtype"):
            checked(*wrong)


def test_out_is_bfloat16_or_float16_of_the_right_shape():
    for dtype in (torch.bfloat16, torch.float16):
        checked(out=torch.empty(BATCH, ROWS, HEADS, DIM, dtype=dtype))
    for dtype in (torch.float32, torch.float8_e4m3fn):
        with refuses(DTypeError, "out must have dtype"):
            checked(out=torch.empty(BATCH, ROWS, HEADS, DIM, dtype=dtype))
    with refuses(ArgumentError, "out"):
        checked(out=torch.empty(BATCH, ROWS, HEADS, DIM + 16, dtype=torch.bfloat16))


def test_values_in_rows_have_the_plan_of_transposed_ones():
    for descales in (NONE, Descales(None, None, torch.ones(BATCH, HEADS_K, block_count(KEYS)))):
        assert planned(v=codes(BATCH, KEYS, HEADS_K, DIM), descales=descales) == planned(descales=descales)
    with refuses(ArgumentError, "heads of v"):
        checked(v=codes(BATCH, KEYS + 1, HEADS_K, DIM))


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"score_mod": lambda *a: a[0]}, "score_mod"),
        ({"mask_mod": lambda *a: True}, "mask_mod"),
        ({"num_splits": 2}, "num_splits"),
        ({"pack_gqa": True}, "pack_gqa"),
        ({"batch_invariant": True}, "batch_invariant"),
    ],
)
def test_what_comes_later_is_refused_by_name(options, name):
    with refuses(UnsupportedError, f"the kernel does not support: .*{name}"):
        planned(**options)


def test_fast_accumulation_is_taken_with_one_descale_a_head_and_refused_with_those_of_blocks():
    assert not planned(fast_accum=True).is_two_level
    blocks = Descales(*(FORMS["blocks"](name) for name in "qkv"))
    with refuses(UnsupportedError, "the kernel does not support: fast_accum=True with descales of blocks"):
        planned(descales=blocks, fast_accum=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fast_accumulation_of_other_dtypes_is_refused_by_name(dtype):
    q = torch.zeros(1, 4, 1, 64, dtype=dtype)
    with refuses(UnsupportedError, "fast_accum=True"):
        flash_hopper.flash_attn_func(q, q, q, fast_accum=True)
    with refuses(DTypeError, "fast_accum must be a bool"):
        flash_hopper.flash_attn_func(q, q, q, fast_accum=1)


def test_gradients_are_refused():
    problem, _, form = checked()
    q = replace(problem, features=problem.features | {feature_of_gradients()})
    with refuses(UnsupportedError, "gradients"):
        supported_plan(q, form, torch.bfloat16, "the kernel")


def feature_of_gradients():
    """As a call's own: an input that requires grad."""
    q, k, v = tensors()
    problem, _, _ = checked(q.requires_grad_(), k, v)
    (feature,) = problem.features - checked()[0].features
    return feature


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"window_size": (100, 0)}, {"attention_chunk": 64}, {"softmax_scale": -1.0}]
)
def test_masks_and_scales_of_any_sign_are_taken(options):
    plan = planned(**options, return_lse=True, deterministic=True, sm_margin=4)
    assert plan.has_lse and plan.is_two_level


def test_packed_batches_are_taken_with_the_forms_of_their_descales():
    q, k = codes(ROWS, HEADS, DIM), codes(ROWS, HEADS_K, DIM)
    v = Fp8Values(codes(HEADS_K, DIM, packed_rows(ROWS, BATCH)), ROWS)
    sequences = sequences_of(LENGTHS, LENGTHS, None, None, None, None)
    blocks = torch.ones(HEADS, packed_block_count(ROWS, BATCH))
    heads = Descales(None, torch.ones(BATCH, HEADS_K), None)
    for descales in (NONE, heads, Descales(blocks, blocks[:HEADS_K], blocks[:HEADS_K])):
        problem, _, form = checked(q, k, v, descales, sequences=sequences)
        plan = supported_plan(problem, form, torch.bfloat16, "the kernel")
        assert plan.is_ragged and plan.descales == form
    with refuses(ArgumentError, "k_descale must have shape"):
        checked(q, k, v, Descales(None, blocks[:HEADS_K, 1:], None), sequences=sequences)


def test_padded_batches_have_the_forms_of_dense_ones():
    used = torch.tensor([100, 0], dtype=torch.int32)
    for form, make in FORMS.items():
        descales = Descales(*(make(name) for name in "qkv"))
        problem, _, found = checked(descales=descales, sequences=sequences_of(None, None, used, used, None, None))
        assert problem.ragged is not None and found == ("block" if form == "blocks" else "scalar")
