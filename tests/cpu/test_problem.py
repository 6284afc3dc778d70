"""Every bad input is a typed error that names the argument, what came and what is allowed."""

import dataclasses
import math
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.problem.attention import AttentionOptions, attention_problem
from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FlashHopperError,
    UnsupportedError,
)
from flash_hopper.problem.features import Feature, check_supported
from flash_hopper.problem.tensor import TensorSpec


def spec(name, shape, **changes):
    """A contiguous bf16 tensor on cuda:0, with some fields changed."""
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    fields = {"strides": strides, "dtype": DType.BF16, "dtype_name": "torch.bfloat16", "device": "cuda:0"}
    return TensorSpec(name, shape, **{**fields, **changes})


Q, K, V = spec("q", (2, 64, 8, 128)), spec("k", (2, 80, 2, 128)), spec("v", (2, 80, 2, 96))
OUT = spec("out", (2, 64, 8, 96))


def request(q=Q, k=K, v=V, out=None, **options):
    return attention_problem(q, k, v, AttentionOptions(**options), dtypes=KERNEL_DTYPES, out=out)


def with_last(t, size):
    return spec(t.name, (*t.shape[:3], size))


class Bad(NamedTuple):
    """A call that must be refused: its arguments, the error, and what the message must hold."""

    arguments: dict
    error: type
    holds: tuple[str, ...]


def bad_shapes():
    for name, t in (("q", Q), ("k", K), ("v", V), ("out", OUT)):
        for shape in (t.shape[1:], (1, *t.shape), ()):
            yield Bad({name: spec(name, shape)}, ArgumentError, (name, "(batch, seqlen, heads, head_dim)", str(shape)))
    yield Bad(
        {"k": spec("k", (3, 80, 2, 128))}, ArgumentError, ("k must have shape", "(3, 80, 2, 128)", "(2, 80, 2, 128)")
    )
    yield Bad({"k": spec("k", (2, 81, 2, 128))}, ArgumentError, ("k must have shape", "(2, 81, 2, 128)"))
    yield Bad({"k": spec("k", (2, 80, 4, 128))}, ArgumentError, ("k must have shape", "(2, 80, 4, 128)"))
    yield Bad({"k": spec("k", (2, 80, 2, 64))}, ArgumentError, ("k must have shape", "(2, 80, 2, 64)"))
    yield Bad({"v": spec("v", (1, 80, 2, 96))}, ArgumentError, ("v must have shape", "(1, 80, 2, 96)"))
    for axis in range(4):
        shape = tuple(size + 8 * (i == axis) for i, size in enumerate(OUT.shape))
        yield Bad({"out": spec("out", shape)}, ArgumentError, ("out must have shape", str(OUT.shape), str(shape)))


def bad_heads():
    for heads, heads_k in ((8, 3), (3, 8), (7, 2), (8, 0)):
        shapes = {"q": spec("q", (2, 64, heads, 128))}
        shapes |= {"k": spec("k", (2, 80, heads_k, 128)), "v": spec("v", (2, 80, heads_k, 96))}
        yield Bad(shapes, ArgumentError, (f"{heads_k} heads", str(heads), "multiple"))
    for size in (0, 4, 12, 100, 127, 257, 264, 512):
        both = {"q": with_last(Q, size), "k": with_last(K, size)}
        yield Bad(both, ArgumentError, ("head_dim of q and k", "multiple of 8 from 8 to 256", str(size)))
        yield Bad({"v": with_last(V, size)}, ArgumentError, ("head_dim of v", "multiple of 8 from 8 to 256", str(size)))


