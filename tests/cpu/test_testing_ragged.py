"""Ragged and windowed cases: what their inputs hold, and that every broken promise is found."""

from dataclasses import replace

import pytest
import torch

import flash_hopper
from flash_hopper.testing import run
from flash_hopper.testing.cases import Case
from flash_hopper.testing.inputs import make_inputs, used_rows
from flash_hopper.testing.ragged_cases import SIDES
from flash_hopper.testing.run import max_seqlen, run_case
from flash_hopper.testing.suites import sample, suite

SIZES = "dtype=bf16,b=4,h=4,hk=2,sq=30,sk=40,d=16,dv=16"
PACKED = Case.parse(f"{SIZES},causal=1,pack=qk,used=qk,lq=30.0.11.7,lk=25.16.0.40,slack=6")
PADDED = Case.parse(f"{SIZES},causal=1,used=qk,lq=30.0.11.7,lk=25.16.0.40")
NONE = {"packed": "none", "used": "none"}
WINDOW = Case.parse(f"{SIZES},left=6,right=4")
CHUNK = Case.parse(f"{SIZES},chunk=16")


def back(case):
    return replace(case, direction="backward", give_out=False, dlse="bhs")


@pytest.mark.parametrize("case", sample(suite("ragged-smoke"), 60), ids=str)
def test_the_public_functions_pass_on_the_cpu(case):
    result = run_case(case, repeat=2)
    assert result.passed, result.message
    assert result.worst_ratio < 1


def test_the_ragged_suite_passes_on_the_cpu_where_it_is_small():
    def is_small(case):
        scores = sum(n * m for n, m in zip(case.side("q").lengths, case.side("k").lengths, strict=True))
        return case.heads * scores * (case.d + case.dv) < 1e7 and case.batch < 100

    small = [case for case in suite("ragged") if is_small(case)]
    assert len(small) > 700
    failures = [f"{r.case}: {r.message}" for r in map(run_case, sample(small, 120)) if not r.passed]
    assert not failures, failures[:5]


@pytest.mark.parametrize("case", [back(replace(PACKED, **(NONE | side))) for side in SIDES], ids=str)
def test_rows_that_no_sequence_uses_hold_nan_in_every_input_and_lengths_lie_among_wild_numbers(case):
    inputs = make_inputs(case)
    for name, side in (("q", "q"), ("dout", "q"), ("k", "k"), ("v", "k")):
        x = getattr(inputs, name)
        x = x[None] if x.dim() == 3 else x
        is_used = torch.zeros(x.shape[:2], dtype=torch.bool)
        is_used[used_rows(case.side(side))] = True
        assert (x.isnan().all(dim=(2, 3)) == ~is_used).all()
        assert int(is_used.sum()) == sum(case.side(side).lengths)
    dlse = inputs.dlse[None] if inputs.dlse.dim() == 2 else inputs.dlse
    assert int(dlse.isnan().sum()) == case.heads * (dlse.shape[0] * dlse.shape[2] - sum(case.lengths("q")))
    before = inputs.snapshot()
    for name, values in case.length_tensors().items():
        assert tuple(inputs.lengths[name].tolist()) == values
        assert inputs.lengths[name].dtype == torch.int32
        assert inputs.lengths[name].is_contiguous()
        assert int((inputs.buffers[name] == 0x7FE5E5E5).sum()) == 128
        inputs.lengths[name][0] += 1
        assert inputs.changed(before) == name
        inputs.lengths[name][0] -= 1


