"""e4m3 attention on the CPU: the calls, their forms, and what they are."""

import itertools

import pytest
import torch
from fp8_tensors import coded, values_of

import flash_hopper
from flash_hopper import UnsupportedError
from flash_hopper.problem.errors import ArgumentError, DTypeError
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import sample, suite

FORMS = ("none", "one", "head", "block")


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(q, k, v, values, **options):
    factors = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    return flash_hopper.flash_attn_func(q.codes, k.codes, values, **(factors | options), return_lse=True)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 96), (256, 256)])
def test_both_forms_of_v_give_the_same(d, dv, form):
    q, k, v = (
        coded(x, form, 2) for x in (normal(2, 130, 4, d), normal(2, 200, 2, d, seed=1), normal(2, 200, 2, dv, seed=2))
    )
    for causal in (False, True):
        first, second = (call(q, k, v, values, causal=causal) for values in (v.codes, values_of(v)))
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
        assert first[0].dtype is torch.bfloat16 and first[1].dtype is torch.float32


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_packed_batch_is_its_sequences_one_by_one(form, is_transposed):
    lengths_q, lengths_k = [5, 0, 130, 64], [200, 7, 129, 0]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths_q, lengths_k))
    q = coded(normal(int(cu_q[-1]) + 3, 4, 64), form, 2, cu_q)
    k, v = (coded(normal(int(cu_k[-1]) + 3, 2, 64, seed=s), form, None, cu_k) for s in (1, 2))
    factors = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    values = values_of(v) if is_transposed else v.codes
    out, lse = flash_hopper.flash_attn_varlen_func(
        q.codes, k.codes, values, cu_q, cu_k, 130, 200, causal=True, return_lse=True, **factors
    )
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        real = [x.real[part].float()[None] for x, part in ((q, rows), (k, keys), (v, keys))]
        want, want_lse = flash_hopper.flash_attn_func(*real, causal=True, return_lse=True)
        if lengths_q[b] and lengths_k[b]:
            torch.testing.assert_close(out[rows].float(), want[0], atol=0.15, rtol=0.1)
            torch.testing.assert_close(lse[:, rows], want_lse[0], atol=0.07, rtol=0)
        else:
            assert (out[rows] == 0).all() and (lse[:, rows] == -torch.inf).all()
    assert (out[cu_q[-1] :] == 0).all() and (lse[:, cu_q[-1] :] == -torch.inf).all()


def test_out_may_be_of_either_16_bit_type_and_is_returned():
    q, k, v = (coded(normal(1, 70, 2, 64, seed=s), "block") for s in range(3))
    plain, _ = call(q, k, v, v.codes)
    for dtype in (torch.bfloat16, torch.float16):
        out = torch.empty(1, 70, 2, 64, dtype=dtype)
        found, _ = call(q, k, v, v.codes, out=out)
        assert found is out
        torch.testing.assert_close(out.float(), plain.float(), atol=2**-8, rtol=2**-7)
    with pytest.raises(DTypeError, match="out must have dtype bf16 or fp16"):
        call(q, k, v, v.codes, out=torch.empty(1, 70, 2, 64))


def test_what_has_no_gradient_or_comes_later_is_refused():
    q, k, v = (coded(normal(1, 70, 2, 64, seed=s), "head") for s in range(3))
    with pytest.raises(UnsupportedError, match="gradients"):
        flash_hopper.flash_attn_func(q.codes.requires_grad_(), k.codes, v.codes)
    for options, name in (({"softcap": 30.0}, "softcap"), ({"num_splits": 2}, "num_splits")):
        with pytest.raises(UnsupportedError, match=name):
            call(q, k, v, v.codes, **options)
    with pytest.raises(ArgumentError, match="k_descale must have shape"):
        call(q, k, v, v.codes, k_descale=torch.ones(3))
    with pytest.raises(ArgumentError, match="multiple of 16"):
        flash_hopper.flash_attn_func(*(x.codes[..., :40] for x in (q, k, v)))


def test_the_whole_path_from_16_bit_tensors_is_close_to_attention():
    q, k, v = (normal(2, 200, h, 72, seed=s).bfloat16() for s, h in enumerate((4, 2, 2)))
    for causal in (False, True):
        out, lse = flash_hopper.flash_attn_fp8_func(q, k, v, causal=causal, return_lse=True)
        want, want_lse = flash_hopper.flash_attn_func(q, k, v, causal=causal, return_lse=True)
        assert out.shape == want.shape and out.dtype is want.dtype
        assert float((out - want).float().norm() / want.float().norm()) < 0.08
        assert float((lse - want_lse).abs().max()) < 0.2
    half = flash_hopper.flash_attn_fp8_func(q.half(), k.half(), v.half())
    assert half.dtype is torch.float16


@pytest.mark.parametrize("case", sample(suite("fp8"), 60) + sample(suite("fp8-rows"), 15), ids=str)
def test_the_reference_is_within_the_allowances_of_the_suite(case):
    result = run_case(case)
    assert result.passed, result.message
