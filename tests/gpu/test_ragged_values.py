"""Windows, chunks and ragged batches on the GPU: a sample of the suite, and what a case cannot say.

Other CTA counts, memory as a function of total rows, hints that change no result, refusals.
"""

from dataclasses import replace

import pytest
import torch
from backward_calls import assert_same
from device_memory import peak_of
from ragged_steps import of_case

import flash_hopper
from flash_hopper.testing.cases import HINTS, Case, case_of
from flash_hopper.testing.compare import compare
from flash_hopper.testing.inputs import make_inputs
from flash_hopper.testing.ragged_cases import SIDES, ragged_case
from flash_hopper.testing.ragged_targets import Call, expect_ragged, expect_ragged_gradients
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import sample, suite
from flash_hopper.testing.window_cases import as_backward

NAMES = ("out", "lse", "dq", "dk", "dv")
SLACK = 64 * 1024
CASES = [
    as_backward(replace(case_of(64, (700, 900), batch=2, heads=(8, 2)), left=200, right=100), dlse="bhs"),
    as_backward(replace(case_of(128, (900, 700), batch=2, heads=(4, 4)), left=150, causal=True)),
    as_backward(replace(case_of(128, (600, 800), batch=2, heads=(8, 2)), chunk=130)),
    as_backward(ragged_case(64, (500, 600), "causal", batch=9, heads=(8, 2), lengths_q="zipf"), dlse="bhs"),
    as_backward(ragged_case(128, (600, 500), "full", batch=8, heads=(4, 4), **SIDES[2])),
    as_backward(ragged_case(128, (600, 600), "local", 3, batch=40, heads=(8, 2), lengths_q="one_long")),
    as_backward(ragged_case(64, (20, 30), "full", batch=700, heads=(4, 2), lengths_q="tiny")),
    as_backward(ragged_case(256, (300, 400), "causal", batch=6, heads=(4, 2), **SIDES[7])),
]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
ragged_only = pytest.mark.parametrize("case", [case for case in CASES if case.is_ragged], ids=str)


@pytest.mark.parametrize("case", sample(suite("ragged"), 400), ids=str)
def test_the_ragged_suite_passes(case, device):
    result = run_case(case, device, repeat=2)
    assert result.passed, result.message


