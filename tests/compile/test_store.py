"""`get_kernel` from memory, disk and a fresh compile: once each, whatever else happens at the same time or happened before."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
from launch_recorder import gpu_tensor
from standin_kernels import ScalePlan, trace

from flash_hopper import settings
from flash_hopper.compile import link, store
from flash_hopper.compile.build import build
from flash_hopper.compile.disk import LIBRARY, OBJECT, RECORD, DiskCache, FolderError
from flash_hopper.compile.key import kernel_key
from flash_hopper.compile.store import KernelStore
from flash_hopper.compile.target import toolkit
from flash_hopper.problem.errors import CacheError, CompileError, MissingDependencyError

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "compiles.log"


@pytest.fixture
def plan(log) -> ScalePlan:
    return ScalePlan(3, log=str(log))


def compiles(log: Path) -> int:
    return len(log.read_text().splitlines()) if log.exists() else 0


def new_store(folder: Path | None) -> KernelStore:
    """As a new process would have it."""
    return KernelStore(folder, trace=trace)


def is_callable_kernel(kernel) -> bool:
    """The argument check of the host code answers, so the library is whole."""
    with pytest.raises((TypeError, ValueError), match="Expects 2 parameters"):
        kernel()
    with pytest.raises((TypeError, ValueError), match="ismatched"):
        kernel(gpu_tensor((8,), "fp32"), gpu_tensor((9,), "fp32"))
    return True


def stem(plan) -> str:
    return f"{plan.name}-{kernel_key(plan, toolkit())}"


def test_a_plan_is_compiled_once_then_comes_from_memory_then_from_disk(plan, log, tmp_path):
    folder = tmp_path / "cache"
    first = new_store(folder)
    kernel = first.get(plan)
    assert first.get(plan) is kernel and is_callable_kernel(kernel)
    assert is_callable_kernel(new_store(folder).get(plan))
    assert compiles(log) == 1
    record = DiskCache(folder).record(stem(plan))
    assert record is not None and set(record.files) == {OBJECT, LIBRARY}
    assert record.registers == 10 and record.dsl_version == toolkit().dsl_version


def test_an_equal_plan_is_the_same_plan_and_another_one_is_not(plan, log, tmp_path):
    kernels = new_store(tmp_path / "cache")
    assert kernels.get(plan) is kernels.get(ScalePlan(3, log=str(log)))
    assert kernels.get(plan) is not kernels.get(ScalePlan(4, log=str(log)))
    assert compiles(log) == 2


WARM = """
import sys
class NoCompiler:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "nvidia_cutlass_dsl"):
            raise AssertionError("a warm start imported " + name)
import flash_hopper.compile.target as target
target.toolkit()
sys.meta_path.insert(0, NoCompiler())
before = set(sys.modules)
from dataclasses import dataclass
@dataclass(frozen=True)
class ScalePlan:
    factor: int
    flaw: str
    log: str
    kind = "scale"
    name = "scale_by_3"
