"""The float64 side of the comparisons is the oracle: every mask, in pieces of any size, with lengths of their own."""

import itertools
from dataclasses import replace

import pytest
import torch

from flash_hopper.problem.mask import Mask
from flash_hopper.reference import naive
from flash_hopper.testing import compare, gradients, ragged_targets
from flash_hopper.testing.cases import Case
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.pieces import FULL, Batch, Lengths

BOUNDS = (None, 0, 1, 3, 9)
MASKS = [Mask(*mask) for mask in itertools.product(BOUNDS, BOUNDS, (0, 1, 3, 20))]
SCALE = 0.4
WIDE = ("dtype=fp64,b=6,h=4,hk=2,sq=9,sk=9,d=8,dv=16", "dtype=fp64,b=6,h=4,hk=2,sq=7,sk=12,d=8,dv=8")
SIDES = (
    "pack=qk,lq=random,lk=random",
    "pack=qk,used=qk,lq=random,lk=empty_run,slack=3",
    "pack=q,used=k,lq=empty_every,lk=zipf",
    "pack=k,used=q,lq=random1,lk=random2,slack=2",
    "used=qk,lq=zipf,lk=random",
)


@pytest.mark.parametrize("sizes", [(5, 9), (9, 5), (7, 7), (1, 6)])
@pytest.mark.parametrize("budget", [1, 30, 10**6])
def test_every_mask_gives_what_the_oracle_gives(sizes, budget, monkeypatch):
    monkeypatch.setattr(compare, "SCORES", {"cpu": budget})
    monkeypatch.setattr(gradients, "_SCORES", {"cpu": budget})
    shapes = ((2, sizes[0], 4, 6), (2, sizes[1], 2, 6), (2, sizes[1], 2, 3), (2, sizes[0], 4, 3), (2, 4, sizes[0]))
    q, k, v, dout, dlse = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    for mask in MASKS if budget > 30 else MASKS[::7]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = naive.attention(*leaves, softmax_scale=SCALE, mask=mask)
        found = compare.expect(q, k, v, softmax_scale=SCALE, mask=mask)
        torch.testing.assert_close(found.out, out.detach(), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.lse, lse.detach(), rtol=1e-12, atol=1e-14)
        wanted = torch.autograd.grad((out, lse), leaves, (dout, dlse))
        got = gradients.expect_gradients(q, k, v, out.detach(), dout, dlse, softmax_scale=SCALE, mask=mask)
        for name, want in zip(("dq", "dk", "dv"), wanted, strict=True):
            torch.testing.assert_close(got[name].want, want, rtol=1e-11, atol=1e-13)


def test_lengths_make_the_entries_of_a_padded_batch_shorter():
    q, k, v = torch.randn(4, 9, 4, 6).double(), torch.randn(4, 8, 2, 6).double(), torch.randn(4, 8, 2, 3).double()
    lengths = Lengths(torch.tensor([9, 4, 1, 5]), torch.tensor([8, 7, 3, 1]))
    for mask in MASKS:
        found = compare.expect(q, k, v, softmax_scale=SCALE, mask=mask, lengths=lengths)
        for b, (n, m) in enumerate(zip(*(x.tolist() for x in lengths), strict=True)):
            one = slice(b, b + 1)
            out, lse = naive.attention(q[one, :n], k[one, :m], v[one, :m], softmax_scale=SCALE, mask=mask)
            torch.testing.assert_close(found.out[one, :n], out, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(found.lse[one, :, :n], lse, rtol=1e-12, atol=1e-14)
            assert (found.out[b, n:] == 0).all()
            assert (found.lse[b, :, n:] == -torch.inf).all()


@pytest.mark.parametrize("budget", [1, 10**6])
@pytest.mark.parametrize("sides", SIDES)
@pytest.mark.parametrize("sizes", WIDE)
def test_targets_of_a_ragged_call_are_the_oracles_and_zero_elsewhere(sizes, sides, budget, monkeypatch):
    monkeypatch.setattr(ragged_targets, "_SCORES", {"cpu": budget})
    case = Case.parse(f"{sizes},{sides},dlse=bhs,dir=backward,out=0")
    for mask in ({}, {"causal": True}, {"left": 2, "right": 1}, {"chunk": 3}):
        one = replace(case, **mask)
        inputs = make_inputs(one)
        options = {"softmax_scale": one.problem().softmax_scale, "mask": one.mask}
        call = ragged_targets.Call(inputs.q, inputs.k, inputs.v, one.side("q"), one.side("k"), *options.values())
        leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, lse = naive.varlen_attention(*leaves, **options, **inputs.lengths)
        wanted = torch.autograd.grad((out, lse), leaves, (inputs.dout.nan_to_num(), inputs.dlse.nan_to_num()))
        found = ragged_targets.expect_ragged(call)
        found |= ragged_targets.expect_ragged_gradients(call, out, inputs.dout, inputs.dlse)
        for name, want in zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *wanted), strict=True):
            torch.testing.assert_close(found[name].want, want.detach(), rtol=1e-10, atol=1e-12)
            assert found[name].allowed.shape == want.shape
            assert torch.isfinite(found[name].allowed).all()
        for target, is_used in ((found["out"], out[..., 0] != 0), (found["dq"], wanted[0][..., 0] != 0)):
            unused = ~is_used.any(dim=-1)
            assert (target.allowed[unused] < 1e-4).all()


@pytest.mark.parametrize("far", [0, 1, 2], ids=["batch", "rows", "heads"])
def test_matrices_are_compact_whatever_the_strides_of_the_tensors_also_with_a_single_row(far):
    """Tensors without data, whose entries along one dimension lie 2^31 elements and more apart."""
    for rows, keys, heads in itertools.product((1, 3), (1, 5), (1, 2)):
        q, k, v = (torch.empty_strided((2, n, heads, 8), far_strides(far), device="meta") for n in (rows, keys, keys))
        batch = Batch(q, k, v, SCALE, FULL)
        for piece in batch.pieces(1):
            for matrix in batch.cut(piece)[:3]:
                assert matrix.stride() == torch.empty(matrix.shape).stride()


def far_strides(far):
    strides = [1000, 100, 10, 1]
    strides[far] = 2**31 + 8
    return strides
