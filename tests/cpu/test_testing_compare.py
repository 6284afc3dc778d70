"""The comparison: right results pass, damaged ones fail, whatever the damage, and the message says where."""

import math
from dataclasses import replace

import pytest
import torch

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.mask import Mask
from flash_hopper.reference import naive, tiled
from flash_hopper.testing.cases import VALUES, Case
from flash_hopper.testing.compare import compare, expect, plain_attention
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.pieces import FULL, Batch, by_head

DTYPES = [DType.BF16, DType.FP16]
BASE = Case(DType.BF16, 2, 4, 2, 150, 220, 64, 48, causal=True)


def plain(q, k, v, softmax_scale, mask=FULL):
    """`plain_attention` of a batch as one piece."""
    batch = Batch(q, k, v, softmax_scale, mask)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for piece in batch.pieces(1 << 30):
        given = batch.cut(piece)
        out[piece.of("dq")] = by_head(plain_attention(given, softmax_scale), given.shape)
    return out


class Checked:
    """A case with its expected result and a right one."""

    def __init__(self, case):
        inputs = make_inputs(case)
        self.case, self.q, self.k, self.v = case, inputs.q, inputs.k, inputs.v
        self.options = {"softmax_scale": case.problem().softmax_scale, "mask": case.mask}
        self.expected = expect(self.q, self.k, self.v, **self.options)
        self.out, self.lse = tiled.attention(self.q, self.k, self.v, **self.options)

    def compare_out(self, out):
        return compare("out", out.to(self.out.dtype), self.expected.out, self.expected.out_allowed)

    def compare_lse(self, lse):
        return compare("lse", lse.float(), self.expected.lse, self.expected.lse_allowed)

    def assert_found(self, out, lse, in_out=True, in_lse=True):
        assert self.compare_out(out).passed != in_out
        assert self.compare_lse(lse).passed != in_lse

    def wrong(self, **changed):
        """The right algorithm on changed tensors or options."""
        arguments = {"q": self.q, "k": self.k, "v": self.v, **self.options, **changed}
        return tiled.attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def checked(request):
    return Checked(replace(BASE, dtype=request.param))


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 2), (3, 5), (40, 17), (17, 500)])
def test_right_results_pass_and_use_less_than_two_thirds_of_the_allowance(dtype, values, lengths):
    for causal, scale in ((True, None), (False, -0.3), (False, 0.0)):
        case = Case(dtype, 2, 2, 1, *lengths, 24, 40, causal, scale, values=values)
        one = Checked(case)
        for result in (one.compare_out(one.out), one.compare_lse(one.lse)):
            assert result.passed, result.message
            assert result.worst_ratio < 2 / 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [0.0, 1.3, 7.9])
def test_a_stale_running_maximum_is_as_right_as_the_true_one(dtype, shift):
    """P may be larger than 1 by up to 2^8 if the reference of the exponent is updated late."""
    one = Checked(Case(dtype, 1, 2, 2, 60, 130, 32, 32))
    scores = torch.einsum("bihd,bjhd->bhij", one.q.float(), one.k.float()) * one.options["softmax_scale"]
    top = scores.amax(dim=3, keepdim=True) - shift * math.log(2)
    weights = torch.exp(scores - top)
    out = torch.einsum("bhij,bjhd->bihd", weights.to(one.q.dtype).float(), one.v.float())
    out = out / weights.sum(dim=3).transpose(1, 2)[..., None]
    assert one.compare_out(out).passed