from flash_hopper.compile.store import get_kernel
get_kernel(ScalePlan(3, "", sys.argv[1]))
assert "cutlass" not in sys.modules and "flash_hopper.compile.build" not in sys.modules
print("served")
"""


def test_a_warm_start_imports_no_compiler(plan, log, tmp_path):
    folder = tmp_path / "cache"
    new_store(folder).ensure(plan)
    environment = {**os.environ, "FLASH_HOPPER_CACHE": str(folder), "PYTHONPATH": os.pathsep.join(sys.path), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", WARM, str(log)], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "served", done.stderr
    assert compiles(log) == 1


def test_threads_that_ask_at_once_compile_once(plan, log, tmp_path):
    kernels, served = new_store(tmp_path / "cache"), []
    threads = [threading.Thread(target=lambda: served.append(kernels.get(plan))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(served) == 8 and len({id(k) for k in served}) == 1
    assert compiles(log) == 1


def get_in_process(plan, folder, start, served) -> None:
    start.wait()
    served.put(is_callable_kernel(KernelStore(Path(folder), trace=trace).get(plan)))


def test_processes_that_start_cold_at_once_compile_once(plan, log, tmp_path):
    start, served = SPAWN.Barrier(4), SPAWN.Queue()
    arguments = plan, str(tmp_path / "cache"), start, served
    processes = [SPAWN.Process(target=get_in_process, args=arguments) for _ in range(4)]
    for process in processes:
        process.start()
    assert [served.get(timeout=120) for _ in processes] == [True] * 4
    for process in processes:
        process.join()
    assert compiles(log) == 1


def compile_for_ever(plan, folder) -> None:
    def slow(plan):
        Path(plan.log).touch()
        time.sleep(600)

    KernelStore(Path(folder), trace=slow).get(plan)


def test_a_writer_killed_while_it_compiles_leaves_no_trace(plan, log, tmp_path):
    folder = tmp_path / "cache"
    writer = SPAWN.Process(target=compile_for_ever, args=(plan, str(folder)))
    writer.start()
    while not log.exists():
        time.sleep(0.02)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join()
    assert is_callable_kernel(new_store(folder).get(plan))
    assert DiskCache(folder).stems() == [stem(plan)]


@pytest.mark.parametrize(
    ("suffix", "compiled_again"),
    [(LIBRARY, False), (OBJECT, False), (RECORD, True)],
    ids=["library", "object", "record"],
)
@pytest.mark.parametrize("content", [b"", b"garbage", None], ids=["empty", "garbled", "missing"])
def test_a_damaged_entry_is_made_again_and_not_fatal(suffix, compiled_again, content, plan, log, tmp_path):
    folder = tmp_path / "cache"
    new_store(folder).ensure(plan)
    path = DiskCache(folder).path(stem(plan), suffix)
    path.unlink() if content is None else path.write_bytes(content)
    assert is_callable_kernel(new_store(folder).get(plan))
    # an intact object is only linked again, an intact library is all that a kernel needs
    assert compiles(log) == 1 + compiled_again
    record = DiskCache(folder).record(stem(plan))
    assert record is not None and DiskCache(folder).has(record, LIBRARY)


def test_a_damaged_entry_without_an_intact_object_is_compiled_again(plan, log, tmp_path):
    folder = tmp_path / "cache"
    new_store(folder).ensure(plan)
    for suffix in (OBJECT, LIBRARY):
        path = DiskCache(folder).path(stem(plan), suffix)
        path.write_bytes(path.read_bytes()[:-1])
    assert is_callable_kernel(new_store(folder).get(plan))
    assert compiles(log) == 2


def test_a_library_that_matches_its_checksum_but_cannot_be_loaded_is_an_error_that_names_it(plan, tmp_path):
    cache = DiskCache(tmp_path / "cache")
    new_store(cache.folder).ensure(plan)
    record = cache.record(stem(plan))
    with cache.adding_library(record) as path:
        path.write_bytes(b"no library")
    with pytest.raises(CacheError, match=record.stem):
        new_store(cache.folder).get(plan)


def test_a_folder_that_cannot_be_written_costs_one_warning_and_is_replaced(plan, log, tmp_path):
    blocker = tmp_path / "file"
    blocker.touch()
    kernels = new_store(blocker / "cache")
    with pytest.warns(RuntimeWarning, match=settings.CACHE) as caught:
        assert is_callable_kernel(kernels.get(plan))
        assert is_callable_kernel(kernels.get(ScalePlan(4, log=str(log))))
    assert len([w for w in caught if w.category is RuntimeWarning]) == 1
    assert compiles(log) == 2


def test_a_filled_folder_that_cannot_be_written_serves_without_a_warning(plan, log, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    new_store(folder).ensure(plan)

    def locked(*_: object) -> None:
        raise FolderError("read-only")

    monkeypatch.setattr(DiskCache, "locked", locked)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_callable_kernel(new_store(folder).get(plan))
    assert compiles(log) == 1


def test_with_the_cache_off_nothing_is_kept_and_nothing_is_warned_of(plan, log):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert is_callable_kernel(new_store(None).get(plan))
        assert is_callable_kernel(new_store(None).get(plan))
    assert compiles(log) == 2


def test_temporary_folders_end_with_the_process(tmp_path):
    code = (
        "from flash_hopper.compile.store import KernelStore; import sys, os\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from standin_kernels import ScalePlan, trace\n"
        "path = KernelStore(None, trace=trace).ensure(ScalePlan(3)); assert path.exists(); print(path)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert str(tmp_path) in done.stdout, done.stderr
    assert not list(tmp_path.glob("flash-hopper*"))


def test_nowhere_to_write_at_all_is_an_error(plan, monkeypatch, tmp_path):
    def locked(*_: object) -> None:
        raise FolderError("disk full")

    monkeypatch.setattr(DiskCache, "locked", locked)
    with pytest.warns(RuntimeWarning), pytest.raises(CacheError, match="disk full"):
        new_store(tmp_path / "cache").get(plan)


def test_without_a_c_compiler_the_dsl_loads_the_object_and_later_a_compiler_only_links_it(
    plan, log, tmp_path, monkeypatch
):
    folder = tmp_path / "cache"
    with monkeypatch.context() as patch:
        patch.setattr(link.shutil, "which", lambda *_, **__: None)
        assert "DSL loader" in link.describe() and "no C compiler" in link.describe()
        for _ in range(2):
            assert is_callable_kernel(new_store(folder).get(plan))
        assert new_store(folder).ensure(plan).suffix == OBJECT
    assert link.describe().split()[0].endswith(("cc", "clang"))
    assert is_callable_kernel(new_store(folder).get(plan))
    assert new_store(folder).ensure(plan).suffix == LIBRARY
    assert compiles(log) == 1


def test_without_a_cuda_runtime_the_dsl_loads_the_object_and_the_wheel_to_install_is_named(plan, tmp_path, monkeypatch):
    monkeypatch.setattr(link, "cuda_runtime", lambda major: None)
    assert "pip install nvidia-cuda-runtime" in link.describe()
    assert is_callable_kernel(new_store(tmp_path / "cache").get(plan))
    with pytest.raises(MissingDependencyError, match="pip install nvidia-cuda-runtime"):
        link.require_linker(toolkit())


def test_the_shared_cuda_runtime_serves_where_there_is_no_static_one(plan, tmp_path, monkeypatch):
    static = link.cuda_runtime(toolkit().cuda_major)
    shared = static.with_name(f"libcudart.so.{toolkit().cuda_major}")
    monkeypatch.setattr(link, "cuda_runtime", lambda major: shared)
    path = new_store(tmp_path / "cache").ensure(plan)
    assert path.stat().st_size < 200_000 < static.stat().st_size
    assert is_callable_kernel(new_store(tmp_path / "cache").get(plan))


def test_without_the_dsl_the_error_names_the_plan_the_packs_and_what_to_do(plan, tmp_path, monkeypatch):
    def missing():
        raise MissingDependencyError("compiling a kernel needs nvidia-cutlass-dsl: pip install it")

    monkeypatch.setattr(store, "toolkit", missing)
    with pytest.raises(
        MissingDependencyError, match=f"{plan.name} .*no pack is loaded.*pip install it.*{settings.PACK}"
    ):
        new_store(tmp_path / "cache").get(plan)


FLAWS = {
    "spill": "bytes of spills",
    "setmaxnreg": r"\(C7508\)",
    "warns": "an argument was ignored",
    "fails": "the compiler failed.*no_such_attribute",
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_kernel_that_breaks_a_promise_is_an_error_each_time_and_is_not_kept(flaw, log, tmp_path):
    plan, folder = ScalePlan(3, flaw, str(log)), tmp_path / "cache"
    kernels = new_store(folder)
    for _ in range(2):
        with pytest.raises(CompileError, match=f"{plan.name}: .*{FLAWS[flaw]}"):
            kernels.get(plan)
    assert compiles(log) == 2 and DiskCache(folder).stems() == []


@pytest.mark.parametrize("flaw", ["spill", "setmaxnreg"])
def test_the_report_of_a_flawed_kernel_can_be_had_on_request(flaw):
    assert build(ScalePlan(3, flaw), trace, strict=False).report.faults


def test_warnings_of_other_threads_during_a_compile_are_theirs_and_not_errors(plan, tmp_path):
    done = threading.Event()

    def warn_often() -> None:
        while not done.is_set():
            warnings.warn("something else", UserWarning, stacklevel=1)
            time.sleep(0.001)

    other = threading.Thread(target=warn_often)
    with pytest.warns(UserWarning, match="something else"):
        other.start()
        try:
            kernel = new_store(tmp_path / "cache").get(plan)
        finally:
            done.set()
            other.join()
    assert is_callable_kernel(kernel)


def test_compiling_leaves_the_exception_hook_and_the_warning_filters_of_the_program_alone(plan):
    code = (
        f"import sys, warnings; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from standin_kernels import ScalePlan, trace; from flash_hopper.compile.build import build\n"
        "def state(): return sys.excepthook, warnings.showwarning, warnings.filters[:]\n"
        "sys.excepthook = lambda *a: None; before = state(); build(ScalePlan(3), trace); print(before == state())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize("route", ["compile", "load"])
def test_a_dsl_that_is_installed_but_broken_is_named_with_what_to_install(route, plan, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("CC", "none")
    if route == "load":
        new_store(folder).ensure(plan)
        monkeypatch.setitem(sys.modules, "cutlass.cute.runtime", None)
    else:
        monkeypatch.setitem(sys.modules, "flash_hopper.compile.build", None)
    with pytest.raises(MissingDependencyError, match=r"the DSL cannot be imported: .*pip install"):
        new_store(folder).get(plan)


def test_a_linker_that_fails_says_how_to_go_on(plan, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "false")
    with pytest.raises(CompileError, match="Set CC to another C compiler, or to 'none'"):
        new_store(tmp_path / "cache").get(plan)
    monkeypatch.setenv("CC", "none")
    assert is_callable_kernel(new_store(tmp_path / "cache").get(plan))


def test_a_dry_run_of_the_compiler_is_recognised(plan, tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from standin_kernels import ScalePlan, trace; from flash_hopper.compile.build import build\n"
        "from flash_hopper.problem.errors import CompileError\n"
        "try: build(ScalePlan(3), trace)\n"
        "except CompileError as error: print(error)"
    )
    environment = {**os.environ, "CUTE_DSL_DRYRUN": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "CUTE_DSL_DRYRUN" in done.stdout, done.stderr


def object_in_process(folder: str, arch: str | None) -> None:
    if arch is not None:
        os.environ["CUTE_DSL_ARCH"] = arch
    (Path(folder) / f"{arch}.o").write_bytes(build(ScalePlan(3), trace).object_code)


def test_objects_are_the_same_in_every_process_whatever_target_the_environment_names(tmp_path):
    for arch in (None, "sm_100a", "sm_80"):
        process = SPAWN.Process(target=object_in_process, args=(str(tmp_path), arch))
        process.start()
        process.join()
    objects = [path.read_bytes() for path in tmp_path.iterdir()]
    assert len(objects) == 3 and len(set(objects)) == 1
