"""Values of the e4m3 forward on the GPU, against float64 attention of what the codes stand for.

What is left is what the kernel does: rounding of weights (2.4 % where they are even), the tensor core's sums, and the output's
own rounding. Structured inputs show one of these alone; `verify --suite fp8` has the grid.
"""

import itertools

import pytest
import torch
from fp8_tensors import Coded, check, check_lse, coded, oracle, values_of

import flash_hopper
from flash_hopper.problem.mask import Mask
from flash_hopper.testing.fp8_cases import fp8_case
from flash_hopper.testing.run import run_case

FORMS = ("none", "one", "head", "block")
EVEN = 0.005  # of weights that are all the same, and values of one sign
NORM = 0.04


def normal(*shape, seed=0, device="cuda", scale=1.0):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device) * scale


def attend(q: Coded, k: Coded, v: Coded, mask=None, lengths=None, **options):
    """The call under test and its oracle; `mask`: (left, right) or none, as window_size has it."""
    left, right = mask or (None, None)
    scale = options.pop("softmax_scale", q.codes.shape[-1] ** -0.5)
    descales = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    want = oracle(q.real, k.real, v.real, softmax_scale=scale, mask=Mask(left, right), **(lengths or {}))
    options |= descales | {"window_size": (left, right), "return_lse": True}
    if lengths is None:
        out, lse = flash_hopper.flash_attn_func(q.codes, k.codes, values_of(v), scale, **options)
    else:
        given = [lengths[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
        out, lse = flash_hopper.flash_attn_varlen_func(
            q.codes, k.codes, values_of(v), *given, None, None, softmax_scale=scale, **options
        )
    return out, lse, want


def inputs(batch, seqlen_q, seqlen_k, heads, heads_k, d, dv=None, form="none", seed=0):
    q, k = normal(batch, seqlen_q, heads, d, seed=seed), normal(batch, seqlen_k, heads_k, d, seed=seed + 1)
    v = normal(batch, seqlen_k, heads_k, dv or d, seed=seed + 2)
    return coded(q, form, heads_k), coded(k, form), coded(v, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", [None, (None, 0), (100, 30)], ids=["full", "causal", "window"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_every_head_dim_mask_and_form_of_descales(d, mask, form, device):
    out, lse, want = attend(*inputs(2, 500, 700, 4, 2, d, form=form), mask=mask)
    check(out, want, NORM)
    check_lse(lse, want)


@pytest.mark.parametrize(
    "d, dv",
    [
        (16, 16),
        (32, 64),
        (80, 80),
        (96, 96),
        (112, 48),
        (160, 160),
        (192, 128),
        (192, 192),
        (208, 208),
        (240, 240),
        (64, 256),
    ],
)
def test_head_dims_between_tiles(d, dv, device):
    for mask in (None, (None, 0)):
        out, lse, want = attend(*inputs(1, 300, 400, 2, 1, d, dv), mask=mask)
        check(out, want, NORM)
        check_lse(lse, want)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_lengths_of_every_residue(d, device):
    for seqlen_q, seqlen_k in itertools.product((1, 63, 64, 65, 130, 193), (1, 16, 31, 127, 128, 129, 257)):
        for mask in (None, (None, 0)):
            out, lse, want = attend(*inputs(1, seqlen_q, seqlen_k, 2, 2, d, form="block"), mask=mask)
            check(out, want, NORM)
            check_lse(lse, want)


@pytest.mark.parametrize("seqlen_k", [128, 1024, 16_384, 65_536])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_values_of_one_sign_do_not_shrink_with_the_length(d, seqlen_k, device):
    q, k = normal(1, 128, 1, d, scale=1e-3), normal(1, seqlen_k, 1, d, seed=1)
    v = normal(1, seqlen_k, 1, d, seed=2).abs() + 0.5
    out, _, want = attend(*(coded(x, "none") for x in (q, k, v)))
    check(out, want, EVEN)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_fast_accumulation_is_right_for_few_keys_and_within_the_documented_loss(d, causal, device):
    """Values of mean 0 show nothing of it; of one sign, out is too small, by at most 1.6 % for 1k keys."""
    options = {"mask": (None, 0) if causal else None, "fast_accum": True}
    out, lse, want = attend(*inputs(2, 500, 700, 4, 2, d, form="head"), **options)
    check(out, want, NORM)
    check_lse(lse, want)
    q, k, v = inputs(1, 300, 1024, 2, 1, d)
    v = coded(v.real.abs().float() + 0.5, "none")
    out, _, want = attend(q, k, v, **options)
    loss = 1 - float((out.double() / want.out).mean())
    assert -0.003 < loss < 0.025


@pytest.mark.parametrize("d", [64, 128, 160, 192, 256])
def test_weights_that_all_round_the_same_way_do_not_change_the_mean(d, device):
    """All but one are 2 % below the largest, and round up to it: row sums must be of the rounded ones."""
    q, k = torch.zeros(1, 128, 1, d, device=device), torch.zeros(1, 1024, 1, d, device=device)
    q[..., 0] = 1.0
    k[:, 5, :, 0] = 1.0
    v = normal(1, 1024, 1, d, seed=2).abs() + 0.5
    out, _, want = attend(*(coded(x, "none") for x in (q, k, v)), softmax_scale=0.02)
    check(out, want, EVEN)


@pytest.mark.parametrize("form", ["one", "block"])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_reference_that_is_high_enough_stays_while_those_of_other_rows_move(d, form, device):
    """Odd rows grow by four powers of two with each block; even rows have the same score for all keys, of which none may be lost."""
    rows, blocks, step = 128, 32, 8.0
    q, k = torch.zeros(1, rows, 1, d, device=device), torch.zeros(1, 128 * blocks, 1, d, device=device)
    q[0, ::2, 0, 0] = torch.linspace(0.5, 40.0, rows // 2, device=device)
    q[0, 1::2, 0, 1] = step
    k[..., 0] = 1.75
    k[0, :, 0, 1] = step * (blocks - 1 - torch.arange(128 * blocks, device=device) // 128)
    v = normal(1, 128 * blocks, 1, d).abs() + 0.5
    scale = 4.0 / (step * step * 1.4427)
    out, lse, want = attend(*(coded(x, form) for x in (q, k, v)), softmax_scale=scale)
    check(out, want, NORM)
    check_lse(lse, want)


@pytest.mark.parametrize("form", FORMS)
def test_one_key_that_outweighs_all_others(form, device):
    q, k, v = normal(1, 256, 1, 128), normal(1, 1024, 1, 128, seed=1), normal(1, 1024, 1, 128, seed=2)
    for key in (0, 500, 1023):
        strong = k.clone()
        strong[:, key] = 20 * q.mean(1)
        out, lse, want = attend(*(coded(x, form) for x in (q, strong, v)), softmax_scale=1.0)
        check(out, want, NORM)
        check_lse(lse, want)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_rows_of_zeros_give_the_mean_of_the_values(d, device):
    q, k, v = torch.zeros(1, 200, 2, d, device=device), normal(1, 700, 2, d, seed=1), normal(1, 700, 2, d, seed=2) + 2
    for form in FORMS:
        out, lse, want = attend(*(coded(x, form) for x in (q, k, v)))
        check(out, want, EVEN)
        check_lse(lse, want, 1e-3)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_scores_of_any_sign_and_size(d, device):
    q, k, v = (
        coded(x, "head") for x in (normal(1, 200, 2, d), normal(1, 700, 2, d, seed=1), normal(1, 700, 2, d, seed=2))
    )
    for scale in (-0.1, 0.0, 1.0, -1.0):
        out, lse, want = attend(q, k, v, softmax_scale=scale)
        check(out, want, NORM)
        check_lse(lse, want)
    away = coded(normal(1, 700, 2, d, seed=1) - 3 * q.real.mean((0, 1)).float()[None, None], "block")
    out, lse, want = attend(q, away, v)
    check(out, want, NORM)


def test_extreme_descales_give_finite_numbers(device):
    q, k, v = normal(1, 200, 1, 128), normal(1, 700, 1, 128, seed=1), normal(1, 700, 1, 128, seed=2)
    sizes = 10.0 ** torch.arange(-15, 15, 5, device=device).repeat_interleave(128)[:700]
    for scaled_k, scaled_v in ((k, v * sizes[None, :, None, None]), (k, v * sizes.flip(0)[None, :, None, None])):
        out, lse, want = attend(coded(q, "block"), coded(scaled_k, "block"), coded(scaled_v, "block"))
        check(out, want, NORM)
        check_lse(lse, want)
    for factor in (1e-30, 1e30):
        out, lse, want = attend(coded(q, "block"), coded(k, "block"), coded(v * factor, "block"))
        check(out, want, NORM)
    out, _, _ = attend(coded(q * 1e15, "block"), coded(k * 1e15, "block"), coded(v, "block"))
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_packed_sequences(d, causal, form, device):
    lengths_q, lengths_k = [0, 1, 130, 64, 500, 3], [5, 128, 0, 300, 257, 129]
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths_q, lengths_k))
    extra = 10  # rows of no sequence
    q = coded(normal(int(cu_q[-1]) + extra, 4, d), form, 2, cu_q)
    k = coded(normal(int(cu_k[-1]) + extra, 2, d, seed=1), form, None, cu_k)
    v = coded(normal(int(cu_k[-1]) + extra, 2, d, seed=2), form, None, cu_k)
    lengths = {"cu_seqlens_q": cu_q.to(device), "cu_seqlens_k": cu_k.to(device)}
    out, lse, want = attend(q, k, v, mask=(None, 0) if causal else None, lengths=lengths)
    check(out, want, NORM)
    check_lse(lse, want)


def test_outputs_of_either_16_bit_type_and_of_any_strides(device):
    q, k, v = inputs(2, 300, 400, 2, 2, 128, form="head")
    factors = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    want = flash_hopper.flash_attn_func(q.codes, k.codes, values_of(v), **factors)
    assert want.dtype is torch.bfloat16
    for out in (
        torch.empty(2, 300, 2, 128, device=device, dtype=torch.float16),
        torch.empty(2, 2, 300, 128, device=device, dtype=torch.bfloat16).transpose(1, 2),
        torch.empty(2, 300, 2, 129, device=device, dtype=torch.bfloat16)[..., 1:],
    ):
        got = flash_hopper.flash_attn_func(q.codes, k.codes, values_of(v), **factors, out=out)
        assert got is out
        torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-3)


def assert_rows_are_as_transposed(
    q: Coded, k: Coded, v: Coded, values, rows=None, cu_seqlens=None, used=None, **options
):
    """v in rows gives the bits of `values`. rows: v as it is given, if not contiguous; cu_seqlens, used: of q and k."""
    scaled = {"q_descale": q.descale, "k_descale": k.descale, "v_descale": v.descale}
    options |= scaled | {"return_lse": True, "causal": True}
    results = []
    for given in (values, v.codes if rows is None else rows):
        if cu_seqlens is used is None:
            results.append(flash_hopper.flash_attn_func(q.codes, k.codes, given, **options))
            continue
        cu_q, cu_k = cu_seqlens or (None, None)
        lengths = {} if used is None else {"seqused_k": used}
        results.append(
            flash_hopper.flash_attn_varlen_func(q.codes, k.codes, given, cu_q, cu_k, None, None, **lengths, **options)
        )
    for name, want, got in zip(("out", "lse"), *results, strict=True):
        assert torch.isfinite(got[got != -torch.inf]).all(), name
        torch.testing.assert_close(got, want, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def unused_as_nan(codes, used, starts=None):
    """A copy of e4m3 rows in which those that no sequence uses are NaN; starts: of packed sequences."""
    found = codes.clone().view(torch.uint8)
    if starts is None:
        for b, n in enumerate(used):
            found[b, n:] = 0x7F
    else:
        mine = torch.zeros(codes.shape[0], dtype=torch.bool, device=codes.device)
        for start, n in zip(starts, used, strict=True):
            mine[start : start + n] = True
        found[~mine] = 0x7F
    return found.view(torch.float8_e4m3fn)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", range(16, 257, 16))
def test_rows_of_every_head_dim_are_attended_to_as_transposed_ones(d, form, device):
    for keys in (1, 127, 128, 389):
        q, k, v = inputs(2, 200, keys, 6, 2, 64, d, form=form)
        assert_rows_are_as_transposed(q, k, v, values_of(v))


@pytest.mark.parametrize("d", [64, 80, 128, 256])
def test_rows_of_every_length_are_attended_to_as_transposed_ones(d, device):
    for keys in (*range(1, 40), *range(120, 140), 255, 256, 257, 1000, 4099):
        q, k, v = inputs(1, 70, keys, 2, 1, d, form="block")
        assert_rows_are_as_transposed(q, k, v, values_of(v))


@pytest.mark.parametrize("change", ["heads", "slice", "misaligned", "misstride", "expanded", "kv"])
def test_rows_of_any_strides_are_attended_to_as_transposed_ones(change, device):
    q, k, v = inputs(2, 150, 300, 4, 2, 64)
    v = Coded(v.codes[:, :, :1].expand(2, 300, 2, 64), None, v.real) if change == "expanded" else v
    memory = torch.full((2 * 300 * 2 * 160 + 8,), 0x7F, dtype=torch.uint8, device=device)
    strides, offset = {
        "heads": ((300 * 2 * 64, 64, 300 * 64, 1), 0),
        "slice": ((300 * 2 * 160, 320, 160, 1), 64),
        "misaligned": ((300 * 2 * 64, 128, 64, 1), 1),
        "misstride": ((300 * 2 * 72, 144, 72, 1), 0),
        "expanded": ((300 * 64, 64, 0, 1), 0),
        "kv": ((300 * 4 * 64, 256, 64, 1), 128),
    }[change]
    rows = torch.as_strided(memory, (2, 300, 2, 64), strides, offset)
    target = rows[:, :, :1] if change == "expanded" else rows
    target.copy_(v.codes.view(torch.uint8)[:, :, : target.shape[2]])
    contiguous = Coded(v.codes.contiguous(), None, v.real)
    assert_rows_are_as_transposed(q, k, contiguous, values_of(contiguous), rows.view(torch.float8_e4m3fn))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("d", [48, 64, 128, 256])
@pytest.mark.parametrize("uses", ["all", "some"])
def test_packed_rows_are_attended_to_as_transposed_ones_and_others_may_hold_anything(uses, d, form, device):
    lengths = [0, 5, 128, 0, 300, 257, 129, 0]
    cu_k = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    cu_q = torch.arange(len(lengths) + 1, dtype=torch.int32) * 40
    q = coded(normal(int(cu_q[-1]), 4, 64), form, 2, cu_q)
    k = coded(normal(int(cu_k[-1]) + 70, 2, 64, seed=1), form, None, cu_k)
    v = coded(normal(int(cu_k[-1]) + 70, 2, d, seed=2), form, None, cu_k)
    used = [n if uses == "all" else n * 3 // 4 for n in lengths]
    rows = unused_as_nan(v.codes, used, cu_k[:-1].tolist())
    zeros = rows.view(torch.uint8).masked_fill(rows.view(torch.uint8) == 0x7F, 0).view(torch.float8_e4m3fn)
    clean = Coded(zeros, v.descale, v.real, cu_k)
    given = (cu_q.to(device), cu_k.to(device))
    seqused = None if uses == "all" else torch.tensor(used, dtype=torch.int32, device=device)
    assert_rows_are_as_transposed(q, k, clean, values_of(clean), rows, given, seqused)


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_padded_batches_are_attended_to_as_transposed_ones_and_others_may_hold_anything(form, device):
    used = [0, 128, 131, 300, 1]
    q, k, v = inputs(5, 100, 300, 4, 2, 128, form=form)
    rows = unused_as_nan(v.codes, used)
    zeros = rows.view(torch.uint8).masked_fill(rows.view(torch.uint8) == 0x7F, 0).view(torch.float8_e4m3fn)
    clean = Coded(zeros, v.descale, v.real)
    seqused = torch.tensor(used, dtype=torch.int32, device=device)
    assert_rows_are_as_transposed(q, k, clean, values_of(clean), rows, used=seqused)


def test_many_packed_sequences_and_many_blocks_are_reordered_by_few_ctas(device):
    cu = torch.arange(0, 7 * 901, 7, dtype=torch.int32)
    q, k, v = (coded(normal(int(cu[-1]), 2, 64, seed=i), "none", None, cu) for i in range(3))
    assert_rows_are_as_transposed(q, k, v, values_of(v), cu_seqlens=(cu.to(device), cu.to(device)))
    q, k, v = inputs(4, 64, 8192, 8, 8, 128)
    assert_rows_are_as_transposed(q, k, v, values_of(v))


def test_a_captured_call_reorders_the_rows_that_there_are_at_replay(device):
    q, k, v = inputs(2, 100, 300, 4, 2, 128)
    flash_hopper.flash_attn_func(q.codes, k.codes, v.codes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_hopper.flash_attn_func(q.codes, k.codes, v.codes)
    v.codes.view(torch.uint8).bitwise_xor_(0x80)
    graph.replay()
    torch.cuda.synchronize()
    want = flash_hopper.flash_attn_func(q.codes, k.codes, values_of(v))
    assert torch.equal(out, want)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_a_captured_causal_call_without_descales_gives_what_an_eager_one_gives(d, device):
    """The scheduler's counter and the descale that stands for none are both allocated in the capture."""
    q, k, v = inputs(2, 500, 700, 4, 2, d)
    values = values_of(v)
    want = flash_hopper.flash_attn_func(q.codes, k.codes, values, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash_hopper.flash_attn_func(q.codes, k.codes, values, causal=True)
    for _ in range(2):
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, want)


def test_calls_with_rows_behind_each_other_have_memory_of_their_own(device):
    """Each call's workspace goes back to the allocator while the call runs."""
    calls = [inputs(2, 256, 1024, 8, 4, 128, seed=3 * i) for i in range(4)]
    wants = [flash_hopper.flash_attn_func(q.codes, k.codes, values_of(v)) for q, k, v in calls]
    torch.cuda.synchronize()
    for _ in range(20):
        outs = [flash_hopper.flash_attn_func(q.codes, k.codes, v.codes) for q, k, v in calls]
        assert all(torch.equal(out, want) for out, want in zip(outs, wants, strict=True))


REPEATED = [
    fp8_case(64, (1000, 1100), batch=4, heads=(8, 8), return_lse=False),
    fp8_case(64, (4300, 4300), "causal", heads=(8, 2)),
    fp8_case(64, (8500, 8500), "causal", heads=(2, 2), descales="111"),
    fp8_case(128, (1300, 1900), batch=2, heads=(16, 4)),
    fp8_case(128, (2500, 2500), "causal", heads=(16, 4), descales="hhh", v_form="rows"),
    fp8_case(256, (1100, 1000), "causal", batch=2, heads=(8, 2)),
    fp8_case(
        128, (700, 900), left=100, right=30, batch=9, heads=(8, 2), packed="qk", lengths_q="random", lengths_k="random"
    ),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_a_thousand_calls_give_the_same_bits(case, device):
    result = run_case(case, device, repeat=1000)
    assert result.passed, result.message


def test_what_comes_later_is_refused_by_name(device):
    q, k, v = inputs(1, 128, 128, 1, 1, 64)
    values = values_of(v)
    for options, name in (
        ({"softcap": 30.0}, "softcap"),
        ({"num_splits": 2}, "num_splits"),
        ({"sinks": q.real}, "sinks"),
    ):
        with pytest.raises(flash_hopper.UnsupportedError, match=name):
            flash_hopper.flash_attn_func(q.codes, k.codes, values, **options)