def test_each_single_element_counts(checked):
    """Any element, moved by a tenth of its row's size, is found and named."""
    generator = torch.Generator().manual_seed(0)
    size = checked.out.float().square().mean(dim=3, keepdim=True).sqrt()
    for flat in torch.randint(checked.out.numel(), (40,), generator=generator).tolist():
        at = torch.unravel_index(torch.tensor(flat), checked.out.shape)
        damaged = checked.out.clone()
        damaged[at] += (0.1 * size.expand_as(damaged)[at]).to(damaged.dtype)
        result = checked.compare_out(damaged)
        assert f"out[{', '.join(str(int(i)) for i in at)}]" in result.message
        assert "; 1 of " in result.message
        assert float(f"{float(damaged[at]):.9g}") == float(result.message.split(" = ")[1].split(",")[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_nan_or_infinity_is_found(checked, value):
    for position in ((0, 0, 0, 0), (1, 149, 3, 47), (1, 77, 2, 5)):
        damaged = checked.out.clone()
        damaged[position] = value
        result = checked.compare_out(damaged)
        assert not result.passed
        assert result.worst_error == result.worst_ratio == math.inf
        lse = checked.lse.clone()
        lse[position[0], position[2], position[1]] = value
        assert not checked.compare_lse(lse).passed


def test_swapped_rows_heads_and_batch_entries_are_found(checked):
    for dim in (0, 1, 2):
        out = checked.out.clone()
        low, high = out.narrow(dim, 0, 1).clone(), out.narrow(dim, 1, 1).clone()
        out.narrow(dim, 0, 1).copy_(high)
        out.narrow(dim, 1, 1).copy_(low)
        assert not checked.compare_out(out).passed
        assert not checked.compare_lse(checked.lse.roll(1, dims=(0, 2, 1)[dim])).passed


def test_one_wrong_row_is_found_wherever_it_is(checked):
    for row in (0, 63, 64, 127, 128, 149):
        out = checked.out.clone()
        out[1, row, 2] = checked.out[1, row - 1, 2]
        result = checked.compare_out(out)
        assert f"out[1, {row}, 2, " in result.message


def test_a_key_too_many_or_too_few_is_found(checked):
    """The causal mask off by one, a padded key that leaks into all rows, the last key forgotten."""
    k, v = checked.k, checked.v
    nothing_k, nothing_v = torch.zeros_like(k[:, :1]), torch.zeros_like(v[:, :1])
    later = {"k": torch.cat([k, nothing_k], dim=1), "v": torch.cat([v, nothing_v], dim=1)}
    checked.assert_found(*checked.wrong(**later))
    checked.assert_found(*checked.wrong(k=k[:, :-1], v=v[:, :-1]))
    full = Checked(replace(checked.case, causal=False))
    # a key of zeros moves out by 1 in 360, less than bf16 rounds: the LSE tells
    full.assert_found(*full.wrong(**later), in_out=full.case.dtype == DType.FP16)
    full.assert_found(*full.wrong(k=k[:, :-1], v=v[:, :-1]))
    full.assert_found(*full.wrong(mask=Mask(right=0)))
    checked.assert_found(*checked.wrong(mask=Mask()))


def test_a_key_block_left_out_or_seen_twice_is_found_in_long_sequences():
    for length in (1000, 4096, 16_384):
        one = Checked(Case(DType.BF16, 1, 1, 1, 32, length, 32, 64))
        for first in (0, length // 2 // 128 * 128):
            kept = torch.cat([torch.arange(first), torch.arange(first + 128, length)])
            one.assert_found(*one.wrong(k=one.k[:, kept], v=one.v[:, kept]))
            twice = torch.cat([torch.arange(length), torch.arange(first, first + 128)])
            one.assert_found(*one.wrong(k=one.k[:, twice], v=one.v[:, twice]))


def test_the_wrong_key_head_is_found(checked):
    order = torch.tensor([1, 0])
    checked.assert_found(*checked.wrong(k=checked.k[:, :, order], v=checked.v[:, :, order]))
    checked.assert_found(*checked.wrong(v=checked.v[:, :, order]), in_lse=False)
    # head h % heads_k instead of h // group
    interleaved = torch.tensor([0, 1, 0, 1])
    checked.assert_found(*checked.wrong(k=checked.k[:, :, interleaved], v=checked.v[:, :, interleaved]))


def test_a_wrong_scale_or_sign_is_found(checked):
    scale = checked.options["softmax_scale"]
    for wrong in (scale * 1.05, scale * 0.95, -scale, 0.0, 1.0):
        checked.assert_found(*checked.wrong(softmax_scale=wrong))


def test_a_wrong_normalisation_is_found(checked):
    for factor in (1.03, 0.97, 0.5):
        assert not checked.compare_out(checked.out.float() * factor).passed


def test_a_wrong_lse_is_found(checked):
    lse = checked.lse
    wrong = (lse * math.log2(math.e), lse * math.log(2), lse + 1e-3, lse - 1e-3, lse.bfloat16(), torch.zeros_like(lse))
    for damaged in wrong:
        assert not checked.compare_lse(damaged).passed
    single = lse.clone()
    single[1, 2, 100] += 1e-3
    assert checked.compare_lse(single).message.startswith("lse[1, 2, 100] = ")


@pytest.mark.parametrize("values", sorted(set(VALUES) - {"large"}))
def test_a_wrong_row_is_found_for_every_kind_of_values(values):
    one = Checked(replace(BASE, values=values))
    out = one.out.roll(1, dims=1)
    found = [
        not compare("out", out[:, i], one.expected.out[:, i], one.expected.out_allowed[:, i]).passed for i in range(150)
    ]
    # in some rows of structured values another row may be right as well
    assert sum(found) > 100


def test_a_row_that_pytorch_gets_wrong_does_not_excuse_the_others():
    """fp16 scores beyond 65504 make plain PyTorch NaN: the allowance stays finite and narrow."""
    case = Case(DType.FP16, 1, 2, 2, 40, 60, 64, 64, scale=20.0, values="large")
    one = Checked(case)
    assert plain(one.q, one.k, one.v, **one.options).isnan().any()
    assert one.compare_out(one.out).passed
    assert torch.isfinite(one.expected.out_allowed).all()
    assert not one.compare_out(one.out.roll(1, dims=1)).passed


def test_rows_without_keys_must_be_zero_and_minus_infinity():
    one = Checked(replace(BASE, seqlen_q=60, seqlen_k=20))
    assert one.compare_out(one.out).passed
    assert one.compare_lse(one.lse).passed
    for value in (1e-4, math.nan):
        out = one.out.clone()
        out[0, 5, 1, 3] = value
        assert "out[0, 5, 1, 3]" in one.compare_out(out).message
    for value in (0.0, -1e30, math.nan, math.inf):
        lse = one.lse.clone()
        lse[1, 0, 39] = value
        assert "lse[1, 0, 39]" in one.compare_lse(lse).message


def test_nan_and_infinite_inputs_must_show_where_float64_shows_them():
    case = Case(DType.BF16, 1, 2, 2, 6, 9, 16, 16)
    inputs = make_inputs(case)
    inputs.q[0, 2, 1] = math.nan
    inputs.v[0, 4, 0, 3] = math.inf
    options = {"softmax_scale": 0.25}
    expected = expect(inputs.q, inputs.k, inputs.v, **options)
    out, _ = naive.attention(inputs.q, inputs.k, inputs.v, **options)
    assert out[0, 2, 1].isnan().all()
    assert (out[0, :, 0, 3] == math.inf).all()
    assert compare("out", out.bfloat16(), expected.out, expected.out_allowed).passed
    for damaged in (out.nan_to_num(0.0, posinf=math.inf), out.nan_to_num(math.nan, posinf=1.0), -out):
        assert not compare("out", damaged.bfloat16(), expected.out, expected.out_allowed).passed


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 0), (0, 7), (1, 1)])
def test_plain_attention_is_attention(causal, lengths):
    q, k, v = torch.randn(2, lengths[0], 6, 8), torch.randn(2, lengths[1], 3, 8), torch.randn(2, lengths[1], 3, 5)
    options = {"softmax_scale": 0.4, "mask": Mask(right=0 if causal else None)}
    want, _ = naive.attention(q, k, v, **options)
    got = plain(q, k, v, **options)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


def test_what_is_expected_in_pieces_is_the_same(monkeypatch):
    q, k, v = torch.randn(2, 11, 6, 8), torch.randn(2, 13, 3, 8), torch.randn(2, 13, 3, 5)
    for mask in (Mask(), Mask(right=0), Mask(4, 2), Mask(left=3), Mask(chunk=5), Mask(2, 0, 4)):
        whole = expect(q, k, v, softmax_scale=0.4, mask=mask)
        for budget in (1, 30, 400):
            monkeypatch.setattr("flash_hopper.testing.compare.SCORES", {"cpu": budget})
            parts = expect(q, k, v, softmax_scale=0.4, mask=mask)
            torch.testing.assert_close(parts.out, whole.out)
            torch.testing.assert_close(parts.lse, whole.lse)
            torch.testing.assert_close(parts.lse_allowed, whole.lse_allowed)
        monkeypatch.undo()


def test_nothing_to_compare_passes():
    assert compare("out", torch.zeros(2, 0), torch.zeros(2, 0).double(), torch.zeros(2, 0)).passed
