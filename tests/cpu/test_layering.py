"""Imports go down the rooms only, and each outside package is used where it belongs.

The rules are those of `docs/rooms.md`; they are read off the source, nothing is imported.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import flash_hopper

PACKAGE = Path(flash_hopper.__file__).parent

# A room may import from rooms of a lower rank, and from itself.
RANKS = {
    "version": 0,
    "settings": 0,
    "problem": 1,
    "geometry": 2,
    "plan": 3,
    "device": 4,
    "kernels": 5,
    "compile": 6,
    "reference": 6,
    "launch": 7,
    "autograd": 8,
    "api": 9,
    "fp8": 10,
    "__init__": 11,
    "testing": 12,
    "compat": 13,
    "integrations": 13,
    "cli": 13,
    "__main__": 14,
}
TORCH_ROOMS = {"reference", "launch", "autograd", "api", "fp8", "testing", "compat", "integrations", "cli"}
# Outside packages: rooms or modules that may import them. Anything else is the standard library.
OUTSIDE = {
    "torch": TORCH_ROOMS,
    "cutlass": {"device.dsl", "compile.build", "compile.load", "geometry.arith"},
    "cuda": {"device.dsl"},
    "tvm_ffi": {"compile.load"},
    "typer": {"cli"},
    "rich": {"cli"},
    "click": {"cli"},
    "matplotlib": {"testing.plots"},
    "pynvml": {"testing.clocks"},
    "safetensors": {"testing.demo_run"},
    "jax": {"integrations.jax"},
    "transformers": {"integrations.transformers"},
}
# Imports inside functions, because they are heavy, optional, or not wanted by a warm start: module -> what it imports late.
LATE = {
    "geometry.arith": {"cutlass"},
    "compile.build": {"flash_hopper.kernels.registry"},
    "compile.store": {"flash_hopper.compile.build"},
    "compile.inspect": {"flash_hopper.compile.build"},
    "compile.load": {"cutlass", "tvm_ffi"},
    "testing.clocks": {"pynvml"},
    "testing.plots": {"matplotlib"},
    "testing.demo_run": {"safetensors"},
}


class Import(NamedTuple):
    """One import statement: which module has it, what it names, and whether it runs late or never."""

    module: str
    line: int
    target: str
    is_late: bool
    is_for_types: bool

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted names below the package, with their files; a room's own __init__ has the room's name."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)
        yield name, path


def targets(node: ast.AST) -> Iterator[str]:
    """What an import statement names; `from flash_hopper import x` names module x if there is one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        for alias in node.names:
            inside = PACKAGE.parent / Path(*node.module.split("."), alias.name)
            is_module = inside.with_suffix(".py").exists() or (inside / "__init__.py").exists()
            yield f"{node.module}.{alias.name}" if is_module else node.module


def imports_of(module: str, tree: ast.AST) -> Iterator[Import]:
    def walk(node: ast.AST, is_late: bool, is_for_types: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            for target in targets(child):
                yield Import(module, child.lineno, target, is_late, is_for_types)
            late = is_late or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            types = is_for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test))
            yield from walk(child, late, types)

    return walk(tree, False, False)


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return [found for name, path in modules() for found in imports_of(name, ast.parse(path.read_text()))]


def room_of(module: str) -> str:
    return module.split(".")[0]


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


def test_every_module_belongs_to_a_room():
    assert {room_of(name) for name, _ in modules()} <= set(RANKS)


def test_rooms_import_downwards_only(imports):
    wrong = []
    for found in imports:
        if found.target.split(".")[0] != "flash_hopper":
            continue
        target = room_of(found.target.partition(".")[2]) or "__init__"
        own = room_of(found.module)
        if target != own and RANKS[target] >= RANKS[own]:
            wrong.append(str(found))
    assert not wrong


def test_outside_packages_are_used_where_they_belong(imports):
    wrong = []
    for found in imports:
        root = found.target.split(".")[0]
        if root == "flash_hopper" or root in sys.stdlib_module_names:
            continue
        if root not in OUTSIDE or not within(found.module, OUTSIDE[root]):
            wrong.append(str(found))
    assert not wrong


def test_the_oracle_shares_no_index_code_with_the_kernels(imports):
    used = {found.target for found in imports if found.module == "reference.naive"}
    assert {target for target in used if target.startswith("flash_hopper")} <= {"flash_hopper.problem.mask"}


def test_functions_import_only_what_is_heavy_or_optional(imports):
    wrong = []
    for found in imports:
        if not found.is_late or room_of(found.module) == "cli":
            continue
        if not any(found.target == late or found.target.startswith(late + ".") for late in LATE.get(found.module, ())):
            wrong.append(str(found))
    assert not wrong


def test_the_environment_is_read_in_settings_only():
    readers = {
        name
        for name, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert readers == {"settings"}


def test_problem_geometry_and_plan_load_without_torch_and_dsl():
    rooms = [name for name, _ in modules() if room_of(name) in ("problem", "geometry", "plan")]
    program = (
        "import sys, types\n"
        "package = types.ModuleType('flash_hopper'); package.__path__ = [sys.argv[1]]\n"
        "sys.modules['flash_hopper'] = package\n"
        "import importlib\n"
        "for name in sys.argv[2:]: importlib.import_module('flash_hopper.' + name)\n"
        "heavy = {'torch', 'cutlass', 'tvm_ffi', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program, str(PACKAGE), *rooms], check=True, timeout=60)


def test_importing_the_package_loads_no_compiler_and_touches_no_gpu():
    program = (
        "import sys, torch\n"
        "import flash_hopper\n"
        "assert 'cutlass' not in sys.modules and 'tvm_ffi' not in sys.modules\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env=_environment())


def _environment() -> dict[str, str]:
    return {"PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"}
