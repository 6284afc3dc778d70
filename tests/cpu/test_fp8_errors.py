"""The allowances for e4m3 attention: a right result passes, and each kind of fault fails in a case that is made for it."""

from dataclasses import replace

import pytest
import torch

import flash_hopper
from flash_hopper.problem.fp8 import Fp8Values
from flash_hopper.reference import naive
from flash_hopper.testing.compare import compare
from flash_hopper.testing.fp8_cases import HEAD_FORM, TURNS, fp8_case
from flash_hopper.testing.fp8_errors import expect_fp8
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.pieces import Lengths
from flash_hopper.testing.run import real_values, run_case

ONE_KEY = fp8_case(64, (600, 128), heads=(1, 1), values="onehot")


def truncated(x):
    """To 14 bits of significand, towards zero, as the tensor core keeps its sums."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp((fraction * 2**14).trunc() / 2**14, exponent)


def summed_by_tensor_core(weights, values, restart):
    """weights @ values, 32 keys a step; every `restart` keys a fresh sum is added to the others in float64."""
    total = torch.zeros(weights.shape[0], values.shape[1], dtype=torch.float64)
    for first in range(0, weights.shape[1], restart):
        part = torch.zeros_like(total)
        for step in range(first, min(first + restart, weights.shape[1]), 32):
            part = truncated(part + weights[:, step : step + 32] @ values[step : step + 32])
        total += part
    return total


@pytest.mark.parametrize(("restart", "is_right"), [(128, True), (1 << 20, False)])
def test_sums_of_16k_values_of_one_sign_in_the_tensor_core_alone_fail(restart, is_right):
    case = fp8_case(64, (8, 16_384), heads=(1, 1), values="samesign", descales=HEAD_FORM)
    q, k, v = real_values(case, make_inputs(case))
    scores = (q[0, :, 0] @ k[0, :, 0].T) * 64**-0.5
    codes = (torch.exp(scores - scores.amax(1, keepdim=True)) * 256).float().to(torch.float8_e4m3fn).double()
    out = (summed_by_tensor_core(codes, v[0, :, 0], restart) / codes.sum(1, keepdim=True)).bfloat16()
    right = expect_fp8(q, k, v, softmax_scale=64**-0.5)
    assert compare("out", out[None, :, None], right.out, right.out_allowed).passed == is_right


def with_damage(damage):
    """The public function, given other arguments than it should be."""

    def function(q, k, v, scale=None, **options):
        q, k, v, options = damage(q, k, v, options)
        return flash_hopper.flash_attn_func(q, k, v, scale, **options)

    return function


@pytest.mark.parametrize("pair", [(a, b) for a in range(0, 128, 9) for b in (a + 1, a + 2, a + 7) if b < 128])
def test_one_pair_of_keys_in_each_others_place_fails(pair):
    def damage(q, k, v, options):
        codes, order = v.codes.view(torch.uint8), torch.arange(128)
        order[list(pair)] = torch.tensor(pair[::-1])
        return q, k, Fp8Values(codes[..., order].view(v.codes.dtype), v.seqlen), options

    assert run_case(ONE_KEY).passed
    result = run_case(ONE_KEY, function=with_damage(damage))
    assert "out[" in result.message


def other_descale(name, change):
    def damage(q, k, v, options):
        return q, k, v, options | {name: change(options[name])}

    return damage


def shifted_keys(q, k, v, options):
    codes = k.view(torch.uint8).clone()
    codes[:, [3, 4]] = codes[:, [4, 3]]
    return q, codes.view(k.dtype), v, options


def without_last_key(q, k, v, options):
    codes = k.view(torch.uint8).clone()
    codes[:, -1] = codes[:, 0]
    return q, codes.view(k.dtype), v, options


def without_padding(q, k, v, options):
    codes = v.codes.view(torch.uint8).clone()
    codes[..., [-1, -2]] = codes[..., [0, 1]]
    return q, k, Fp8Values(codes.view(v.codes.dtype), v.seqlen), options


FAULTS = {
    "blocks of k's descales": other_descale("k_descale", lambda d: d.roll(1, -1)),
    "blocks of q's descales": other_descale("q_descale", lambda d: d.roll(1, -1)),
    "blocks of v's descales": other_descale("v_descale", lambda d: d.roll(1, -1)),
    "heads of v's descales": other_descale("v_descale", lambda d: d.flip(1)),
    "a descale 6 % too large": other_descale("v_descale", lambda d: d * 1.06),
    "no descale": other_descale("v_descale", lambda d: None),
    "keys in another order": shifted_keys,
    "another last key": without_last_key,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_descales_and_keys_fail(fault):
    case = fp8_case(
        64, (260, 300), batch=2, heads=(2, 2), values="samesign" if "v's" in fault or "too" in fault else "onehot"
    )
    case = replace(case, values="blocks") if "blocks of" in fault else case
    assert run_case(case).passed
    assert not run_case(case, function=with_damage(FAULTS[fault])).passed


@pytest.mark.parametrize("values", TURNS)
def test_an_lse_that_is_off_by_a_tenth_fails(values):
    def function(*arguments, **options):
        out, lse = flash_hopper.flash_attn_func(*arguments, **options)
        return out, lse + 0.1

    case = fp8_case(128, (70, 300), "causal", heads=(2, 1), values=values)
    assert run_case(case).passed
    if values == "onehot":
        case = replace(case, values="normal")
    assert "lse[" in run_case(case, function=function).message


def test_the_oracle_is_naive_attention_and_shorter_entries_count_for_themselves():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, h, 32, generator=generator, dtype=torch.float64) for n, h in ((40, 4), (70, 2), (70, 2))
    )
    right = expect_fp8(q, k, v, softmax_scale=0.2)
    out, lse = naive.attention(q, k, v, softmax_scale=0.2)
    torch.testing.assert_close(right.out, out)
    torch.testing.assert_close(right.lse, lse)
    short = expect_fp8(q, k, v, softmax_scale=0.2, lengths=Lengths(torch.tensor([40, 7]), torch.tensor([70, 9])))
    one = expect_fp8(q[1:, :7], k[1:, :9], v[1:, :9], softmax_scale=0.2)
    torch.testing.assert_close(short.out[1, :7], one.out[0])
    torch.testing.assert_close(short.out_allowed[1, :7], one.out_allowed[0])
    assert (short.out[1, 7:] == 0).all() and (short.lse[1, :, 7:] == -torch.inf).all()
    assert (short.out_allowed[1, 7:] < 1e-200).all() and (short.lse_allowed[1, :, 7:] < 1e-200).all()


def test_allowances_are_small():
    """Standard normal tensors, 1000 keys: 1 % of a standard deviation of v is allowed, 2.5 % for lse; one key a row: a rounded copy."""
    case = fp8_case(128, (200, 1000), heads=(1, 1))
    right = expect_fp8(*real_values(case, make_inputs(case)), softmax_scale=128**-0.5)
    assert float(right.out_allowed.mean()) < 0.02
    assert float(right.lse_allowed.max()) < 0.025
    right = expect_fp8(*real_values(ONE_KEY, make_inputs(ONE_KEY)), softmax_scale=64**-0.5)
    assert (right.out_allowed <= 0.01 * right.out.abs() + 1e-3).all()
