"""The rule for gradients: right ones pass, damaged ones fail, whatever the damage, and the message says where."""

import math
from dataclasses import replace

import pytest
import torch

from flash_hopper.problem.dtypes import DType
from flash_hopper.reference import naive, tiled
from flash_hopper.testing import gradients
from flash_hopper.testing.cases import VALUES, Case
from flash_hopper.testing.compare import compare
from flash_hopper.testing.gradients import expect_gradients
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.pieces import Batch

DTYPES = [DType.BF16, DType.FP16]
NAMES = ("dq", "dk", "dv")
BASE = Case(
    DType.BF16, 2, 4, 2, 150, 220, 64, 48, causal=True, direction="backward", give_out=False, dlse="bhs"
)  # fmt: skip


class Checked:
    """A case with its expected gradients, those of the CPU backend, and P and dS in float64 to damage."""

    def __init__(self, case):
        self.case, self.inputs = case, make_inputs(case)
        self.options = {"softmax_scale": case.problem().softmax_scale, "mask": case.mask}
        self.leaves = [x.detach().requires_grad_() for x in (self.inputs.q, self.inputs.k, self.inputs.v)]
        out, lse = tiled.attention(*self.leaves, **self.options)
        self.out = out.detach()
        passed = [(x, d) for x, d in ((out, self.inputs.dout), (lse, self.inputs.dlse)) if d is not None]
        found = torch.autograd.grad([x for x, _ in passed], self.leaves, [d for _, d in passed])
        self.right = dict(zip(NAMES, found, strict=True))
        self.expected = self.expect(self.out)

    def expect(self, out):
        i = self.inputs
        return expect_gradients(i.q, i.k, i.v, out, i.dout, i.dlse, **self.options)

    def compare(self, name, got):
        return compare(name, got.to(self.inputs.q.dtype), *self.expected[name])

    def failing(self, got):
        """The names of those in `got` that do not pass."""
        return {name for name, x in got.items() if not self.compare(name, x).passed}

    def explicit(self, **changed):
        """q, k, v, dout of all heads in float64, P, dP, dS and D (batch, heads, rows, keys), as the formula reads."""
        i, group = self.inputs, self.case.heads // self.case.heads_k
        q, dout = (x.double().transpose(1, 2) for x in (i.q, i.dout))
        k, v = (x.double().transpose(1, 2).repeat_interleave(group, dim=1) for x in (i.k, i.v))
        scores = q @ k.transpose(2, 3) * self.options["softmax_scale"]
        if self.case.causal:
            scores = scores.masked_fill(~self.visible(), -torch.inf)
        p = scores.softmax(dim=3).nan_to_num(0.0)
        dp = dout @ v.transpose(2, 3)
        d = (p * dp).sum(dim=3, keepdim=True)
        dlse = 0.0 if i.dlse is None else i.dlse.double().unsqueeze(3)
        return Parts(self, q, k, dout, p, dp, d, dlse)

    def visible(self, shift=0):
        sq, sk = self.case.seqlen_q, self.case.seqlen_k
        return torch.ones(sq, sk, dtype=torch.bool).tril(sk - sq + shift)


class Parts:
    def __init__(self, checked, q, k, dout, p, dp, d, dlse):
        self.checked, self.q, self.k, self.dout, self.p, self.dp, self.d, self.dlse = (
            checked,
            q,
            k,
            dout,
            p,
            dp,
            d,
            dlse,
        )
        self.ds = p * (dp - (d - dlse))

    def gradients(self, *, ds=None, p=None, scale=None):
        """dq, dk, dv from dS and P, rounded to the dtype."""
        ds, p = self.ds if ds is None else ds, self.p if p is None else p
        scale = self.checked.options["softmax_scale"] if scale is None else scale
        heads_k = self.checked.case.heads_k
        dk, dv = (
            torch.unflatten(w.transpose(2, 3) @ x, 1, (heads_k, -1)).sum(dim=2)
            for w, x in ((ds, self.q), (p, self.dout))
        )
        found = scale * ds @ self.k, scale * dk, dv
        dtype = self.checked.inputs.q.dtype
        return {name: x.transpose(1, 2).to(dtype) for name, x in zip(NAMES, found, strict=True)}


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def checked(request):
    return Checked(replace(BASE, dtype=request.param))


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def full(request):
    """Without a mask, over several blocks of queries and keys."""
    return Checked(replace(BASE, dtype=request.param, causal=False, batch=1, heads=2, seqlen_q=700, seqlen_k=900))