def test_structured_values_follow_the_sequences():
    """The logits of a rising sequence rise from its own first key on, and a one-hot row finds its key among its own."""
    case = replace(PACKED, values="rising", lengths_q="30.30.30.30", lengths_k="40.40.40.40", dtype=PACKED.dtype)
    inputs = make_inputs(case)
    starts = case.side("k").offsets[:-1]
    first = make_inputs(replace(case, values="onehot"))
    for b, (start_q, start_k) in enumerate(zip(case.side("q").offsets[:-1], starts, strict=True)):
        q, k = inputs.q[start_q : start_q + 30, 0].float(), inputs.k[start_k : start_k + 40, 0].float()
        logits = (q @ k.T / 4).mean(dim=0)
        assert logits[-10:].mean() - logits[:10].mean() > 5, b
        q, k = first.q[start_q : start_q + 30, 0].float(), first.k[start_k : start_k + 40, 0].float()
        top = (q @ k.T / 4).amax(dim=1)
        assert (top > 35).all()


def test_a_hint_is_given_as_its_word_says():
    given = {
        hint: max_seqlen(replace(PACKED, hint=hint), "k", torch.device("cpu")) for hint in ("exact", "loose", "none")
    }
    assert given == {"exact": 40, "loose": 85, "none": None}
    assert type(max_seqlen(replace(PACKED, hint="numpy"), "q", torch.device("cpu"))).__name__ == "int64"
    for hint in ("host", "device"):
        tensor = max_seqlen(replace(PACKED, hint=hint), "q", torch.device("cpu"))
        assert (tensor.dim(), tensor.item()) == (0, 30)


# ---- promises that are broken ----------------------------------------------------------------------------------


def right(*arguments, **options):
    return flash_hopper.flash_attn_varlen_func(*arguments, **options)


def unused_out_left_as_it_was(*arguments, out, **options):
    before = out.clone()
    result = right(*arguments, out=out, **options)
    out[-1] = before[-1]  # behind the last sequence
    return result


def unused_lse_zero(*arguments, **options):
    out, lse = right(*arguments, **options)
    lse[..., -1] = 0.0
    return out, lse


def used_lengths_ignored(q, k, v, cu_q, cu_k, *rest, seqused_q, seqused_k, **options):
    """The space of a sequence taken for its length; NaN made harmless so that only lengths are wrong."""
    return right(q.nan_to_num(), k.nan_to_num(), v.nan_to_num(), cu_q, cu_k, *rest, **options)


def one_key_too_many(q, k, v, cu_q, cu_k, *rest, seqused_k, **options):
    return right(
        q, k.nan_to_num(), v.nan_to_num(), cu_q, cu_k, *rest, seqused_k=(seqused_k + 1).clamp_max(40), **options
    )


def next_sequence_read(q, k, v, cu_q, cu_k, *rest, **options):
    return right(q, k, v, cu_q, (cu_k + 1).clamp_max(int(cu_k[-1])) * (cu_k > 0), *rest, **options)


def aligned_by_the_padded_size(q, k, v, cu_q, cu_k, max_q, max_k, *, seqused_q, seqused_k, causal, **options):
    """Top-left where used lengths of queries are meant: row i sees keys up to i + 10."""
    return right(
        q, k, v, cu_q, cu_k, max_q, max_k, seqused_q=seqused_q, seqused_k=seqused_k, window_size=(None, 3), **options
    )


def not_written_for_empty_keys(q, k, v, cu_q, cu_k, *rest, **options):
    out, lse = right(q, k, v, cu_q, cu_k, *rest, **options)
    fresh = torch.empty_like(lse)
    fresh[lse > -torch.inf] = lse[lse > -torch.inf]
    return out, fresh


def lse_of_a_padded_batch(*arguments, **options):
    out, lse = right(*arguments, **options)
    return out, lse[None]


def lengths_changed(q, k, v, cu_q, *rest, **options):
    result = right(q, k, v, cu_q, *rest, **options)
    cu_q[0] = 1
    return result


