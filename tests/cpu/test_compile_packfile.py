"""Packs: read back whole or refused; one that does not fit this package, processor, tvm-ffi or driver says what to do."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flash_hopper.compile import packfile
from flash_hopper.compile.key import plan_digest, source_fingerprint
from flash_hopper.compile.packfile import Manifest, append_manifest, open_pack, read_manifest
from flash_hopper.compile.target import GPU_ARCH, host
from flash_hopper.problem.errors import CacheError


@dataclass(frozen=True)
class TinyPlan:
    size: int
    kind = "tiny"

    @property
    def name(self) -> str:
        return f"tiny_{self.size}"


PLANS = [TinyPlan(n) for n in range(5)]
FITTING = Manifest(
    package_version="0.1.0", sources=source_fingerprint(), dsl_version="4.8.1", flavour="cu13", ffi_version="0.1.15",
    target=GPU_ARCH, host=host(), created="2026-01-01T00:00:00+00:00", kernels={plan_digest(p): p.name for p in PLANS},
)  # fmt: skip


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(packfile, "driver_cuda_version", lambda: None)
    monkeypatch.setattr(packfile, "require_ffi", lambda: "0.1.15.post2")


def write(path: Path, manifest: Manifest = FITTING) -> Path:
    path.write_bytes(b"\x7fELF" + bytes(range(256)) * 20)
    append_manifest(path, manifest)
    return path


def test_a_pack_knows_its_plans_and_no_others(tmp_path):
    pack = open_pack(write(tmp_path / "p.so"))
    assert pack.manifest == FITTING and len(pack) == len(PLANS)
    assert all(plan in pack for plan in PLANS) and TinyPlan(99) not in pack
    assert pack.names == sorted(p.name for p in PLANS)


def test_the_library_in_front_of_the_manifest_is_untouched(tmp_path):
    path = write(tmp_path / "p.so")
    assert path.read_bytes().startswith(b"\x7fELF" + bytes(range(256)) * 20)


def test_a_pack_cut_short_anywhere_is_refused(tmp_path):
    path = write(tmp_path / "p.so")
    content = path.read_bytes()
    for length in range(0, len(content), 97):
        path.write_bytes(content[:length])
        with pytest.raises(CacheError, match="cut short"):
            read_manifest(path)


def test_a_pack_with_any_byte_changed_is_refused(tmp_path):
    path = write(tmp_path / "p.so")
    content = path.read_bytes()
    for position in [*range(0, len(content), 101), *range(len(content) - 60, len(content))]:
        path.write_bytes(content[:position] + bytes([content[position] ^ 0x10]) + content[position + 1 :])
        with pytest.raises(CacheError):
            read_manifest(path)


def test_a_pack_that_is_not_there_or_is_a_folder_is_an_error_that_names_it(tmp_path):
    for path in (tmp_path / "absent.so", tmp_path):
        with pytest.raises(CacheError, match=str(path)):
            open_pack(path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"sources": "f" * 32, "package_version": "0.0.9"},
            r"made by flash-hopper 0\.0\.9 .* flash-hopper compile --out",
        ),
        ({"target": "sm_100a"}, "is for sm_100a GPUs"),
        ({"host": "riscv64"}, "riscv64 processors"),
        ({"ffi_version": "0.2.1"}, r"tvm-ffi 0\.2\.1, installed is 0\.1\.15.*pip install"),
        ({"ffi_version": "1.1.0"}, "pip install"),
    ],
)
def test_a_pack_that_does_not_fit_says_why_and_what_to_do(changes, reason, tmp_path):
    path = write(tmp_path / "p.so", dataclasses.replace(FITTING, **changes))
    with pytest.raises(CacheError, match=reason):
        open_pack(path)


@pytest.mark.parametrize(
    ("flavour", "driver", "fits"),
    [("cu13", (12, 8), False), ("cu13", (13, 0), True), ("cu13", (14, 0), True), ("cu12", (12, 0), True),
     ("cu12", (13, 1), True), ("cu12", (11, 8), False), ("cu13", None, True)],
)  # fmt: skip
def test_a_pack_needs_a_driver_of_its_cuda_version_or_later(flavour, driver, fits, tmp_path, monkeypatch):
    monkeypatch.setattr(packfile, "driver_cuda_version", lambda: driver)
    path = write(tmp_path / "p.so", dataclasses.replace(FITTING, flavour=flavour))
    if fits:
        open_pack(path)
    else:
        with pytest.raises(CacheError, match=rf"serves {driver[0]}\.{driver[1]}; update the driver, or .*pip install"):
            open_pack(path)


def test_another_dsl_version_or_none_is_no_obstacle(tmp_path):
    open_pack(write(tmp_path / "p.so", dataclasses.replace(FITTING, dsl_version="4.8.99")))


def test_opening_a_pack_imports_neither_compiler_nor_torch(tmp_path):
    path = write(tmp_path / "p.so")
    code = (
        "import sys\n"
        "from pathlib import Path; from flash_hopper.compile import packfile\n"
        f"packfile.source_fingerprint = lambda: {FITTING.sources!r}; packfile.require_ffi = lambda: '0.1.15'\n"
        "imported = 'torch' in sys.modules\n"
        f"packfile.open_pack(Path({str(path)!r}))\n"
        "print([m for m in ('cutlass', 'tvm_ffi') if m in sys.modules], imported == ('torch' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "[] True", done.stderr
