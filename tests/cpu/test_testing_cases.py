"""Cases: text and back, and layouts that sizes do not allow."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash_hopper.problem.dtypes import KERNEL_DTYPES, DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.problem.features import Feature
from flash_hopper.problem.mask import Mask
from flash_hopper.testing.cases import (
    DESCALES,
    DLSES,
    DOUTS,
    FP8_VALUES,
    HINTS,
    LAYOUTS,
    V_FORMS,
    VALUES,
    Case,
    case_of,
)
from flash_hopper.testing.lengths import WORDS as WORDS_OF_LENGTHS
from flash_hopper.testing.lengths import Side

SIZE = st.integers(0, 2**40)
GENERAL_LAYOUTS = sorted(set(LAYOUTS) - {"packed", "size1"})


def some_of(letters):
    return st.sets(st.sampled_from(letters), min_size=1).map(
        lambda chosen: "".join(letter for letter in letters if letter in chosen)
    )


FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([dtype for dtype in DType if dtype != DType.E4M3]),
        **dict.fromkeys(("batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "d", "dv"), SIZE),
        "causal": st.booleans(),
        "scale": st.none() | st.floats(allow_nan=False),
        "layout": st.sampled_from(GENERAL_LAYOUTS),
        "strided": some_of("qkvo"),
        "values": st.sampled_from(sorted(VALUES)),
        "deterministic": st.booleans(),
        "seed": st.integers(0, 2**62),
        "left": st.none() | st.integers(-1, 2**40),
        "right": st.none() | st.integers(-1, 2**40),
        "chunk": st.integers(0, 2**40),
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
FP8 = st.builds(
    lambda case, values, descales, v_form, out_dtype: replace(
        case,
        dtype=DType.E4M3,
        values=values,
        descales="".join(descales),
        v_form=v_form,
        out_dtype=out_dtype if case.give_out else DType.BF16,
        strided=case.strided.replace("v", "") or "q" if v_form == "transposed" else case.strided,
    ),
    FORWARD,
    st.sampled_from(sorted(VALUES | FP8_VALUES)),
    st.tuples(*[st.sampled_from(sorted(DESCALES))] * 3),
    st.sampled_from(sorted(V_FORMS)),
    st.sampled_from(KERNEL_DTYPES),
)
WORDS = sorted(set(WORDS_OF_LENGTHS) - {"same"})
RAGGED = st.builds(
    lambda case, sides, words, slack, hint, longest: replace(
        case,
        packed=sides[0],
        used=sides[1],
        lengths_q=words[0],
        lengths_k=words[1],
        batch=case.batch % 40,
        seqlen_q=longest,
        seqlen_k=longest,
        slack=slack,
        hint=hint,
        layout="bshd",
        dout="bshd",
        dlse=case.dlse if case.dlse != "none" or not case.is_backward else "bhs",
    ),
    FORWARD | BACKWARD | FP8,
    st.sampled_from([("qk", "none"), ("qk", "qk"), ("q", "k"), ("k", "q"), ("none", "qk"), ("qk", "k")]),
    st.tuples(
        st.builds(lambda word, seed: f"{word}{seed}", st.sampled_from(WORDS), st.just("") | st.integers(0, 99)),
        st.sampled_from([*WORDS, "same"]),
    ),
    st.integers(0, 9),
    st.sampled_from(sorted(HINTS)),
    st.integers(0, 300),
)
CASES = FORWARD | BACKWARD | FP8 | RAGGED.filter(lambda case: case.return_lse)
CASE = Case(DType.BF16, 2, 4, 2, 10, 20, 64, 64)
BACK = f"{CASE},dir=backward,out=0"
FP8_CASE = replace(CASE, dtype=DType.E4M3)


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
        (f"{CASE},left=few", "left='few'"),
        (f"{CASE},chunk=none", "chunk='none'"),
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
        (f"{CASE},into=zeros", "direction backward"),
        (f"{BACK},into=zeros,do=none,dlse=bhs", "needs dout"),
        (f"{BACK},into=holes,lse=0", "needs dout and return_lse"),
        (f"{BACK},into=somewhere", "into must be one of"),
        (f"{CASE},lq=random", "ragged call"),
        (f"{CASE},slack=3", "ragged call"),
        (f"{CASE},max=none", "ragged call"),
        (f"{CASE},desc=bbb", "dtype e4m3"),
        (f"{CASE},v=transposed", "dtype e4m3"),
        (f"{CASE},odt=fp16", "dtype e4m3"),
        (f"{CASE},values=ramp", "values must be one of"),
        (f"{FP8_CASE},dir=backward,out=0", "no backward"),
        (f"{FP8_CASE},layout=packed,of=kv", "no layout packed"),
        (f"{FP8_CASE},v=transposed,layout=bhsd", "leave v out"),
        (f"{FP8_CASE},odt=fp32", "out_dtype must be"),
        (f"{FP8_CASE},odt=fp16,out=0", "must be given"),
        (f"{FP8_CASE},desc=nn", "descales must be"),
        (f"{FP8_CASE},desc=nnx", "descales must be"),
        (f"{CASE},pack=q,lk=random", "k is a padded batch without used lengths"),
        (f"{CASE},used=k,lq=zipf", "q is a padded batch without used lengths"),
        (f"{CASE},pack=qk,lk=same", "equal longest lengths"),
        (f"{CASE},pack=qk,lq=often", "lengths must be"),
        (f"{CASE},pack=qk,lq=3", "2 numbers of at most 10"),
        (f"{CASE},pack=qk,lq=3.11", "2 numbers of at most 10"),
        (f"{CASE},pack=qk,lq=3.x", "numbers with dots"),
        (f"{CASE},pack=qk,slack=-1", "slack"),
        (f"{CASE},pack=qk,layout=expand_batch", "expand_batch"),
        (f"{CASE},pack=kq", "packed must be one of"),
        (f"{CASE},used=kq", "used must be one of"),
        (f"{CASE},pack=qk,max=soon", "hint must be one of"),
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


def test_a_case_says_its_mask_and_where_its_sequences_lie():
    assert Case.parse(f"{CASE},left=-1,right=4,chunk=9").mask == Mask(None, 4, 9)
    assert Case.parse(f"{CASE},left=3,right=4,causal=1").mask == Mask(3, 0)
    ragged = Case.parse(str(CASE).replace("b=2", "b=3") + ",pack=q,used=qk,lq=3.0.10,lk=20.0.1,slack=2")
    assert ragged.side("q") == Side((3, 0, 10), (0, 3, 4, 16), 18)
    assert ragged.side("k") == Side((20, 0, 1), None, 20)
    assert ragged.side("q").starts == ((0, 0), (0, 3), (0, 4))
    assert ragged.side("k").starts == ((0, 0), (1, 0), (2, 0))
    assert (ragged.shape("q"), ragged.shape("o")) == ((18, 4, 64), (18, 4, 64))
    assert ragged.shape("v") == (3, 20, 2, 64)
    assert ragged.lse_shape == (4, 18)
    assert ragged.length_tensors() == {
        "cu_seqlens_q": (0, 3, 4, 16), "seqused_q": (3, 0, 10), "seqused_k": (20, 0, 1)
    }  # fmt: skip
    problem = ragged.problem()
    assert problem.ragged.max_seqlen_q == 10
    assert {Feature.VARLEN, Feature.SEQUSED} <= problem.features
    assert replace(ragged, hint="none").problem().ragged.max_seqlen_q is None
    assert replace(ragged, hint="loose").problem().ragged.max_seqlen_q == 25
