"""Ragged batches on the CPU: the oracle against PyTorch sequence by sequence, and the backend against the oracle.

Rows of no sequence hold NaN everywhere, in inputs and in gradients, and must reach nothing.
"""

import math
import random
from itertools import accumulate, product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.mask import FULL, Mask
from flash_hopper.reference import naive, tiled
from flash_hopper.testing.compare import compare, expect
from flash_hopper.testing.inputs import TORCH_DTYPES

HEADS, HEADS_K, D, DV, SCALE = 4, 2, 8, 16, 0.4
CAUSAL = Mask(None, 0)
MASKS = [FULL, CAUSAL, Mask(3, 0), Mask(2, 4), Mask(None, 1), Mask(4, None), Mask(None, None, 5), Mask(2, 0, 7)]
LAYOUTS = [layout for layout in product((False, True), repeat=4) if any(layout)]  # packed q, k; seqused of q, k
# used lengths (queries, keys): empty sequences first, in the middle, last, in a row and all; either side longer
LENGTHS = {
    "none": ([], []),
    "one": ([7], [9]),
    "empty_first": ([0, 4, 6], [0, 9, 3]),
    "empty_middle": ([5, 0, 0, 0, 8], [5, 0, 3, 0, 2]),
    "empty_last": ([6, 3, 0], [3, 6, 0]),
    "empty_all": ([0, 0, 0], [0, 0, 0]),
    "no_queries": ([0, 0], [5, 3]),
    "no_keys": ([4, 2], [0, 0]),
    "one_long": ([1, 33, 2, 1], [2, 40, 1, 0]),
    "ones": ([1] * 9, [1, 0, 2] * 3),
}


class Side(NamedTuple):
    """How one side lies: `starts` of the sequences in rows of all, with `unused` telling which rows are in none."""

    shape: tuple[int, ...]
    lengths: list[int]
    starts: list[int]
    cu_seqlens: Tensor | None
    seqused: Tensor | None

    @property
    def unused(self) -> Tensor:
        rows = torch.ones(math.prod(self.shape), dtype=torch.bool)
        for start, length in zip(self.starts, self.lengths, strict=True):
            rows[start : start + length] = False
        return rows

    def tensor(self, heads, dim, dtype=torch.float64):
        """Random in used rows, NaN in others."""
        x = torch.randn(math.prod(self.shape), heads, dim, dtype=torch.float64).to(dtype)
        x[self.unused] = math.nan
        return x.view(*self.shape, heads, dim)

    def of(self, x, index):
        """Sequence `index` of x, (..., heads, dim) with this side's rows in front, as a batch of one."""
        start, length = self.starts[index], self.lengths[index]
        return x.reshape(math.prod(self.shape), *x.shape[len(self.shape) :])[start : start + length][None]


def side_of(lengths, is_packed, is_used, draw):
    """A layout of these lengths: with seqused there is more space than used, and behind packed sequences always."""
    spaces = [length + draw.choice((0, 1, 5)) if is_used else length for length in lengths]
    used = torch.tensor(lengths, dtype=torch.int32) if is_used else None
    if is_packed:
        offsets = [0, *accumulate(spaces)]
        cu_seqlens = torch.tensor(offsets, dtype=torch.int32)
        return Side((offsets[-1] + draw.choice((0, 3)),), lengths, offsets[:-1], cu_seqlens, used)
    size = max(spaces, default=4)
    lengths = lengths if is_used else [size] * len(lengths)
    return Side((len(lengths), size), lengths, [b * size for b in range(len(lengths))], None, used)


