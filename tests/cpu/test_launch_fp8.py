"""Memory that an e4m3 launch takes for itself: what the kernel is told the address of is there until it is launched."""

import weakref
from types import SimpleNamespace

import pytest
import torch

from flash_hopper.launch import device, forward_fp8, quantize
from flash_hopper.launch.forward_fp8 import Descales, PreparedFp8
from flash_hopper.problem.fp8 import DescalePlaces

ONE = torch.ones(1)


@pytest.mark.parametrize("given", [(None, None, None), (ONE, None, ONE), (ONE, ONE, None), (ONE, ONE, ONE)])
def test_the_descale_that_stands_for_none_outlives_the_counter_and_the_launch(given, monkeypatch):
    """In a capture both are fresh: let go too soon, the first one's memory would be the other's."""
    made = []

    def unit(index):
        fresh = torch.ones(1)
        made.append((weakref.ref(fresh), fresh.data_ptr()))
        return fresh

    def alive():
        return all(reference() is not None for reference, _ in made)

    def kernel(q, k, v, out, lse, factors, *rest):
        assert alive()
        assert not any(isinstance(x, tuple) for x in (factors, *rest)), "converted in every call"
        used = {address for _, address in made} | {t.data_ptr() for t in given if t is not None}
        assert {factor[0] for factor in factors[:3]} <= used
        launched.append(factors)

    def counter(index):
        assert alive()
        return torch.zeros(1, dtype=torch.int32)

    launched = []
    monkeypatch.setattr(forward_fp8, "unit_descale", unit)
    monkeypatch.setattr(forward_fp8, "tile_counter", counter)
    prepared = PreparedFp8(
        kernel=kernel, reordering=None, problem=SimpleNamespace(batch=1), out_dtype=torch.bfloat16, out_shape=(1,),
        lse_shape=None, device=torch.device("cuda", 0), places=(DescalePlaces(),) * 3, scale=1.0, bounds=(None,) * 3,
        ctas=1, section=1, is_dynamic=True, ragged=None,
    )  # fmt: skip
    prepared._launch(ONE, ONE, ONE, ONE, None, Descales(*given), None)
    assert len(launched) == 1 and len(made) <= 1


@pytest.fixture
def streams(monkeypatch):
    """A GPU's current stream, and whether it is being captured, as the tests set them."""
    state = SimpleNamespace(current=0, is_capturing=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.is_capturing)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: state.current, raising=False)
    monkeypatch.setattr(device, "_lasting", lambda index, make: make())
    monkeypatch.setattr(device, "_kept", {})
    signs = quantize.hadamard_signs
    monkeypatch.setattr(quantize, "hadamard_signs", lambda d, seed, place: signs(d, seed, torch.device("cpu")))
    return state


def test_default_signs_are_made_once_a_stream_and_anew_in_each_capture(streams):
    """Made on one stream and read on another they might not be there yet."""
    gpu = torch.device("cuda", 0)
    first = quantize.default_signs(64, gpu)
    assert quantize.default_signs(64, gpu) is first
    assert quantize.default_signs(128, gpu) is not first
    streams.current = 7
    other = quantize.default_signs(64, gpu)
    assert other is not first and torch.equal(other, first)
    streams.is_capturing = True
    assert quantize.default_signs(64, gpu) is not quantize.default_signs(64, gpu)
