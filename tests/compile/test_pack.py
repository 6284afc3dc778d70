"""Packs, for real: built here, served in processes that have neither the DSL nor a compiler, refused where they do not fit."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from launch_recorder import gpu_tensor
from standin_kernels import ScalePlan, trace

import flash_hopper
from flash_hopper import settings
from flash_hopper.compile import pack as pack_module
from flash_hopper.compile import parallel, store
from flash_hopper.compile.link import require_linker
from flash_hopper.compile.pack import build_pack
from flash_hopper.compile.packfile import open_pack
from flash_hopper.compile.parallel import compile_into, fill_cache, fill_cache_as_far_as_possible
from flash_hopper.compile.store import KernelStore
from flash_hopper.compile.target import toolkit
from flash_hopper.problem.errors import ArgumentError, CacheError, CompileError, MissingDependencyError

FACTORS = (2, 3, 5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pack")


@pytest.fixture(scope="module")
def log(folder) -> Path:
    path = folder / "compiles.log"
    path.touch()  # whichever test comes first in this process
    return path


@pytest.fixture(scope="module")
def plans(log) -> list[ScalePlan]:
    return [ScalePlan(n, log=str(log)) for n in FACTORS]


@pytest.fixture(scope="module")
def progress() -> list:
    return []


@pytest.fixture(scope="module")
def pack(folder, plans, progress):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(settings.CACHE, str(folder / "cache"))
        return build_pack(
            plans, folder / "new" / "pack.so", jobs=2, progress=lambda *call: progress.append(call), trace=trace
        )


def test_every_plan_is_compiled_once_and_progress_is_told_of_each(pack, plans, log, progress):
    assert sorted(line.split()[1] for line in log.read_text().splitlines()) == sorted(p.name for p in plans)
    assert sorted(name for name, _, _ in progress) == sorted(p.name for p in plans)
    assert [(done, total) for _, done, total in progress] == [(n, len(plans)) for n in range(1, len(plans) + 1)]
    assert pack.names == sorted(p.name for p in plans) and pack.manifest.flavour == toolkit().flavour


def test_several_worker_processes_share_the_work(pack, log):
    assert str(os.getpid()) not in {line.split()[0] for line in log.read_text().splitlines()}


def test_a_second_pack_is_linked_from_the_objects_on_disk(pack, plans, folder, log, monkeypatch):
    monkeypatch.setenv(settings.CACHE, str(folder / "cache"))
    before = log.read_text()
    again = build_pack([*plans, *plans], folder / "again.so", jobs=1, trace=trace)
    assert log.read_text() == before and again.manifest.kernels == pack.manifest.kernels


def test_a_loaded_pack_is_asked_before_the_disk_cache(pack, plans, log, tmp_path):
    before = log.read_text()
    kernels = KernelStore(tmp_path / "empty", [open_pack(pack.path)], trace)
    for plan in plans:
        with pytest.raises((TypeError, ValueError), match="ismatched"):
            kernels.get(plan)(gpu_tensor((8,), "fp32"), gpu_tensor((9,), "fp32"))
    assert log.read_text() == before and not (tmp_path / "empty").exists()
    kernels.get(ScalePlan(7, log=str(log)))
    assert log.read_text() != before


# Like a machine with torch and tvm-ffi alone: no DSL installed, no compiler on the path, nothing to write to.
ELSEWHERE = """
import importlib.metadata, sys
class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise ModuleNotFoundError("No module named " + name, name=name)
sys.meta_path.insert(0, NotInstalled())
version = importlib.metadata.version
def other_version(name):
    if "cutlass" in name:
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = other_version
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if "cutlass" in name else find_spec(name, *rest)
from dataclasses import dataclass
@dataclass(frozen=True)
class ScalePlan:
    factor: int
    flaw: str
    log: str
    kind = "scale"
    @property
    def name(self): return f"scale_by_{self.factor}"
import flash_hopper
from flash_hopper.compile.store import get_kernel
log, pack, factor = sys.argv[1:]
try:
    if pack: flash_hopper.load_pack(pack)
    kernel = get_kernel(ScalePlan(int(factor), "", log))
