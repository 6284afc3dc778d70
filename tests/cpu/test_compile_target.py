"""Which compiler, flavour and driver: found without importing any of them, and what is missing is named."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from flash_hopper.compile import target
from flash_hopper.problem.errors import MissingDependencyError

BOTH = {"cu12": Path("12"), "cu13": Path("13")}


@pytest.fixture(autouse=True)
def fresh_caches():
    target.toolkit.cache_clear()
    yield
    target.toolkit.cache_clear()


@pytest.mark.parametrize(
    ("installed", "driver", "chosen"),
    [
        (["cu12", "cu13"], None, "cu13"),
        (["cu12"], None, "cu12"),
        (["cu12", "cu13"], (13, 0), "cu13"),
        (["cu12", "cu13"], (14, 2), "cu13"),
        (["cu12", "cu13"], (12, 8), "cu12"),
        (["cu12"], (13, 0), "cu12"),
        (["cu13"], (13, 0), "cu13"),
    ],
)
def test_the_newest_flavour_that_the_driver_serves_is_taken(installed, driver, chosen):
    assert target.choose_flavour({f: BOTH[f] for f in installed}, driver) == chosen


@pytest.mark.parametrize(("installed", "driver"), [(["cu13"], (12, 8)), (["cu12", "cu13"], (11, 8))])
def test_a_driver_too_old_for_every_flavour_is_an_error_that_says_what_to_install(installed, driver):
    with pytest.raises(MissingDependencyError, match=r"serves CUDA 1[12]\.8: pip install .*nvidia-cutlass-dsl"):
        target.choose_flavour({f: BOTH[f] for f in installed}, driver)


@pytest.mark.parametrize("missing", [target.DSL_PACKAGE, target.FFI_PACKAGE])
def test_a_missing_package_is_named_with_the_command_that_installs_it(missing, monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == missing:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if name != target.DSL_PACKAGE else "4.8.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(MissingDependencyError, match=f"needs {missing}: pip install"):
        target.toolkit()


@pytest.mark.parametrize("version", ["4.7.3", "4.9.0", "5.0.0.dev1"])
def test_an_untested_dsl_is_refused(version, monkeypatch):
    monkeypatch.setattr(target, "installed_flavours", lambda: BOTH)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == target.DSL_PACKAGE else "0.1.15")
    with pytest.raises(MissingDependencyError, match=rf"{version} is installed, .*tested with 4\.8: pip install"):
        target.toolkit()


def test_a_flavour_without_its_library_does_not_count(tmp_path, monkeypatch):
    for flavour in BOTH:
        (tmp_path / flavour / "lib").mkdir(parents=True)
    (tmp_path / "cu12" / "lib" / "libcute_dsl_runtime.so").touch()
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert list(target.installed_flavours()) == ["cu12"]


def test_finding_the_compiler_imports_neither_it_nor_torch():
    code = (
        "import sys; import flash_hopper.compile.target as t\n"
        "try: t.toolkit()\n"
        "except t.MissingDependencyError: pass\n"
        "t.driver_cuda_version()\n"
        "print([m for m in ('cutlass', 'tvm_ffi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("version", "abi"), [("0.1.15.post2", "0.1"), ("0.1.16", "0.1"), ("0.2.0", "0.2"), ("1.0", "1.0")]
)
def test_the_binary_interface_of_tvm_ffi_is_its_major_and_minor_version(version, abi):
    assert target.ffi_abi(version) == abi
