"""Providers of `bench`: what they compute is checked, what they time is the direction alone, and who is missing says why."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import flash_hopper
from flash_hopper.problem.dtypes import DType
from flash_hopper.reference import naive
from flash_hopper.testing import bench_check, fa3_backward, providers
from flash_hopper.testing.bench_check import WrongResult, check_gradients, check_result
from flash_hopper.testing.bench_suites import BenchShape
from flash_hopper.testing.provider_base import Prepared, ProviderAbsent, make_inputs
from flash_hopper.testing.providers import MAKERS, flash_attn_like, gradients_of, prepare
from flash_hopper.testing.xla_ffi import Buffer, Frame, Function

SMALL = BenchShape("paper", DType.BF16, 32, 48, True, 40, 56, 2, 4, 2)
BACKWARD = replace(SMALL, direction="backward")
SQUARE = replace(BACKWARD, dv=32)
PACKED = BenchShape("ragged", DType.BF16, 32, 48, True, 40, 40, 6, 4, 2, lengths="zipf")
RAGGED = [
    PACKED,
    replace(PACKED, causal=False, lengths="equal"),
    replace(PACKED, lengths="one_long", batch=3, seqlen_q=130, seqlen_k=130),
    replace(PACKED, lengths=None, left=7),
    replace(PACKED, left=5),
    replace(PACKED, causal=False, left=5),
]
LONG = BenchShape("paper", DType.BF16, 16, 16, False, 2048, 2048, 1, 2, 1)


def attend(inputs, shape):
    """out, lse and the gradients of q, k, v in float64."""
    leaves = [t.double().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    options = {"softmax_scale": shape.d**-0.5, "mask": shape.problem.mask}
    if shape.is_ragged:
        out, lse = naive.varlen_attention(
            *leaves, **options, cu_seqlens_q=inputs.cu_seqlens, cu_seqlens_k=inputs.cu_seqlens
        )
    else:
        out, lse = naive.attention(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, inputs.dout.double())
    return out.detach(), lse.detach(), gradients


def exact(inputs, shape):
    return attend(inputs, shape)[0].to(inputs.q.dtype)


def exact_gradients(inputs, shape):
    return tuple(gradient.to(inputs.q.dtype) for gradient in attend(inputs, shape)[2])


def spoiled(tensor):
    """Kinds of wrong values: unwritten, one element off, scaled, nothing at all, of other heads."""
    unwritten = tensor.clone()
    unwritten[-1, ..., -1, -1] = torch.nan
    one_element = tensor.clone()
    one_element[0, ..., 0, 5] += 0.5
    return [unwritten, one_element, 1.2 * tensor, torch.zeros_like(tensor), tensor.flip(-2)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_a_right_out_passes_the_check_and_each_kind_of_wrong_one_fails(dtype, causal):
    shape = replace(SMALL, dtype=dtype, causal=causal)
    inputs = make_inputs(shape, "cpu")
    right = exact(inputs, shape)
    check_result(right, shape, inputs)
    check_result((right, None), shape, inputs)
    check_result(right.transpose(1, 2), shape, inputs, seqlen_dim=2)
    other_mask = exact(inputs, replace(shape, causal=not causal))
    for wrong in (*spoiled(right), other_mask, right[:, :-1], "no tensor"):
        with pytest.raises(WrongResult):
            check_result(wrong, shape, inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [DType.BF16, DType.FP16])
def test_right_gradients_pass_the_check_and_each_kind_of_wrong_one_fails(dtype, causal):
    shape = replace(BACKWARD, dtype=dtype, causal=causal)
    inputs = make_inputs(shape, "cpu")
    right = exact_gradients(inputs, shape)
    check_gradients(right, shape, inputs)
    other_mask = exact_gradients(inputs, replace(shape, causal=not causal))
    for at, name in enumerate(("dq", "dk", "dv")):
        for wrong in (*spoiled(right[at]), other_mask[at], right[at][:, :-1], None):
            with pytest.raises(WrongResult, match=name):
                check_gradients((*right[:at], wrong, *right[at + 1 :]), shape, inputs)
    for wrong in (right[:2], right[0], None):
        with pytest.raises(WrongResult, match="three gradients"):
            check_gradients(wrong, shape, inputs)


@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_packed_batches_and_windows_are_checked_sequence_by_sequence(shape):
    inputs = make_inputs(shape, "cpu")
    right, gradients = exact(inputs, shape), exact_gradients(inputs, shape)
    check_result(right, shape, inputs)
    check_gradients(gradients, shape, inputs)
    others = [replace(shape, causal=not shape.causal), replace(shape, left=4)]
    if shape.lengths == "zipf":
        equal = replace(inputs, cu_seqlens=torch.arange(0, len(inputs.q) + 1, len(inputs.q)).int())
        others += [replace(shape, left=len(inputs.q))] if shape.left is not None else []
        with pytest.raises(WrongResult):
            check_result(exact(equal, shape), shape, inputs)
    for other in others:
        with pytest.raises(WrongResult):
            check_result(exact(inputs, other), shape, inputs)
        for at, name in enumerate(("dq", "dk", "dv")):
            wrong = exact_gradients(inputs, other)[at]
            with pytest.raises(WrongResult, match=name):
                check_gradients((*gradients[:at], wrong, *gradients[at + 1 :]), shape, inputs)
    for wrong in spoiled(right):
        with pytest.raises(WrongResult):
            check_result(wrong, shape, inputs)


def test_the_allowance_does_not_grow_with_the_length_until_anything_passes():
    inputs = make_inputs(LONG, "cpu")
    out = exact(inputs, LONG)
    with pytest.raises(WrongResult):
        check_result(0.9 * out, LONG, inputs)
    right = exact_gradients(inputs, LONG)
    check_gradients(right, LONG, inputs)
    for at in range(3):
        wrong = tuple(0.9 * g if i == at else g for i, g in enumerate(right))
        with pytest.raises(WrongResult, match=("dq", "dk", "dv")[at]):
            check_gradients(wrong, LONG, inputs)


def test_long_sequences_are_checked_in_pieces_with_the_same_result(monkeypatch):
    inputs = make_inputs(BACKWARD, "cpu")
    whole = bench_check._exact_gradients(BACKWARD, inputs)
    bench_check._exact_gradients.cache_clear()
    monkeypatch.setattr(bench_check, "SCORES_AT_ONCE", 7 * BACKWARD.seqlen_k)
    pieces = bench_check._exact_gradients(BACKWARD, inputs)

    def values(parts):
        found = {}
        for part in parts:
            for row, want, allowed in zip(part.rows, part.want, part.allowed, strict=True):
                found[part.name, part.sequence, part.head, row] = torch.cat((want, allowed))
        return found

    first, second = values(whole), values(pieces)
    assert first.keys() == second.keys()
    assert {key[0] for key in first} == {"dq", "dk", "dv"}
    for key, value in first.items():
        torch.testing.assert_close(value, second[key])


@pytest.mark.parametrize(
    "shape", [SMALL, BACKWARD, *RAGGED, *(replace(shape, direction="backward") for shape in RAGGED)], ids=str
)
def test_the_cpu_backend_passes_as_provider(shape):
    inputs = make_inputs(shape, "cpu")
    for name in MAKERS[shape.direction]:
        if name.startswith("ours"):
            assert isinstance(prepare(name, shape, inputs), Prepared)


def test_missing_providers_are_absent_with_the_reason():
    inputs = make_inputs(SMALL, "cpu")
    for name, shape, reason in (
        ("sdpa-flash", SMALL, "top-left"),
        ("sdpa-flash", BACKWARD, "top-left"),
        ("theirs", SMALL, "no such provider of the forward"),
        ("ours-out", BACKWARD, "no such provider of the backward"),
        ("ours-det", SMALL, "no such provider of the forward"),
        ("fa3", BACKWARD, "equal head dims"),
        ("fa3", replace(PACKED, dv=32, direction="backward"), "dense batches only"),
        ("sdpa-cudnn", PACKED, "no windows and no packed batches"),
        ("sdpa-cudnn", replace(PACKED, lengths=None, left=7), "no windows and no packed batches"),
    ):
        with pytest.raises(ProviderAbsent, match=reason):
            prepare(name, shape, inputs)
    with pytest.raises(ProviderAbsent, match="not installed"):
        flash_attn_like("not_a_package_of_anyone.cute")(SMALL, inputs)


def test_a_peer_that_fails_in_any_way_is_absent_and_one_without_gradients_too(monkeypatch):
    inputs = make_inputs(BACKWARD, "cpu")

    def broken(shape, given):
        raise RuntimeError("no kernel image\nand more")

    def without_backward(shape, given):
        return Prepared(lambda: (exact(given, shape), None))

    monkeypatch.setitem(MAKERS["backward"], "fa4", broken)
    with pytest.raises(ProviderAbsent, match=r"refuses this shape: RuntimeError: no kernel image$"):
        prepare("fa4", BACKWARD, inputs)
    monkeypatch.setitem(MAKERS["backward"], "fa4", gradients_of(without_backward))
    with pytest.raises(ProviderAbsent, match="has no backward"):
        prepare("fa4", BACKWARD, inputs)


def test_what_is_timed_is_the_backward_alone(monkeypatch):
    inputs = make_inputs(BACKWARD, "cpu")
    calls = []
    forward = flash_hopper.flash_attn_func
    monkeypatch.setattr(flash_hopper, "flash_attn_func", lambda *a, **o: calls.append(o) or forward(*a, **o))
    prepared = {name: prepare(name, BACKWARD, inputs) for name in ("ours", "ours-det")}
    first = prepared["ours"].call()
    assert all(torch.equal(a, b) for a, b in zip(first, prepared["ours"].call(), strict=True))
    prepared["ours-det"].call()
    assert [options.get("deterministic", False) for options in calls] == [False, True]
    assert inputs.q.grad is None
    assert not inputs.q.requires_grad


def test_layouts_of_sdpa_do_not_reach_its_gradients():
    shape = replace(SQUARE, seqlen_k=SQUARE.seqlen_q, heads_k=SQUARE.heads)
    inputs = make_inputs(shape, "cpu")
    maker = gradients_of(providers._sdpa(torch.nn.attention.SDPBackend.MATH))
    check_gradients(maker(shape, inputs).call(), shape, inputs)


def tensor_of(buffer):
    """A view of a buffer of a frame."""
    dtype = {11: torch.float32, 10: torch.float16, 16: torch.bfloat16}[buffer.dtype]
    shape = [buffer.dims[i] for i in range(buffer.rank)]
    count = torch.Size(shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(buffer.data)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)


def fake_library(log):
    """Handlers with the names and buffers of the library; they compute on the CPU."""

    def buffers(group):
        return [tensor_of(Buffer.from_address(group.items[i])) for i in range(group.size)]

    def entry(at, name, wants):
        try:
            run(Frame.from_address(at), name, wants)
            log.append(name)
        except BaseException as failure:  # it cannot leave a C callback
            log.append(failure)

    def run(frame, name, wants):
        given, results = buffers(frame.arguments), buffers(frame.results)
        inputs = SimpleNamespace(**dict(zip(wants, given, strict=True)))
        if name == "forward":
            inputs.dout = torch.zeros(*inputs.q.shape[:3], inputs.v.shape[3])
        out, lse, gradients = attend(inputs, SQUARE)
        if name == "forward":
            assert len(results) == 4
            results[0].copy_(out)
            results[1].copy_(lse)
        else:
            rows = SQUARE.batch * SQUARE.seqlen_q + 128 * (SQUARE.batch + 1)  # what the package of the library allots
            assert [result.numel() for result in results[3:]] == [SQUARE.heads * rows] * 2
            torch.testing.assert_close(inputs.out.double(), out, atol=0.02, rtol=0.02)
            torch.testing.assert_close(inputs.lse.double(), lse, atol=1e-4, rtol=1e-4)
            for result, gradient in zip(results, gradients, strict=False):
                result.copy_(gradient)

    return SimpleNamespace(
        dew_flash3_mha_fwd=Function(lambda at: entry(at, "forward", ("q", "k", "v"))),
        dew_flash3_mha_bwd=Function(lambda at: entry(at, "backward", ("dout", "q", "k", "v", "out", "lse"))),
    )


def test_fa3_gets_its_forward_once_and_then_its_backward_alone(monkeypatch):
    log = []
    library = fake_library(log)
    monkeypatch.setattr(fa3_backward, "_library", lambda: library)
    prepared = prepare("fa3", SQUARE, make_inputs(SQUARE, "cpu"))
    prepared.call()
    assert log == ["forward", "backward", "backward"]


def test_a_missing_or_unloadable_library_of_fa3_is_a_reason(monkeypatch, tmp_path):
    inputs = make_inputs(SQUARE, "cpu")
    fa3_backward._library.cache_clear()
    monkeypatch.setattr(fa3_backward, "MODULES", ("module_that_nobody_has",))
    with pytest.raises(ProviderAbsent, match="dew-flash-attn-cu13 is not installed"):
        prepare("fa3", SQUARE, inputs)
    (tmp_path / "peer_of_a_test.py").write_text("raise ImportError('the Python part is never imported')\n")
    (tmp_path / fa3_backward.LIBRARY).write_text("no library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fa3_backward, "MODULES", ("peer_of_a_test",))
    with pytest.raises(ProviderAbsent, match="cannot be loaded: OSError"):
        prepare("fa3", SQUARE, inputs)
    fa3_backward._library.cache_clear()


def test_peers_get_offsets_longest_lengths_and_windows_as_they_name_them(monkeypatch, tmp_path):
    (tmp_path / "peer_like_flash.py").write_text(
        "import flash_hopper\n"
        "def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):\n"
        "    return flash_hopper.flash_attn_func(q, k, v, softmax_scale, causal=causal, window_size=window_size)\n"
        "def flash_attn_varlen_func(q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,\n"
        "                           softmax_scale=None, causal=False, window_size=(None, None)):\n"
        "    return flash_hopper.flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,\n"
        "        softmax_scale=softmax_scale, causal=causal, window_size=window_size)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MAKERS["forward"], "fa4", flash_attn_like("peer_like_flash"))
    for shape in RAGGED:
        assert isinstance(prepare("fa4", shape, make_inputs(shape, "cpu")), Prepared)
