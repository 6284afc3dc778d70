"""One kernel serves all sizes and strides: hundreds of shapes compile nothing new, and none gets another's kernel."""

import random

import pytest

from flash_hopper.compile import build, store
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError
from flash_hopper.testing.cases import LAYOUTS, Case
from flash_hopper.testing.run import run_case
from flash_hopper.testing.suites import plan_of

SHAPES = 300


def draw_case(draw: random.Random, number: int) -> Case:
    """Any sizes and strides with head dims that share two padded sizes."""
    while True:
        heads_k = draw.randint(1, 4)
        d = draw.choice((40, 48, 56, 64, 104, 112, 120, 128))
        try:
            return Case(
                dtype=DType.BF16,
                batch=draw.choice((1, 1, 2, 3, 17)),
                heads=heads_k * draw.randint(1, 5),
                heads_k=heads_k,
                seqlen_q=draw.choice((1, draw.randint(1, 200), draw.randint(1, 1200))),
                seqlen_k=draw.choice((1, draw.randint(1, 200), draw.randint(1, 1200))),
                d=d,
                dv=d,
                causal=draw.random() < 0.5,
                layout=draw.choice(tuple(LAYOUTS)),
                give_out=draw.random() < 0.5,
                seed=number,
            )
        except ArgumentError:
            continue  # a layout that these sizes do not allow


def test_hundreds_of_shapes_and_strides_compile_nothing_new(device, monkeypatch):
    draw = random.Random(7)
    cases = [draw_case(draw, i) for i in range(SHAPES)]
    plans = {plan_of(case) for case in cases} - {None}
    assert len(plans) <= 8, sorted(plan.name for plan in plans)
    for plan in plans:
        store.get_kernel(plan)

    def refuse(plan, *_):
        raise AssertionError(f"compiled while serving known plans: {plan.name}")

    monkeypatch.setattr(build, "build", refuse)
    loaded = dict(store.default_store()._kernels)
    failures = [f"{r.case}: {r.message}" for r in (run_case(case, device) for case in cases) if not r.passed]
    assert not failures, failures[:5]
    assert dict(store.default_store()._kernels) == loaded


@pytest.mark.parametrize("causal", [False, True])
def test_layouts_of_the_same_sizes_do_not_get_each_others_launch(causal, device):
    """A signature seen before is found by its shapes and strides; addresses change behind it."""
    draw = random.Random(3)
    sizes = {
        "dtype": DType.BF16,
        "batch": 2,
        "heads": 4,
        "heads_k": 4,
        "seqlen_q": 150,
        "seqlen_k": 150,
        "d": 64,
        "dv": 64,
    }
    cases = [
        Case(**sizes, causal=causal, layout=layout, strided=strided)
        for layout in sorted(set(LAYOUTS) - {"packed", "size1"})
        for strided in ("qkvo", "q", "k", "v", "kv")
    ]
    for _ in range(3):
        draw.shuffle(cases)
        failures = [f"{r.case}: {r.message}" for r in (run_case(case, device) for case in cases) if not r.passed]
        assert not failures, failures[:5]
