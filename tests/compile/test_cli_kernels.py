"""The commands `inspect`, `compile` and `cache` on the real kernels."""

import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flash_hopper import settings
from flash_hopper.cli import compile as compile_command
from flash_hopper.cli.main import app
from flash_hopper.compile import sass
from flash_hopper.compile.disk import OBJECT, DiskCache
from flash_hopper.compile.packfile import open_pack
from flash_hopper.compile.presets import PRESETS, forward_plans, preset_plans
from flash_hopper.compile.store import KernelStore
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import ArgumentError, CacheError, FlashHopperError, MissingDependencyError
from flash_hopper.testing.suites import plans_of, suite

(PLAN,) = forward_plans([(32, 32)], dtypes=(DType.BF16,), mask=("full",), lse=(False,))[:1]


def run(*arguments: str) -> str:
    """The output of a command that succeeds; an error of the package is raised as it is."""
    result = CliRunner().invoke(app, arguments)
    if isinstance(result.exception, FlashHopperError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A cache that holds the one plan."""
    folder = tmp_path_factory.mktemp("filled") / "cache"
    KernelStore(folder).ensure(PLAN)
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch) -> DiskCache:
    monkeypatch.setenv(settings.CACHE, str(tmp_path / "cache"))
    return DiskCache(tmp_path / "cache")


@pytest.fixture
def one_plan(monkeypatch) -> None:
    """`--preset paper` means one small kernel, so that these tests are about the commands."""
    monkeypatch.setattr("flash_hopper.compile.presets.preset_plans", lambda name: [PLAN])


def test_compile_fills_the_cache_which_can_be_listed_verified_and_cleared(cache, one_plan):
    assert f"1 kernels in {cache.folder}" in run("compile", "--preset", "paper", "--jobs", "1")
    listing = run("cache", "list")
    assert re.search(rf"{PLAN.name} .* yes", listing) and "1 kernels, " in listing
    assert "1 kernels intact, 0 damaged" in run("cache", "verify")
    (stem,) = cache.stems()
    cache.path(stem, OBJECT).write_bytes(b"damaged")
    damaged = CliRunner().invoke(app, ["cache", "verify"])
    assert damaged.exit_code == 1 and stem in damaged.output and "0 kernels intact, 1 damaged" in damaged.output
    assert "0 kernels deleted" in run("cache", "clear", "--old")
    assert "1 kernels deleted" in run("cache", "clear")
    assert cache.stems() == [] and "0 kernels" in run("cache", "list")


def test_clearing_old_kernels_keeps_those_of_the_present_sources(cache, filled):
    shutil.copytree(filled, cache.folder)
    (current,) = cache.stems()
    for suffix in (".o", ".so", ".json"):
        cache.path("forward_old-0123", suffix).write_bytes(b"")
    assert "1 kernels deleted" in run("cache", "clear", "--old")
    assert cache.stems() == [current]


def test_compile_with_out_writes_a_pack_that_holds_the_plans(cache, filled, one_plan, tmp_path):
    shutil.copytree(filled, cache.folder)
    out = tmp_path / "kernels.so"
    assert f"{settings.PACK}={out}" in run("compile", "--preset", "paper", "--out", str(out), "--jobs", "1").replace(
        "\n", ""
    )
    assert PLAN in open_pack(out)


def test_the_cache_commands_take_another_folder_and_want_one_if_the_cache_is_off(tmp_path, monkeypatch):
    monkeypatch.setenv(settings.CACHE, "off")
    for command in ("list", "verify", "clear"):
        with pytest.raises(CacheError, match=settings.CACHE):
            run("cache", command)
        assert str(tmp_path) in run("cache", command, "--folder", str(tmp_path)).replace("\n", "")


def test_compile_wants_to_know_what_to_compile_and_names_the_choices():
    with pytest.raises(ArgumentError, match=".*".join([*(f"--preset {name}" for name in PRESETS), "--suite"])):
        run("compile")
    with pytest.raises(ArgumentError, match=f"preset must be one of {', '.join(PRESETS)}, got 'fast'"):
        run("compile", "--preset", "fast")


def test_presets_are_nested_and_a_suite_stands_for_all_that_it_runs():
    common, everything = set(preset_plans("common")), set(preset_plans("all"))
    assert set(preset_plans("paper")) < common < everything
    assert compile_command._plans("paper", None) == preset_plans("paper")
    training = {plan.kind for plan in preset_plans("training")}
    assert training == {"forward", "preprocess", "backward_dq", "backward_dkdv", "postprocess"}
    varlen = preset_plans("varlen")
    assert {plan.kind for plan in varlen} == training
    assert len(varlen) == len({plan.name for plan in varlen})
    assert set(compile_command._plans(None, "forward")) == set(plans_of(suite("forward")))
    both = compile_command._plans("common", "forward")
    assert len(both) == len(set(both)) and set(both) == common | set(plans_of(suite("forward")))


SHAPES = [
    (),
    ("--head-dim", "64", "--causal"),
    ("--head-dim", "256", "--causal", "--lse", "--dtype", "fp16"),
    (
        "--head-dim",
        "192",
        "--head-dim-v",
        "128",
        "--heads",
        "32",
        "--heads-k",
        "8",
        "--seqlen-q",
        "1",
        "--seqlen-k",
        "8192",
    ),
    ("--head-dim", "8", "--seqlen-q", "17", "--batch", "1", "--heads", "1"),
    ("--seqlen-q", "8192", "--window-left", "1024", "--window-right", "0"),
    ("--head-dim", "64", "--seqlen-q", "8192", "--causal", "--chunk", "512", "--ragged"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=" ".join)
def test_inspect_shows_plan_roles_memory_pipelines_and_roofline_for_any_shape(shape):
    output = run("inspect", *shape)
    for title in (
        "tile",
        "warps and registers",
        "shared memory",
        "pipelines",
        "work",
        "roofline",
        "because",
        "bound by",
    ):
        assert title in output, title


def test_inspect_refuses_what_the_kernel_cannot_run_and_says_why():
    with pytest.raises(ArgumentError, match="head_dim"):
        run("inspect", "--head-dim", "100")
    with pytest.raises(ArgumentError, match="dtype must be one of bf16, fp16"):
        run("inspect", "--dtype", "fp64")
    with pytest.raises(ArgumentError, match="multiple"):
        run("inspect", "--heads", "8", "--heads-k", "3")


def test_inspect_counts_instructions_of_an_offline_compile():
    output = run("inspect", "--head-dim", "32", "--seqlen-q", "256", "--sass")
    for line in (
        r"HGMMA\.SS +\d+",
        r"HGMMA\.RS +\d+",
        r"UTMALDG +\d+",
        r"registers a thread at launch +\d+",
        "spills, stack +0 bytes",
    ):
        assert re.search(line, output), line


def test_without_a_disassembler_the_wheel_to_install_is_named_before_compiling(monkeypatch):
    monkeypatch.setattr(sass.shutil, "which", lambda *_, **__: None)
    with pytest.raises(MissingDependencyError, match="nvidia-cuda-nvdisasm"):
        run("inspect", "--sass")