except flash_hopper.FlashHopperError as error:
    print(type(error).__name__, error)
else:
    try: kernel()
    except TypeError as error: print("served:", str(error).splitlines()[-1])
assert "cutlass" not in sys.modules and "flash_hopper.compile.build" not in sys.modules
"""


def elsewhere(log, factor: int, pack: Path | None = None, **environment: str) -> str:
    """What a process on such a machine prints for a plan."""
    common = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PATH": "",
        "HOME": "/nonexistent",
        settings.CACHE: "/nonexistent/cache",
    }
    command = [sys.executable, "-W", "error", "-c", ELSEWHERE, str(log), str(pack or ""), str(factor)]
    done = subprocess.run(command, env={**common, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_pack_serves_without_dsl_and_compiler_when_loaded_or_named_in_the_environment(pack, log):
    assert "served: Expects 2 parameters" in elsewhere(log, 3, pack.path)
    assert "served: Expects 2 parameters" in elsewhere(log, 5, **{settings.PACK: str(pack.path)})


def test_a_pack_serves_from_a_relative_path(pack, log, monkeypatch):
    monkeypatch.chdir(pack.path.parent)
    assert "served" in elsewhere(log, 3, Path(pack.path.name))


def test_a_plan_that_no_pack_holds_is_an_error_that_names_it_the_pack_and_what_to_do(pack, log):
    message = elsewhere(log, 11, pack.path)
    assert message.startswith("MissingDependencyError")
    assert all(
        part in message
        for part in ("scale_by_11", str(pack.path), "pip install", "flash-hopper compile --out", settings.PACK)
    )


def test_without_a_pack_the_error_says_so(log):
    message = elsewhere(log, 3)
    assert message.startswith("MissingDependencyError") and "no pack is loaded" in message


def test_a_pack_named_in_the_environment_that_is_not_there_is_an_error(log, tmp_path):
    assert elsewhere(log, 3, **{settings.PACK: str(tmp_path / "absent.so")}).startswith("CacheError")


def test_a_pack_of_other_sources_is_refused(pack, log, tmp_path):
    package = Path(flash_hopper.__file__).parent
    shutil.copytree(package, tmp_path / "flash_hopper", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "flash_hopper" / "plan" / "roles.py").open("a") as source:
        source.write("\n")
    message = elsewhere(log, 3, pack.path, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert message.startswith("CacheError") and "flash-hopper compile --out" in message


def test_a_driver_too_old_for_a_pack_is_told_apart_before_anything_is_loaded(pack, log, tmp_path):
    source = tmp_path / "driver.c"
    source.write_text("int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }\n")
    compiler = require_linker(toolkit()).command
    older = (toolkit().cuda_major - 1) * 1000 + 80
    for version, outcome in ((older, "CacheError"), (toolkit().cuda_major * 1000, "served")):
        folder = tmp_path / str(version)
        folder.mkdir()
        library = folder / "libcuda.so.1"
        subprocess.run([*compiler, "-shared", f"-DVERSION={version}", "-o", library, source], check=True)
        message = elsewhere(log, 3, pack.path, LD_LIBRARY_PATH=str(folder))
        assert message.startswith(outcome)
        assert (f"serves {older // 1000}.8" in message) == (outcome == "CacheError")


def test_load_pack_puts_a_pack_before_those_loaded_earlier(pack, monkeypatch):
    kernels = KernelStore(None)
    monkeypatch.setattr(store, "_default", kernels)
    first, second = flash_hopper.load_pack(pack.path), flash_hopper.load_pack(str(pack.path))
    assert kernels.packs == [second, first]


def test_a_pack_needs_plans_with_names_of_their_own(log, tmp_path):
    with pytest.raises(ArgumentError, match="at least one"):
        build_pack([], tmp_path / "p.so", trace=trace)
    with pytest.raises(ArgumentError, match="scale_by_3"):
        build_pack([ScalePlan(3), ScalePlan(3, log=str(log))], tmp_path / "p.so", trace=trace)


@pytest.mark.parametrize(("flaw", "jobs"), [("spill", 1), ("fails", 2)])
def test_a_plan_that_cannot_be_compiled_fails_the_pack_and_leaves_the_old_file(flaw, jobs, tmp_path, monkeypatch):
    monkeypatch.setenv(settings.CACHE, str(tmp_path / "cache"))
    out = tmp_path / "pack.so"
    out.write_bytes(b"old")
    with pytest.raises(CompileError, match=f"scale_by_3_{flaw}"):
        build_pack([ScalePlan(2), ScalePlan(3, flaw)], out, jobs=jobs, trace=trace)
    assert out.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir() if p.name != "cache"] == ["pack.so"]


def test_an_output_that_cannot_be_written_is_an_error(pack, plans, folder, tmp_path, monkeypatch):
    monkeypatch.setenv(settings.CACHE, str(folder / "cache"))
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="cannot be written"):
        build_pack(plans, tmp_path / "file" / "pack.so", jobs=1, trace=trace)


def test_without_a_c_compiler_no_pack_is_begun(plans, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/nonexistent/cc")
    monkeypatch.setattr(pack_module, "compile_into", None)
    with pytest.raises(MissingDependencyError, match="no C compiler"):
        build_pack(plans, tmp_path / "pack.so", trace=trace)


@pytest.mark.parametrize("cache", ["off", "unwritable"])
def test_a_pack_can_be_built_without_a_disk_cache(cache, plans, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv(settings.CACHE, "off" if cache == "off" else str(tmp_path / "file" / "cache"))
    assert len(build_pack(plans[:1], tmp_path / "pack.so", trace=trace)) == 1


def test_filling_the_disk_cache_wants_one_that_can_be_written(plans, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for value in ("off", str(tmp_path / "file" / "cache")):
        monkeypatch.setenv(settings.CACHE, value)
        with pytest.raises(CacheError, match=settings.CACHE):
            fill_cache(plans)


def test_what_is_compiled_into_a_folder_is_found_there_afterwards(plans, log, tmp_path):
    before = log.read_text()
    paths = compile_into(tmp_path, plans[:2], jobs=1, trace=trace)
    assert [p.parent for p in paths] == [tmp_path] * 2 and all(p.suffix == ".so" for p in paths)
    after = log.read_text()
    assert len(after.splitlines()) == len(before.splitlines()) + 2
    KernelStore(tmp_path, trace=trace).get(plans[0])
    assert log.read_text() == after


def test_plans_that_do_not_compile_spill_or_kill_the_compiler_are_left_out_with_the_reason_if_that_is_asked_for(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(settings.CACHE, "off")
    flawed = [ScalePlan(11, flaw) for flaw in ("fails", "dies", "spill")]
    good = [ScalePlan(12), ScalePlan(13)]
    failures, told = {}, []
    packed = build_pack(
        [good[0], *flawed, good[1]], tmp_path / "p.so", jobs=2, progress=lambda *call: told.append(call), trace=trace,
        failures=failures,
    )  # fmt: skip
    assert set(failures) == set(flawed) and len(packed) == len(good)
    assert all(plan in packed for plan in good) and not any(plan in packed for plan in flawed)
    for plan, word in zip(flawed, ("the compiler failed", "process died", "bytes of spills"), strict=True):
        assert word in failures[plan]
    assert [call[1:] for call in told] == [(i, 5) for i in range(1, 6)]
    with pytest.raises(CompileError, match=r"no plan of the pack compiles; the first: .*the compiler failed"):
        build_pack(flawed[:1], tmp_path / "none.so", jobs=1, trace=trace, failures={})
    assert not (tmp_path / "none.so").exists()


def test_the_cache_is_filled_as_far_as_possible(tmp_path, monkeypatch):
    monkeypatch.setenv(settings.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(parallel, "failures_of", partial(parallel.failures_of, trace=trace))
    failing, good = ScalePlan(21, "fails"), ScalePlan(22)
    assert set(fill_cache_as_far_as_possible([failing, good], 1)) == {failing}
    assert KernelStore(tmp_path / "cache").find(good) is not None
    assert fill_cache_as_far_as_possible([]) == {}
    monkeypatch.setenv(settings.CACHE, "off")
    with pytest.raises(CacheError, match="disk cache is off"):
        fill_cache_as_far_as_possible([good])
