"""Keys: equal plans have equal keys on every machine; whatever shapes the code of a kernel changes the key."""

import dataclasses
import enum
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flash_hopper import settings
from flash_hopper.compile import key
from flash_hopper.compile.presets import ALL_HEAD_DIMS, forward_plans
from flash_hopper.compile.target import Toolkit
from flash_hopper.problem.dtypes import DType
from flash_hopper.problem.errors import CompileError

KIT = Toolkit("4.8.1", "cu13", Path("/nowhere"), "0.1.15.post2")
PLANS = forward_plans(
    [(d, dv) for d in ALL_HEAD_DIMS for dv in (d, 128)], negative_scale=(False, True)
)  # fmt: skip


class Shade(enum.Enum):
    DARK = 1
    LIGHT = 2


@dataclass(frozen=True)
class AnyPlan:
    value: Any
    kind = "any"
    name = "any"


def test_different_plans_have_different_keys_and_names():
    assert len({key.kernel_key(p, KIT) for p in PLANS}) == len(PLANS)
    assert len({p.name for p in PLANS}) == len(PLANS)


def test_a_change_of_any_field_of_a_forward_plan_changes_the_key():
    plan = PLANS[0]
    changed = {DType.BF16: DType.FP16, "static": "dynamic", "full": "causal", "apart": "q"}
    for field in dataclasses.fields(plan):
        old = getattr(plan, field.name)
        new = not old if isinstance(old, bool) else old + 1 if isinstance(old, int) else changed[old]
        other = dataclasses.replace(plan, **{field.name: new})
        assert key.kernel_key(other, KIT) != key.kernel_key(plan, KIT), field.name


def test_plans_of_two_types_with_equal_fields_have_different_keys():
    @dataclass(frozen=True)
    class OtherPlan(AnyPlan):
        kind = "other"

    assert key.plan_digest(AnyPlan(1)) != key.plan_digest(OtherPlan(1))


def test_values_that_python_holds_equal_or_prints_alike_do_not_collide():
    values = [
        1,
        True,
        1.0,
        "1",
        "True",
        None,
        "None",
        (1,),
        ((1,),),
        (1, 1),
        ("1, 1",),
        (),
        "",
        Shade.DARK,
        "Shade.DARK",
    ]
    values += [
        0,
        False,
        0.0,
        -0.0,
        (0,),
        (False,),
        1e-300,
        float("inf"),
        "a'",
        'a"',
        "a\n",
        (("a", "b"), "c"),
        ("a", ("b", "c")),
    ]
    assert len({key.plan_digest(AnyPlan(v)) for v in values}) == len(values)


class IntLike(int):
    pass


@pytest.mark.parametrize(
    "value",
    [[1], {1}, {1: 2}, b"1", object(), 1j, IntLike(1), range(3), lambda: 1, SimpleNamespace(a=1), Path("a"), (1, [2]),
     AnyPlan(1), slice(1), DType],
    ids=lambda v: type(v).__name__,
)  # fmt: skip
def test_a_value_without_canonical_text_raises_and_names_the_field(value):
    with pytest.raises(CompileError, match=r"AnyPlan\.value"):
        key.plan_digest(AnyPlan(value))


def test_numbers_and_tensors_of_array_libraries_raise():
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    for value in (numpy.int64(1), numpy.float64(1.0), numpy.bool_(True), torch.tensor(1), torch.bfloat16):
        with pytest.raises(CompileError, match="AnyPlan"):
            key.plan_digest(AnyPlan(value))


@pytest.mark.parametrize("value", [1, "plan", None, AnyPlan], ids=str)
def test_what_is_no_plan_raises(value):
    with pytest.raises(CompileError, match="dataclass"):
        key.plan_digest(value)


@pytest.mark.parametrize("changes", [{"dsl_version": "4.8.2"}, {"flavour": "cu12"}, {"ffi_version": "0.2.0"}], ids=str)
def test_another_toolkit_has_another_key(changes):
    assert key.kernel_key(PLANS[0], KIT) != key.kernel_key(PLANS[0], dataclasses.replace(KIT, **changes))


def test_where_the_toolkit_lies_and_patch_versions_of_tvm_ffi_do_not_matter():
    same = dataclasses.replace(KIT, folder=Path("/elsewhere"), ffi_version="0.1.16")
    assert key.kernel_key(PLANS[0], KIT) == key.kernel_key(PLANS[0], same)


def test_settings_of_the_compiler_that_change_code_change_the_key(monkeypatch):
    plain = key.kernel_key(PLANS[0], KIT)
    for name in settings._DSL_CODE_SETTINGS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert key.kernel_key(PLANS[0], KIT) != plain, name
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_100a")
    assert key.kernel_key(PLANS[0], KIT) == plain


def test_another_processor_has_another_key(monkeypatch):
    plain = key.kernel_key(PLANS[0], KIT)
    monkeypatch.setattr(key, "host", lambda: "another")
    assert key.kernel_key(PLANS[0], KIT) != plain


def test_keys_are_the_same_in_every_process():
    code = (
        "from pathlib import Path; from flash_hopper.compile import key, presets; from flash_hopper.compile.target import Toolkit;"
        "kit = Toolkit('4.8.1', 'cu13', Path('/nowhere'), '0.1.15.post2');"
        "print(*(key.kernel_key(p, kit) for p in presets.preset_plans('common')))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}, text=True,
            capture_output=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(runs) == 1


def sources(root: Path) -> Path:
    for name, text in {"plan/a.py": "a", "plan/sub/b.py": "b", "build.py": "c", "unrelated/d.py": "d"}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_fingerprint_sees_every_change_of_a_named_source_and_nothing_else(tmp_path):
    named = ("plan", "build.py")
    original = key.fingerprint_of(sources(tmp_path / "original"), named)
    assert key.fingerprint_of(sources(tmp_path / "copy"), named) == original

    def after(change) -> str:
        root = sources(tmp_path / f"changed{len(list(tmp_path.iterdir()))}")
        change(root)
        return key.fingerprint_of(root, named)

    changes = [
        lambda r: (r / "plan/a.py").write_text("A"),
        lambda r: (r / "plan/sub/b.py").write_text("bb"),
        lambda r: (r / "build.py").write_text(""),
        lambda r: (r / "plan/new.py").write_text(""),
        lambda r: (r / "plan/a.py").unlink(),
        lambda r: (r / "plan/a.py").rename(r / "plan/z.py"),
        lambda r: ((r / "plan/a.py").write_text("b"), (r / "plan/sub/b.py").write_text("a")),
    ]
    assert len({original, *map(after, changes)}) == len(changes) + 1
    assert after(lambda r: (r / "unrelated/d.py").write_text("D")) == original
    assert after(lambda r: (r / "plan/a.pyc").write_text("x")) == original


def test_the_fingerprint_covers_every_room_below_compile():
    package = Path(key.__file__).parents[1]
    rooms = {"problem", "geometry", "plan", "device", "kernels"}
    assert rooms <= set(key.SOURCES)
    assert all((package / source).exists() for source in key.SOURCES)