def bad_layouts():
    for name, t in (("q", Q), ("k", K), ("v", V), ("out", OUT)):
        for last in (2, 0, t.shape[1]):
            strides = (*t.strides[:3], last)
            call = {name: dataclasses.replace(t, strides=strides)}
            yield Bad(call, ArgumentError, (f"{name} must have stride 1", str(strides), ".contiguous()"))
        elsewhere = {name: dataclasses.replace(t, device="cuda:1")}
        yield Bad({"out": OUT, **elsewhere}, DeviceError, (f"{name}: cuda:1", "one device"))
        other = {name: dataclasses.replace(t, dtype=DType.FP16, dtype_name="torch.float16")}
        yield Bad({"out": OUT, **other}, DTypeError, (f"{name}: torch.float16", "torch.bfloat16", "one dtype"))
    expanded = dataclasses.replace(OUT, strides=(0, *OUT.strides[1:]))
    yield Bad({"out": expanded}, ArgumentError, ("out must not be expanded", str(expanded.strides)))
    for dtype, torch_name in ((DType.FP32, "torch.float32"), (DType.FP64, "torch.float64"), (None, "torch.int32")):
        for grad in (False, True):
            call = {
                t.name: dataclasses.replace(t, dtype=dtype, dtype_name=torch_name, requires_grad=grad)
                for t in (Q, K, V)
            }
            yield Bad(call, DTypeError, ("bf16, fp16", torch_name, "cuda:0"))


def bad_options():
    for value in (math.nan, math.inf, -math.inf, "1", True, 1j):
        yield Bad({"softmax_scale": value}, ArgumentError, ("softmax_scale", "finite", repr(value)))
    for value in (-0.5, math.nan, math.inf, "30"):
        yield Bad({"softcap": value}, ArgumentError, ("softcap", ">= 0", repr(value)))
    for name in ("attention_chunk", "num_splits", "sm_margin"):
        yield Bad({name: -1}, ArgumentError, (name, "at least 0", "-1"))
        for value in (1.5, "2", None, True):
            yield Bad({name: value}, DTypeError, (name, "int", type(value).__name__))
    for name in ("causal", "batch_invariant", "deterministic", "return_lse"):
        for value in (1, 0, None, "yes"):
            yield Bad({name: value}, DTypeError, (name, "bool", type(value).__name__))
    yield Bad({"pack_gqa": "auto"}, DTypeError, ("pack_gqa", "None or a bool", "'auto'"))
    for value in (3, (1,), (1, 2, 3), None, "ab", {1, 2}):
        yield Bad({"window_size": value}, ArgumentError, ("window_size", "(left, right)", repr(value)))
    for pair, side in (((-2, 0), "left"), ((0, -7), "right")):
        yield Bad({"window_size": pair}, ArgumentError, (f"window_size {side}", "at least -1"))
    yield Bad({"window_size": (1.5, 0)}, DTypeError, ("window_size left", "int", "float"))
    yield Bad({"window_size": (0, True)}, DTypeError, ("window_size right", "int", "bool"))


@pytest.mark.parametrize("kind", [bad_shapes, bad_heads, bad_layouts, bad_options])
def test_a_bad_input_names_argument_value_and_what_is_allowed(kind):
    for bad in kind():
        with pytest.raises(FlashHopperError) as raised:
            request(**bad.arguments)
        assert type(raised.value) is bad.error, (bad, raised.value)
        missing = [part for part in bad.holds if part not in str(raised.value)]
        assert not missing, f"{missing} not in: {raised.value}"


def test_each_error_is_also_the_built_in_that_a_caller_expects():
    for error, builtin in (
        (ArgumentError, ValueError),
        (DTypeError, TypeError),
        (DeviceError, RuntimeError),
        (UnsupportedError, NotImplementedError),
    ):
        assert issubclass(error, builtin)
        assert issubclass(error, FlashHopperError)


