"""Cases: text and back, and layouts that sizes do not allow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.cases import LAYOUTS, VALUES, Case

SIZE = st.integers(0, 2**40)
OPERANDS = st.sets(st.sampled_from("qkvo"), min_size=1).map(lambda chosen: "".join(o for o in "qkvo" if o in chosen))
GENERAL_LAYOUTS = sorted(set(LAYOUTS) - {"packed", "size1"})
CASES = st.builds(
    Case,
    dtype=st.sampled_from(DType),
    batch=SIZE,
    heads=SIZE,
    heads_k=SIZE,
    seqlen_q=SIZE,
    seqlen_k=SIZE,
    d=SIZE,
    dv=SIZE,
    causal=st.booleans(),
    scale=st.none() | st.floats(allow_nan=False),
    return_lse=st.booleans(),
    layout=st.sampled_from(GENERAL_LAYOUTS),
    strided=OPERANDS,
    values=st.sampled_from(sorted(VALUES)),
    give_out=st.booleans(),
    seed=st.integers(0, 2**62),
)
CASE = Case(DType.BF16, 2, 4, 2, 10, 20, 64, 64)


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


def test_the_problem_of_a_case_is_checked_like_a_call():
    problem = Case.parse(f"{CASE},causal=1,scale=-2.0").problem()
    assert (problem.heads, problem.heads_k, problem.softmax_scale, problem.causal) == (4, 2, -2.0, True)
    with pytest.raises(ArgumentError, match="head_dim"):
        Case.parse(str(CASE).replace("dv=64", "dv=65")).problem()
    with pytest.raises(ArgumentError, match="heads"):
        Case.parse(str(CASE).replace("hk=2", "hk=3")).problem()
