"""Cases: text and back, and layouts that sizes do not allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.features import Feature
from flash_hopper.testing.cases import DLSES, DOUTS, LAYOUTS, VALUES, Case, case_of

SIZE = st.integers(0, 2**40)
GENERAL_LAYOUTS = sorted(set(LAYOUTS) - {"packed", "size1"})


def some_of(letters):
    return st.sets(st.sampled_from(letters), min_size=1).map(
        lambda chosen: "".join(letter for letter in letters if letter in chosen)
    )


FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(DType),
        **dict.fromkeys(("batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "d", "dv"), SIZE),
        "causal": st.booleans(),
        "scale": st.none() | st.floats(allow_nan=False),
        "layout": st.sampled_from(GENERAL_LAYOUTS),
        "strided": some_of("qkvo"),
        "values": st.sampled_from(sorted(VALUES)),
        "deterministic": st.booleans(),
        "seed": st.integers(0, 2**62),
    }
)
FORWARD = st.builds(
    lambda fields, return_lse, give_out: Case(**fields, return_lse=return_lse, give_out=give_out),
    FIELDS,
    return_lse=st.booleans(),
    give_out=st.booleans(),
)
BACKWARD = st.builds(
    lambda fields, dout, dlse, grads: Case(
        **fields,
        direction="backward",
        give_out=False,
        dout=dout,
        dlse="bhs" if dout == dlse == "none" else dlse,
        grads=grads,
    ),
    FIELDS,
    dout=st.sampled_from(sorted(DOUTS)),
    dlse=st.sampled_from(sorted(DLSES)),
    grads=some_of("qkv"),
)
CASES = FORWARD | BACKWARD
CASE = Case(DType.BF16, 2, 4, 2, 10, 20, 64, 64)
BACK = f"{CASE},dir=backward,out=0"


@given(CASES)
def test_text_gives_the_case_back(case):
    assert Case.parse(str(case)) == case
    assert " " not in str(case)


@given(CASES, CASES)
def test_different_cases_have_different_texts(one, other):
    assert (str(one) == str(other)) == (one == other)


def test_text_shows_all_sizes_and_what_is_unusual():
    assert str(CASE) == "dtype=bf16,b=2,h=4,hk=2,sq=10,sk=20,d=64,dv=64"
    assert Case.parse(f" {CASE}, causal=1,scale=-0.5 ") == Case(
        DType.BF16, 2, 4, 2, 10, 20, 64, 64, causal=True, scale=-0.5
    )
    backward = Case.parse(f"{BACK},det=1,grads=qv,do=expand_all,dlse=bsh")
    assert (backward.is_backward, backward.deterministic, backward.grads) == (True, True, "qv")
    assert (backward.dout, backward.dlse) == ("expand_all", "bsh")
    assert str(backward) == f"{CASE},out=0,dir=backward,det=1,grads=qv,do=expand_all,dlse=bsh"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "cannot read"),
        ("dtype=bf16", "lacks b, h, hk, sq, sk, d, dv"),
        (f"{CASE},colour=red", "colour=red"),
        (f"{CASE},b=3", "b=3"),
        (f"{CASE},causal", "causal"),
        (f"{CASE},causal=yes", "causal='yes'"),
        (f"{CASE},scale=big", "scale='big'"),
        (f"{CASE},seed=1.5", "seed='1.5'"),
        (f"{CASE},layout=diagonal", "layout"),
        (f"{CASE},values=nice", "values"),
        (f"{CASE},of=x", "strided"),
        (f"{CASE},of=kq", "strided"),
        (str(CASE).replace("bf16", "int8"), "dtype='int8'"),
        (f"{CASE},dir=sideways", "direction"),
        (f"{CASE},det=maybe", "det='maybe'"),
        (f"{BACK},grads=", "grads"),
        (f"{BACK},grads=vq", "grads"),
        (f"{BACK},grads=qo", "grads"),
        (f"{BACK},do=size1", "dout"),
        (f"{BACK},dlse=sbh", "dlse"),
    ],
)
def test_what_cannot_be_read_is_named(text, named):
    with pytest.raises(ArgumentError, match=named):
        Case.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        f"{CASE},layout=packed",  # lengths differ
        f"{CASE},layout=packed,of=k",
        f"{CASE},layout=packed,of=o",
        f"{CASE},layout=size1",  # nothing has size 1
    ],
)
def test_a_layout_that_the_sizes_do_not_allow_is_refused(text):
    with pytest.raises(ArgumentError, match="layout"):
        Case.parse(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"{CASE},grads=q", "direction backward"),
        (f"{CASE},do=bhsd", "direction backward"),
        (f"{CASE},dlse=bhs", "direction backward"),
        (f"{CASE},dir=backward", "give_out"),
        (f"{BACK},lse=0,dlse=bhs", "return_lse"),
        (f"{BACK},do=none", "one of dout and dlse"),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused(text, named):
    with pytest.raises(ArgumentError, match=named):
        Case.parse(text)


def test_a_case_of_some_sizes_is_a_forward_case():
    assert case_of((64, 48), (10, 20), True, batch=2, heads=(4, 2)) == Case(
        DType.BF16, 2, 4, 2, 10, 20, 64, 48, causal=True
    )
    assert case_of(64, (10, 20), batch=2, heads=(4, 2), dtype=DType.BF16) == CASE


def test_the_problem_of_a_case_is_checked_like_a_call():
    problem = Case.parse(f"{CASE},causal=1,scale=-2.0").problem()
    assert (problem.heads, problem.heads_k, problem.softmax_scale, problem.causal) == (4, 2, -2.0, True)
    assert Feature.LSE in Case.parse(f"{BACK},lse=0").problem().features  # the backward reads it
    assert Feature.DETERMINISTIC in Case.parse(f"{BACK},det=1").problem().features
    with pytest.raises(ArgumentError, match="head_dim"):
        Case.parse(str(CASE).replace("dv=64", "dv=65")).problem()
    with pytest.raises(ArgumentError, match="heads"):
        Case.parse(str(CASE).replace("hk=2", "hk=3")).problem()