def test_every_option_that_changes_the_result_is_a_required_feature():
    asked = {
        Feature.CAUSAL: {"causal": True},
        Feature.LSE: {"return_lse": True},
        Feature.WINDOW: {"window_size": (0, None)},
        Feature.CHUNK: {"attention_chunk": 64},
        Feature.SOFTCAP: {"softcap": 30.0},
        Feature.SINKS: {"sinks": object()},
        Feature.SCORE_MOD: {"score_mod": max},
        Feature.MASK_MOD: {"mask_mod": max},
        Feature.AUX_TENSORS: {"aux_tensors": []},
        Feature.BLOCK_MASK: {"block_mask": object()},
        Feature.SPLIT_KV: {"num_splits": 2},
        Feature.PACK_GQA: {"pack_gqa": True},
        Feature.BATCH_INVARIANT: {"batch_invariant": True},
        Feature.DETERMINISTIC: {"deterministic": True},
        Feature.SM_MARGIN: {"sm_margin": 4},
        Feature.FAST_ACCUM: {"fast_accum": True},
        Feature.NEGATIVE_SCALE: {"softmax_scale": -0.1},
    }
    base = request().features
    for feature, options in asked.items():
        assert request(**options).features - base == {feature}
    for name in ("q_descale", "k_descale", "v_descale"):
        assert request(**{name: object()}).features - base == {Feature.DESCALE}
    # every field of the options is covered above, so a new one cannot be ignored
    covered = {name for options in asked.values() for name in options} | {"q_descale", "k_descale", "v_descale"}
    assert covered == {field.name for field in dataclasses.fields(AttentionOptions)}


def test_unbounded_windows_are_no_window_however_they_are_written():
    for window in ((None, None), (-1, -1), (None, -1), [-1, None]):
        assert Feature.WINDOW not in request(window_size=window).features


def test_shapes_and_gradients_are_required_features():
    square = {"q": spec("q", (1, 4, 2, 64)), "k": spec("k", (1, 4, 2, 64)), "v": spec("v", (1, 4, 2, 64))}
    assert request(**square).features == frozenset()
    assert request().features == {Feature.GQA, Feature.HEAD_DIM_V}
    for name, t in square.items():
        wants = {**square, name: dataclasses.replace(t, requires_grad=True)}
        assert request(**wants).features == {Feature.GRADIENT}


def test_what_a_backend_lacks_is_listed_completely():
    with pytest.raises(UnsupportedError) as raised:
        check_supported({Feature.CAUSAL, Feature.SINKS, Feature.WINDOW}, frozenset({Feature.CAUSAL}), "this kernel")
    assert str(raised.value) == "this kernel does not support: sinks; window_size"
    check_supported({Feature.CAUSAL}, frozenset({Feature.CAUSAL}), "this kernel")


def test_sizes_of_one_may_have_any_stride():
    odd = spec("q", (2, 1, 8, 128), strides=(1024, 7, 128, 1))
    assert request(q=odd).seqlen_q == 1


@given(st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_flops_count_the_visible_scores(seqlen_q, seqlen_k, causal):
    call = {
        "q": spec("q", (3, seqlen_q, 4, 64)),
        "k": spec("k", (3, seqlen_k, 2, 64)),
        "v": spec("v", (3, seqlen_k, 2, 32)),
    }
    visible = sum(not causal or key <= row + seqlen_k - seqlen_q for row in range(seqlen_q) for key in range(seqlen_k))
    assert request(**call, causal=causal).flops == 2 * 3 * 4 * visible * (64 + 32)


def test_the_default_scale_is_that_of_the_head_dim_and_others_pass_through():
    assert request().softmax_scale == 128**-0.5
    for scale in (0, -2, 1e-3, 7.5):
        assert request(softmax_scale=scale).softmax_scale == float(scale)


def test_a_problem_is_hashable_and_knows_when_there_is_nothing_to_do():
    assert hash(request()) == hash(request())
    for shape in ((0, 64, 8, 128), (2, 0, 8, 128)):
        k, v = spec("k", (shape[0], 80, 2, 128)), spec("v", (shape[0], 80, 2, 96))
        assert request(q=spec("q", shape), k=k, v=v).has_no_output
    empty = request(k=spec("k", (2, 0, 2, 128)), v=spec("v", (2, 0, 2, 96)))
    assert empty.has_no_keys
    assert not empty.has_no_output