class Batch(NamedTuple):
    """A ragged batch: its tensors, with gradients if asked, and the lengths as keyword arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    side_q: Side
    side_k: Side

    @property
    def inputs(self):
        return self.q, self.k, self.v

    @property
    def lengths(self):
        (q, k) = self.side_q, self.side_k
        names = {"cu_seqlens_q": q.cu_seqlens, "cu_seqlens_k": k.cu_seqlens, "seqused_q": q.seqused}
        return {**names, "seqused_k": k.seqused}

    def sequences(self):
        """q, k and v of each sequence as a batch of one."""
        for b in range(len(self.side_q.lengths)):
            yield self.side_q.of(self.q, b), self.side_k.of(self.k, b), self.side_k.of(self.v, b)

    def result_of(self, out, lse, b):
        """out and lse of a sequence as those of a batch of one."""
        by_row = lse.T if lse.dim() == 2 else lse.transpose(1, 2)
        return self.side_q.of(out, b), self.side_q.of(by_row, b).transpose(1, 2)


def make(lengths, layout, seed=0, dtype=torch.float64, requires_grad=False):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    packed_q, packed_k, used_q, used_k = layout
    side_q, side_k = side_of(lengths[0], packed_q, used_q, draw), side_of(lengths[1], packed_k, used_k, draw)
    tensors = side_q.tensor(HEADS, D, dtype), side_k.tensor(HEADS_K, D, dtype), side_k.tensor(HEADS_K, DV, dtype)
    return Batch(*(x.requires_grad_(requires_grad) for x in tensors), side_q, side_k)


def check_shapes_and_unused_rows(batch, out, lse):
    rows = batch.side_q.shape
    assert out.shape == (*rows, HEADS, DV)
    assert lse.shape == (*rows[:-1], HEADS, rows[-1])
    unused = batch.side_q.unused.view(rows)
    assert (out[unused] == 0).all()
    assert (lse.movedim(-1, -2)[unused] == -math.inf).all()


def sdpa(q, k, v, mask):
    """One sequence by PyTorch under an explicit mask, and which rows see a key."""
    p = torch.arange(q.shape[1])[:, None] + (k.shape[1] - q.shape[1])
    keys = torch.arange(k.shape[1])
    shown = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if mask.left is not None:
        shown &= p - keys <= mask.left
    if mask.right is not None:
        shown &= keys - p <= mask.right
    if mask.chunk:
        shown &= torch.floor(p / mask.chunk) == torch.floor(keys / mask.chunk)
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=shown, scale=SCALE, enable_gqa=True
    )
    return out.transpose(1, 2), shown.any(dim=1)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_oracle_computes_each_sequence_as_pytorch_does_alone(layout, mask):
    for lengths in LENGTHS.values():
        batch = make(lengths, layout)
        out, lse = naive.varlen_attention(*batch.inputs, softmax_scale=SCALE, mask=mask, **batch.lengths)
        assert out.dtype == lse.dtype == torch.float64
        check_shapes_and_unused_rows(batch, out, lse)
        for b, sequence in enumerate(batch.sequences()):
            want, sees = sdpa(*sequence, mask)
            got, got_lse = batch.result_of(out, lse, b)
            torch.testing.assert_close(got[:, sees], want[:, sees], rtol=1e-10, atol=1e-12)
            assert (got[:, ~sees] == 0).all()
            assert torch.equal(torch.isfinite(got_lse), sees.expand_as(got_lse))


def gradients(attention, batch, d_out, d_lse, **options):
    """dq, dk, dv for gradients of out and lse; None stands for no gradient."""
    out, lse = attention(*batch.inputs, softmax_scale=SCALE, **batch.lengths, **options)
    given_ = [(x, g) for x, g in ((out, d_out), (lse, d_lse)) if g is not None and x.requires_grad]
    if not given_:
        return [torch.zeros_like(x) for x in batch.inputs]
    found = torch.autograd.grad([x for x, _ in given_], batch.inputs, [g for _, g in given_], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, batch.inputs, strict=True)]


def random_gradients(batch):
    """Of out and of lse, NaN in rows of no sequence."""
    d_out, d_lse = batch.side_q.tensor(HEADS, DV), batch.side_q.tensor(HEADS, 1).squeeze(-1)
    return d_out, d_lse.movedim(-1, -2)


def check_backend_is_oracle(batch, mask, tile_m, tile_n, kinds):
    """Values, and gradients for `kinds` of what may come back: with respect to out and lse, to out, to lse."""
    tiles, options = {"tile_m": tile_m, "tile_n": tile_n}, {"softmax_scale": SCALE, "mask": mask}
    got = tiled.varlen_attention(*batch.inputs, **options, **batch.lengths, **tiles)
    want = naive.varlen_attention(*batch.inputs, **options, **batch.lengths)
    check_shapes_and_unused_rows(batch, *got)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-11)
    d_out, d_lse = random_gradients(batch)
    for given_ in ((d_out, d_lse), (d_out, None), (None, d_lse))[:kinds]:
        got = gradients(tiled.varlen_attention, batch, *given_, mask=mask, **tiles)
        want = gradients(naive.varlen_attention, batch, *given_, mask=mask)
        for g, w, side in zip(got, want, (batch.side_q, batch.side_k, batch.side_k), strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-10)
            assert (g.flatten(0, -3)[side.unused] == 0).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_backend_agrees_with_the_oracle_in_values_and_gradients(layout, mask):
    for seed, lengths in enumerate(LENGTHS.values()):
        check_backend_is_oracle(make(lengths, layout, seed, requires_grad=True), mask, 4, 8, kinds=1)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=6),
    layout=st.sampled_from(LAYOUTS),
    mask=st.builds(Mask, *[st.one_of(st.none(), st.integers(0, 20))] * 2, st.one_of(st.just(0), st.integers(0, 20))),
    tiles=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    seed=st.integers(0, 99),
)
def test_the_backend_agrees_with_the_oracle_whatever_lengths_masks_and_tiles(lengths, layout, mask, tiles, seed):
    batch = make(([q for q, _ in lengths], [k for _, k in lengths]), layout, seed, requires_grad=True)
    check_backend_is_oracle(batch, mask, *tiles, kinds=3)


@pytest.mark.parametrize("dtype", tiled.DTYPES)
def test_every_dtype_is_as_good_as_plain_pytorch_sequence_by_sequence(dtype):
    torch_dtype = TORCH_DTYPES[dtype]
    for layout, mask in product(LAYOUTS[::3], MASKS[1:5]):
        batch = make(([40, 0, 90], [70, 5, 60]), layout, dtype=torch_dtype)
        out, lse = tiled.varlen_attention(*batch.inputs, softmax_scale=SCALE, mask=mask, **batch.lengths)
        assert out.dtype == torch_dtype
        assert lse.dtype == (torch.float64 if dtype is DType.FP64 else torch.float32)
        check_shapes_and_unused_rows(batch, out, lse)
        for b, sequence in enumerate(batch.sequences()):
            expected = expect(*sequence, softmax_scale=SCALE, mask=mask)
            got, got_lse = batch.result_of(out, lse, b)
            for result in (
                compare("out", got, expected.out, expected.out_allowed),
                compare("lse", got_lse, expected.lse, expected.lse_allowed),
            ):
                assert result.passed, (layout, mask, b, result.message)


@pytest.mark.parametrize("mask", MASKS[:4])
@pytest.mark.parametrize("dtype", tiled.DTYPES)
def test_gradients_called_by_themselves_are_those_of_autograd(dtype, mask):
    for layout in LAYOUTS:
        batch = make(LENGTHS["empty_middle"], layout, dtype=TORCH_DTYPES[dtype], requires_grad=True)
        options = {"softmax_scale": SCALE, "mask": mask, **batch.lengths}
        out, lse = tiled.varlen_attention(*batch.inputs, **options)
        d_out, d_lse = (g.to(x.dtype) for g, x in zip(random_gradients(batch), (out, lse), strict=True))
        want = torch.autograd.grad((out, lse), batch.inputs, (d_out, d_lse))
        got = tiled.varlen_gradients(*batch.inputs, out, lse, d_out, d_lse, **options)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
        assert all(g.dtype == x.dtype and not g.isnan().any() for g, x in zip(got, batch.inputs, strict=True))


def test_a_sequence_gives_the_same_bits_wherever_it_lies_and_whoever_is_beside_it():
    lengths = LENGTHS["one_long"]
    results = []
    for layout in [layout for layout in LAYOUTS if all(p or u for p, u in zip(layout[:2], layout[2:], strict=True))]:
        batch = make(lengths, layout, dtype=torch.float32)
        torch.manual_seed(1)
        for x, side in zip(batch.inputs, (batch.side_q, batch.side_k, batch.side_k), strict=True):
            for b in range(len(lengths[0])):
                one = side.of(x, b)
                one.copy_(torch.randn(one.shape))
        out, lse = tiled.varlen_attention(*batch.inputs, softmax_scale=SCALE, mask=CAUSAL, **batch.lengths)
        results.append([batch.result_of(out, lse, b) for b in range(len(lengths[0]))])
        alone = [tiled.attention(*one, softmax_scale=SCALE, mask=CAUSAL) for one in batch.sequences()]
        results.append(alone)
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_strides_change_nothing():
    for layout in LAYOUTS:
        batch = make(LENGTHS["empty_first"], layout)
        wide = [torch.cat([x, x.new_full(x.shape, math.nan)], dim=-2)[..., : x.shape[-2], :] for x in batch.inputs]
        for attention in (naive.varlen_attention, tiled.varlen_attention):
            want = attention(*batch.inputs, softmax_scale=SCALE, mask=CAUSAL, **batch.lengths)
            got = attention(*wide, softmax_scale=SCALE, mask=CAUSAL, **batch.lengths)
            assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("side", ["q", "k"])
def test_lengths_that_cannot_be_are_errors_that_name_the_argument(side):
    batch = make(([4, 6, 3], [5, 2, 8]), (True, True, True, True))
    total = batch.q.shape[0] if side == "q" else batch.k.shape[0]
    offsets, used = batch.lengths[f"cu_seqlens_{side}"], batch.lengths[f"seqused_{side}"]
    spaces = offsets.diff().tolist()
    wrong = {
        "start at 0": (f"cu_seqlens_{side}", [1, *offsets.tolist()[1:]]),
        "not decrease": (f"cu_seqlens_{side}", [0, 5, 4, total]),
        "end within": (f"cu_seqlens_{side}", [*offsets.tolist()[:-1], total + 1]),
        "from 0 to the space": (f"seqused_{side}", [-1, *used.tolist()[1:]]),
        f"{spaces[1] + 1} of {spaces[1]} at entry 1": (f"seqused_{side}", [0, spaces[1] + 1, 0]),
    }
    for holds, (name, values) in wrong.items():
        lengths = {**batch.lengths, name: torch.tensor(values, dtype=torch.int32)}
        if holds == "not decrease":
            lengths[f"seqused_{side}"] = None
        calls = (
            lambda **given: tiled.varlen_attention(*batch.inputs, softmax_scale=SCALE, **given),
            lambda **given: tiled.varlen_gradients(*batch.inputs, *[None] * 4, softmax_scale=SCALE, **given),
        )
        for call in calls:
            with pytest.raises(ArgumentError, match=f"{name} must .*{holds}"):
                call(**lengths)