@pytest.mark.parametrize("deterministic", [False, True])
@every_case
def test_any_number_of_ctas_gives_the_same_results(case, deterministic, device):
    case = replace(case, deterministic=deterministic)
    inputs = make_inputs(case, device)
    want = of_case(case, inputs)
    assert run_case(case, device).passed
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for margin in (1, 7, sms // 2, sms - 3, sms - 1, 10 * sms):
        assert_same(of_case(case, inputs, sm_margin=margin), want, case)


@pytest.mark.parametrize("hint", HINTS)
@ragged_only
def test_a_hint_of_any_kind_and_a_wrong_one_give_right_results(case, hint, device):
    """max_seqlen chooses tiles; a value that is too small or absurdly large changes no result."""
    case = replace(case, hint=hint)
    inputs = make_inputs(case, device)
    call = Call(
        inputs.q, inputs.k, inputs.v, case.side("q"), case.side("k"), case.problem().softmax_scale, case.mask
    )  # fmt: skip
    wrong = [{"max_seqlen_q": q, "max_seqlen_k": k} for q, k in ((1, 1), (0, 0), (10**6, 3))] if hint == "exact" else []
    for options in ({}, *wrong):
        results = dict(zip(NAMES, of_case(case, inputs, **options), strict=True))
        expected = expect_ragged(call) | expect_ragged_gradients(call, results["out"], inputs.dout, inputs.dlse)
        for name, got in results.items():
            found = compare(name, got, *expected[name])
            assert found.passed, (options, found.message)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("d", [64, 128])
def test_memory_is_a_function_of_the_rows_in_all_and_not_of_how_they_are_divided(d, backward, deterministic, device):
    """Eight sequences of 1,000 rows, one of nearly all, and most of them empty: the same memory."""
    used = []
    for lengths in ("1000." * 7 + "1000", "1." * 7 + "7993", "0." * 6 + "4000.4000", "8000" + ".0" * 7):
        case = ragged_case(d, (8000, 8000), "causal", batch=8, heads=(4, 2), lengths_q=lengths, lengths_k=lengths)
        case = replace(case, hint="none", give_out=False)
        case = as_backward(case, deterministic=deterministic) if backward else case
        inputs = make_inputs(case, device)
        of_case(case, inputs)
        used.append(peak_of(device, lambda case=case, inputs=inputs: of_case(case, inputs))[1])
    assert max(used) - min(used) < SLACK, used


@pytest.mark.parametrize("backward", [False, True])
def test_memory_grows_with_the_rows_only_and_hardly_with_the_number_of_sequences(backward, device):
    """No padding to the longest sequence: 2,000 sequences of 8 rows need little more than 8 of 2,000."""
    used = []
    for batch, lengths in ((8, "equal"), (2000, "equal")):
        longest = 16_000 // batch
        case = ragged_case(64, (longest, longest), batch=batch, heads=(4, 4), lengths_q=lengths, lengths_k=lengths)
        case = replace(case, give_out=False)
        case = as_backward(case) if backward else case
        inputs = make_inputs(case, device)
        of_case(case, inputs)
        used.append(peak_of(device, lambda case=case, inputs=inputs: of_case(case, inputs))[1])
    # statistics and accumulators of a sequence may be padded to a tile: at most 256 rows of 4 heads
    padding = 4 * 256 * 2000 * 4 * (64 + 2) if backward else 0
    assert used[1] - used[0] < padding + 4 * SLACK, used


def test_a_refused_call_allocates_nothing(device):
    case = ragged_case(128, (300, 300), batch=4, heads=(4, 2))
    inputs = make_inputs(case, device)
    q, k, v = inputs.q, inputs.k, inputs.v
    cu_q, cu_k = inputs.lengths["cu_seqlens_q"], inputs.lengths["cu_seqlens_k"]
    varlen = flash_hopper.flash_attn_varlen_func
    refused = (
        (flash_hopper.ArgumentError, lambda: varlen(q, k, v, None, None, 1, 1)),
        (flash_hopper.ArgumentError, lambda: varlen(q, k, v, cu_q[:-1], cu_k, 1, 1)),
        (flash_hopper.ArgumentError, lambda: varlen(q, k, v, cu_q, cu_k, 1, 1, seqused_q=cu_q)),
        (flash_hopper.ArgumentError, lambda: varlen(q[None], k, v, cu_q, cu_k, 1, 1)),
        (flash_hopper.ArgumentError, lambda: varlen(q, k, v, cu_q, cu_k, -1, 1)),
        (flash_hopper.ArgumentError, lambda: varlen(q, k, v, cu_q, cu_k, 1, 1, window_size=(-2, 0))),
        (flash_hopper.ArgumentError, lambda: varlen(q, k, v, cu_q, cu_k, 1, 1, attention_chunk=-1)),
        (flash_hopper.DTypeError, lambda: varlen(q, k, v, cu_q.to(torch.int64), cu_k, 1, 1)),
        (flash_hopper.DeviceError, lambda: varlen(q, k, v, cu_q.cpu(), cu_k, 1, 1)),
        (flash_hopper.UnsupportedError, lambda: varlen(q, k, v, cu_q, cu_k, 1, 1, softcap=30.0)),
    )
    for error, call in refused:
        with pytest.raises(error):
            call()
    other = cu_q.to(torch.int64), cu_q.cpu()  # what the calls themselves make
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    for error, call in (*refused[:3], *refused[4:7], refused[-1]):
        with pytest.raises(error):
            call()
    for wrong in other:
        with pytest.raises(flash_hopper.FlashHopperError):
            varlen(q, k, v, wrong, cu_k, 1, 1)
    assert torch.cuda.max_memory_allocated(device) == before


def test_none_and_minus_one_leave_a_window_open(device):
    inputs = make_inputs(Case.parse("dtype=bf16,b=2,h=4,hk=2,sq=300,sk=400,d=64,dv=64"), device)
    q, k, v = inputs.q, inputs.k, inputs.v
    for one, other in (((None, 50), (-1, 50)), ((50, None), (50, -1)), ((None, None), (-1, -1))):
        results = [
            flash_hopper.flash_attn_func(q, k, v, window_size=window, return_lse=True) for window in (one, other)
        ]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