@pytest.mark.parametrize(
    ("case", "function", "told"),
    [
        (PACKED, unused_out_left_as_it_was, "out["),
        (PACKED, unused_lse_zero, "lse["),
        (PADDED, unused_lse_zero, "lse["),
        (replace(PACKED, give_out=False), used_lengths_ignored, "elements are wrong"),
        (replace(PADDED, give_out=False), one_key_too_many, "elements are wrong"),
        (replace(PACKED, used="none", slack=0), next_sequence_read, "elements are wrong"),
        (PADDED, aligned_by_the_padded_size, "elements are wrong"),
        (PACKED, aligned_by_the_padded_size, "elements are wrong"),
        (PACKED, not_written_for_empty_keys, "lse["),
        (PACKED, lse_of_a_padded_batch, "lse is"),
        (PACKED, lengths_changed, "the memory of cu_seqlens_q was changed"),
    ],
)
def test_a_broken_promise_of_a_ragged_call_is_found(case, function, told):
    assert run_case(case).passed
    result = run_case(case, function=function)
    assert not result.passed
    assert told in result.message


def test_the_accumulate_suite_passes_on_the_cpu():
    failures = [f"{r.case}: {r.message}" for r in map(run_case, sample(suite("accumulate"), 30)) if not r.passed]
    assert not failures, failures[:5]


def replaced(gradients):
    """New buffers in place of the given ones."""
    return tuple(None if x is None else x.clone() for x in gradients)


def beside_written(gradients):
    for x in gradients:
        if x is not None:
            x.as_strided((1,), (1,), x.storage_offset() + x.shape[-1]).fill_(0.0)
    return gradients


def added_twice(gradients):
    for x in gradients:
        if x is not None:
            x.mul_(2)
    return gradients


@pytest.mark.parametrize(
    ("change", "told"), [(replaced, "not the given buffers"), (beside_written, "outside the view"), (added_twice, "d")]
)
def test_a_broken_promise_of_added_gradients_is_found(monkeypatch, change, told):
    case = replace(back(WINDOW), into="holes")
    assert run_case(case).passed
    right_one = flash_hopper.flash_attn_backward_func
    monkeypatch.setattr(run, "flash_attn_backward_func", lambda *a, **o: change(right_one(*a, **o)))
    result = run_case(case)
    assert not result.passed
    assert told in result.message


class Through(torch.autograd.Function):
    """x, whose gradient is changed on its way back."""

    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.change(grad.clone()), None


def with_unused(value, index):
    """One unused row of a gradient holds something."""

    def change(grad):
        grad[index] = value
        return grad

    return change


@pytest.mark.parametrize("case", [back(PACKED), back(PADDED)], ids=["packed", "padded"])
@pytest.mark.parametrize("value", [float("nan"), 1e-6])
def test_a_gradient_of_an_unused_row_that_is_not_zero_is_found(case, value):
    for operand, at in (("q", 0), ("k", 1), ("v", 2)):
        row = -1 if case.packed != "none" else (1, -1)

        def function(*arguments, at=at, row=row, **options):
            changed = list(arguments)
            changed[at] = Through.apply(arguments[at], with_unused(value, row))
            return right(*changed, **options)

        result = run_case(case, function=function)
        assert not result.passed
        assert f"d{operand}[" in result.message


def other_mask(**changed):
    def function(q, k, v, scale, **options):
        return flash_hopper.flash_attn_func(q, k, v, scale, **(options | changed))

    return function


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("case", "changed"),
    [
        (WINDOW, {"window_size": (5, 4)}),
        (WINDOW, {"window_size": (7, 4)}),
        (WINDOW, {"window_size": (6, 3)}),
        (WINDOW, {"window_size": (6, 5)}),
        (WINDOW, {"window_size": (6, None)}),
        (WINDOW, {"causal": True}),
        (CHUNK, {"attention_chunk": 17}),
        (CHUNK, {"attention_chunk": 8}),
        (CHUNK, {"attention_chunk": 0}),
    ],
)
def test_a_mask_that_is_off_by_one_is_found(case, changed, backward):
    case = back(case) if backward else case
    assert run_case(case).passed
    assert not run_case(case, function=other_mask(**changed)).passed