@pytest.mark.parametrize("dlse", ["none", "bhs"])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (7, 7), (1, 1), (7, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_expected_is_autograd_through_the_oracle_in_pieces_of_any_size(causal, lengths, dlse, monkeypatch):
    case = replace(BASE, causal=causal, seqlen_q=lengths[0], seqlen_k=lengths[1], d=16, dv=8, dlse=dlse, heads=6)
    one = Checked(case)
    i = one.inputs
    leaves = [x.double().requires_grad_() for x in (i.q, i.k, i.v)]
    out, lse = naive.attention(*leaves, **one.options)
    dlse = torch.zeros_like(lse) if i.dlse is None else i.dlse.double()
    wanted = torch.autograd.grad((out, lse), leaves, (i.dout.double(), dlse))
    # without PyTorch's own error, which depends on the sizes of its products, the allowance is F
    monkeypatch.setattr(gradients, "_plain_gradients", gradients._right_gradients)
    whole = one.expect(one.out)
    for budget in (1, 20, 100, 1000):
        monkeypatch.setattr(gradients, "_SCORES", {"cpu": budget})
        found = one.expect(one.out)
        for name, want in zip(NAMES, wanted, strict=True):
            torch.testing.assert_close(found[name].want, want, rtol=1e-11, atol=1e-13)
            # the longest key is that of the piece: a difference of float32 errors
            torch.testing.assert_close(found[name].allowed, whole[name].allowed, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [(1, 1), (1, 2), (64, 2), (3, 5), (40, 17), (17, 300)])
def test_right_gradients_pass(dtype, values, lengths):
    for causal, scale, dlse in ((True, None, "none"), (False, -0.3, "bhs"), (False, 0.0, "bhs"), (False, 1e-6, "none")):
        case = Case(
            dtype, 2, 2, 1, *lengths, 24, 40, causal, scale, values=values, direction="backward", give_out=False, dlse=dlse
        )  # fmt: skip
        one = Checked(case)
        for name, got in one.right.items():
            result = one.compare(name, got)
            assert result.passed, f"{case}: {result.message}"
        # and with everything but the results in float64, whatever the out that they are compared for
        assert not one.failing(one.explicit().gradients())


def test_right_gradients_use_less_than_two_thirds_of_the_allowance(checked, full):
    for one in (checked, full):
        assert all(one.compare(name, got).worst_ratio < 2 / 3 for name, got in one.right.items())
        assert all(one.compare(name, got).worst_ratio < 1 / 2 for name, got in one.explicit().gradients().items())


def test_the_allowance_is_a_few_roundings_of_a_typical_element(checked, full):
    for one in (checked, full):
        eps = torch.finfo(one.inputs.q.dtype).eps
        for want, allowed in one.expected.values():
            size = want.square().mean(dim=3).sqrt()
            assert (allowed.amax(dim=3) / size).median() < 6 * eps


@pytest.mark.parametrize("name", NAMES)
def test_each_single_element_counts(checked, name):
    """Any element, moved by a tenth of its row's size, is found and named."""
    generator = torch.Generator().manual_seed(0)
    right = checked.right[name]
    size = right.float().square().mean(dim=3, keepdim=True).sqrt()
    for flat in torch.randint(right.numel(), (40,), generator=generator).tolist():
        at = torch.unravel_index(torch.tensor(flat), right.shape)
        damaged = right.clone()
        damaged[at] += (0.1 * size.expand_as(damaged)[at]).to(damaged.dtype)
        result = checked.compare(name, damaged)
        assert f"{name}[{', '.join(str(int(i)) for i in at)}]" in result.message
        assert "; 1 of " in result.message


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_nan_or_infinity_is_found(checked, name, value):
    for position in ((0, 0, 0, 0), (1, 149, 1, 47), (1, 77, 0, 5)):
        damaged = checked.right[name].clone()
        damaged[position] = value
        assert checked.compare(name, damaged).worst_ratio == math.inf


@pytest.mark.parametrize("name", NAMES)
def test_swapped_rows_heads_and_batch_entries_are_found(checked, name):
    for dim in (0, 1, 2):
        damaged = checked.right[name].clone()
        low, high = damaged.narrow(dim, 0, 1).clone(), damaged.narrow(dim, 1, 1).clone()
        damaged.narrow(dim, 0, 1).copy_(high)
        damaged.narrow(dim, 1, 1).copy_(low)
        assert not checked.compare(name, damaged).passed
    for row in (0, 63, 64, 127, 128, 149):
        damaged = checked.right[name].clone()
        damaged[1, row, 1] = checked.right[name][1, row - 1, 1]
        assert f"{name}[1, {row}, 1, " in checked.compare(name, damaged).message


@pytest.mark.parametrize("size", [64, 128])
def test_a_block_left_out_or_counted_twice_is_found(full, size):
    """A block of keys in dq; a block of queries in dk and dv, of one head or of all."""
    parts = full.explicit()
    for factor in (0.0, 2.0):
        for first in (0, 384, 640):
            keys, rows = parts.ds.clone(), parts.ds.clone()
            keys[..., first : first + size] *= factor
            assert "dq" in full.failing(parts.gradients(ds=keys))
            rows[:, 1, first : first + size] *= factor
            p = parts.p.clone()
            p[:, 1, first : first + size] *= factor
            assert {"dk", "dv"} <= full.failing(parts.gradients(ds=rows, p=p))


def test_long_sums_do_not_hide_a_block():
    one = Checked(replace(BASE, batch=1, heads=1, heads_k=1, seqlen_q=4096, seqlen_k=64, d=32, dv=32, causal=False))
    parts = one.explicit()
    p, ds = parts.p.clone(), parts.ds.clone()
    p[:, :, 2048:2112] = ds[:, :, 2048:2112] = 0.0
    assert {"dk", "dv"} <= one.failing(parts.gradients(ds=ds, p=p))
    one = Checked(replace(BASE, batch=1, heads=1, heads_k=1, seqlen_q=64, seqlen_k=4096, d=32, dv=32, causal=False))
    parts = one.explicit()
    ds = parts.ds.clone()
    ds[..., 2048:2112] = 0.0
    assert "dq" in one.failing(parts.gradients(ds=ds))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_causal_mask_off_by_one_is_found(checked, shift):
    """Also if the statistics are right: one key too many or too few in the backward alone."""
    parts = checked.explicit()
    scores = parts.q @ parts.k.transpose(2, 3) * checked.options["softmax_scale"]
    lse = scores.masked_fill(~checked.visible(), -torch.inf).logsumexp(dim=3, keepdim=True)
    p = torch.exp(scores - lse).masked_fill(~checked.visible(shift), 0.0)
    ds = p * (parts.dp - (parts.d - parts.dlse))
    assert checked.failing(parts.gradients(ds=ds, p=p)) == set(NAMES)
    one_row = torch.where(torch.arange(150)[:, None] == 75, ds, parts.ds)
    assert "dq" in checked.failing(parts.gradients(ds=one_row))


def test_a_padded_key_or_row_that_is_not_masked_is_found(full):
    """A padded row with P = exp(0 - LSE of another row), whose Q and dO are those of a neighbour."""
    parts = full.explicit()
    p, ds = parts.p.clone(), parts.ds.clone()
    p[:, 1, -1] *= 2
    ds[:, 1, -1] *= 2
    assert {"dk", "dv"} <= full.failing(parts.gradients(ds=ds, p=p))
    twice = parts.ds.clone()
    twice[..., -1] *= 2  # the last key once more
    assert "dq" in full.failing(parts.gradients(ds=twice))


@pytest.mark.parametrize("factor", ["none", "twice", "sign", "1.05", "log2"])
def test_a_wrong_scale_of_dq_and_dk_is_found(checked, factor):
    scale = checked.options["softmax_scale"]
    wrong = {"none": 1.0, "twice": scale**2, "sign": -scale, "1.05": 1.05 * scale, "log2": scale * math.log2(math.e)}
    assert checked.failing(checked.explicit().gradients(scale=wrong[factor])) == {"dq", "dk"}


def test_a_missing_negated_or_doubled_dlse_is_found(checked):
    parts = checked.explicit()
    for factor in (0.0, -1.0, 2.0):
        ds = parts.p * (parts.dp - (parts.d - factor * parts.dlse))
        assert checked.failing(parts.gradients(ds=ds)) == {"dq", "dk"}
    shifted = parts.p * (parts.dp - (parts.d - parts.dlse.roll(1, dims=2)))
    assert checked.failing(parts.gradients(ds=shifted)) == {"dq", "dk"}


def test_a_missing_or_wrong_delta_is_found(checked, full):
    for one in (checked, full):
        parts = one.explicit()
        for wrong in (0.0 * parts.d, -parts.d, parts.d.roll(1, dims=2), parts.d.roll(1, dims=1), parts.d + 0.5):
            ds = parts.p * (parts.dp - (wrong - parts.dlse))
            assert one.failing(parts.gradients(ds=ds)) == {"dq", "dk"}


def test_a_delta_of_few_elements_is_found(full):
    """rowsum(dO o out) over all but the last 8 columns."""
    parts = full.explicit()
    part = (parts.dout[..., :-8] * full.out.double().transpose(1, 2)[..., :-8]).sum(dim=3, keepdim=True)
    ds = parts.p * (parts.dp - (part - parts.dlse))
    assert full.failing(parts.gradients(ds=ds)) == {"dq", "dk"}


def test_a_wrong_lse_is_found(checked):
    parts = checked.explicit()
    for factor in (1.03, 0.97):
        assert checked.failing(parts.gradients(ds=factor * parts.ds, p=factor * parts.p)) == set(NAMES)
    of_next_row = parts.p * torch.rand(2, 4, 150, 1).mul(0.2).add(0.9)
    assert "dv" in checked.failing(parts.gradients(p=of_next_row))


def test_the_wrong_key_head_or_a_head_of_the_group_left_out_is_found(checked):
    right = checked.right
    for name in ("dk", "dv"):
        assert not checked.compare(name, right[name].flip(2)).passed
    parts = checked.explicit()
    for factor in (0.0, 2.0):
        weight = torch.tensor([1.0, 1.0, factor, 1.0])[:, None, None].double()
        assert checked.failing(parts.gradients(ds=weight * parts.ds, p=weight * parts.p)) == set(NAMES)
    # query head h adds to key head h % heads_k instead of h // group
    order = [0, 2, 1, 3]
    mixed = parts.gradients()
    parts.q, parts.dout = parts.q[:, order], parts.dout[:, order]
    mixed |= {name: parts.gradients(ds=parts.ds[:, order], p=parts.p[:, order])[name] for name in ("dk", "dv")}
    assert checked.failing(mixed) == {"dk", "dv"}


def test_a_swapped_operand_is_found(checked):
    parts = checked.explicit()
    assert "dv" in checked.failing(parts.gradients(p=parts.ds))
    assert {"dq", "dk"} <= checked.failing(parts.gradients(ds=parts.p))
    assert {"dq", "dk"} <= checked.failing(parts.gradients(ds=parts.p * parts.dp))


@pytest.mark.parametrize("values", sorted(set(VALUES) - {"large"}))
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_row_is_found_for_every_kind_of_values(name, values):
    one = checked_of(values)
    got, (want, allowed) = one.right[name].roll(1, dims=1), one.expected[name]
    rows = want.abs().amax(dim=(0, 2, 3)).nonzero().flatten()
    found = [not compare(name, got[:, i], want[:, i], allowed[:, i]).passed for i in rows.tolist()]
    # in some rows of structured values another row may be right as well
    assert sum(found) > 0.6 * len(found) > 5


_BY_VALUES = {}


def checked_of(values):
    if values not in _BY_VALUES:
        _BY_VALUES[values] = Checked(replace(BASE, values=values, batch=3))
    return _BY_VALUES[values]


def test_what_pytorch_gets_wrong_is_not_excused():
    """Logits of 120 are wrong by 0.5 in bf16, probabilities by half: PyTorch's own gradients do not pass."""
    one = checked_of("extreme")
    i = one.inputs
    batch = Batch(i.q, i.k, i.v, **one.options)
    (piece,) = batch.pieces(1 << 30)
    plain = gradients._plain_gradients(gradients._cut(batch, piece, one.out, i.dout, i.dlse))
    heads = {"dq": 4, "dk": 2, "dv": 2}
    got = {name: x.view(3, heads[name], -1, x.shape[2]).transpose(1, 2) for name, x in plain.items()}
    assert one.failing(got) == set(NAMES)
    usual = checked_of("normal")
    ratio = {
        name: (one.expected[name].allowed / one.expected[name].want.abs().amax(dim=3, keepdim=True)).median()
        / (usual.expected[name].allowed / usual.expected[name].want.abs().amax(dim=3, keepdim=True)).median()
        for name in NAMES
    }
    assert all(x < 6 for x in ratio.values()), ratio


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_that_overflow_in_pytorch_loosen_nothing(dtype):
    one = Checked(replace(BASE, dtype=dtype, scale=2.0, values="large", seqlen_q=40, seqlen_k=60, causal=False))
    assert not one.failing(one.right)
    assert all(torch.isfinite(allowed).all() for _, allowed in one.expected.values())
    assert one.failing({name: x.roll(1, dims=1) for name, x in one.right.items()}) == set(NAMES)


def test_rows_in_which_pytorch_is_exact_pass_with_the_rounding_of_out():
    """One key: P = 1 and dS = 0; two keys: PyTorch often rounds nothing, out is rounded all the same."""
    for length, dtype in ((1, DType.BF16), (2, DType.BF16), (2, DType.FP16)):
        one = Checked(replace(BASE, dtype=dtype, seqlen_k=length, causal=False, dlse="none", scale=0.01))
        assert not one.failing(one.right)
        up = one.out.double() + one.out.double().abs() * torch.finfo(one.out.dtype).eps / 2
        parts = one.explicit()
        d = (parts.dout * up.transpose(1, 2)).sum(dim=3, keepdim=True)
        got = parts.gradients(ds=parts.p * (parts.dp - d))
        one.expected = one.expect(up)
        assert not one.failing(got)
        assert "dq" in one.failing(parts.gradients(ds=parts.p * (parts.dp - 1.1 * d)))


def test_an_out_that_is_exact_leaves_little_room_for_delta():
    """What is allowed for the rounding of out is what out was in fact rounded by."""
    one = Checked(replace(BASE, seqlen_k=3, causal=False, dlse="none"))
    parts = one.explicit()
    exact = (parts.p @ make_v(one)).transpose(1, 2)
    loose, tight = one.expect(one.out)["dq"].allowed, one.expect(exact)["dq"].allowed
    assert (tight <= loose * (1 + 1e-9)).all()
    assert tight.mean() < 0.95 * loose.mean()


def make_v(one):
    group = one.case.heads // one.case.heads_k
    return one.inputs.v.double().transpose(1, 2).repeat_interleave(group, dim=1)


def test_probabilities_below_the_smallest_normal_float32_may_be_flushed_to_zero_and_larger_ones_may_not():
    """One query row, logits of several hundred: most keys have a gradient of 1e-39 and less."""
    one = Checked(replace(BASE, seqlen_q=1, causal=False, scale=5.0))
    parts = one.explicit()
    tiny = torch.finfo(torch.float32).tiny
    assert ((parts.p > 2**-133) & (parts.p < tiny)).any()  # bfloat16 could hold them
    flushed = parts.p >= tiny
    assert not one.failing(parts.gradients(ds=parts.ds * flushed, p=parts.p * flushed))
    cut = parts.p >= 1e-30
    assert {"dk", "dv"} <= one.failing(parts.gradients(ds=parts.ds * cut, p=parts.p * cut))


def test_rows_without_keys_must_have_a_gradient_of_exactly_zero():
    for dtype in DTYPES:
        one = Checked(replace(BASE, dtype=dtype, seqlen_q=60, seqlen_k=20))
        assert not one.failing(one.right)
        assert (one.right["dq"][:, :40] == 0).all()
        for value in (6e-8, math.nan):
            dq = one.right["dq"].clone()
            dq[0, 5, 1, 3] = value
            assert "dq[0, 5, 1, 3]" in one.compare("dq", dq).message


def test_a_scale_of_zero_gives_gradients_of_exactly_zero():
    one = Checked(replace(BASE, scale=0.0))
    assert not one.failing(one.right)
    for name in ("dq", "dk"):
        damaged = one.right[name].clone()
        damaged[1, 3, 1, 2] = 1e-7
        assert not one.compare(name, damaged).passed


def test_without_a_gradient_of_out_those_of_v_must_be_zero():
    one = Checked(replace(BASE, dout="none"))
    assert not one.failing(one.right)
    assert (one.right["dv"] == 0).all()
    assert not one.compare("dv", one.right["dv"] + 1e-6).passed
    assert not one.compare("dk", torch.zeros_like(one.right["dk"])).passed


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_sizes_give_zeros(lengths):
    one = Checked(replace(BASE, seqlen_q=lengths[0], seqlen_k=lengths[1]))
    assert not one.failing(one.right)
    for name, x in one.right.items():
        assert one.expected[name].want.shape == x.shape
        assert one.compare(name, x + 1e-6).passed == (x.numel() == 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (1, 1)])
def test_plain_gradients_are_gradients(causal, lengths, monkeypatch):
    """In float64 they are those of the oracle, so what PyTorch adds in 16 bits is rounding."""
    case = replace(BASE, dtype=DType.FP64, causal=causal, seqlen_q=lengths[0], seqlen_k=lengths[1], d=16, dv=8)
    inputs = make_inputs(case)
    batch = Batch(inputs.q, inputs.k, inputs.v, case.problem().softmax_scale, case.mask)
    for piece in batch.pieces(40):
        given = gradients._cut(batch, piece, torch.zeros_like(inputs.dout), inputs.dout, inputs.dlse)
        right, plain = gradients._right_gradients(given), gradients._plain_gradients(given)
        for name in NAMES:
            torch.testing.assert_close(plain[name], right[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [DType.FP32, DType.FP64])
def test_wide_dtypes_are_held_to_their_own_precision(dtype):
    one = Checked(replace(BASE, dtype=dtype))
    assert not one.failing(one.right)
    assert one.failing({name: x.bfloat16() for name, x in one.right.items()}) == set(NAMES)
