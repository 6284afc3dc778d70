"""Environment variables: each is read in one module, and documented there."""

import os
import re
from pathlib import Path

import pytest

import flash_hopper.settings as settings

PACKAGE = Path(settings.__file__).parent


def test_no_other_module_reads_the_environment():
    reads = re.compile(r"os\.(environ|getenv)|from os import .*(environ|getenv)")
    readers = [p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if reads.search(p.read_text())]
    assert readers == ["settings.py"]


def test_every_variable_is_in_the_table_of_the_docstring():
    names = set(re.findall(r'"((?:FLASH_HOPPER|CUDA|XDG)_[A-Z_]+|CC|PATH)"', (PACKAGE / "settings.py").read_text()))
    assert names and all(f"`{name}`" in settings.__doc__ for name in names)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "{home}/.cache/flash-hopper"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/flash-hopper"),
        ({"XDG_CACHE_HOME": ""}, "{home}/.cache/flash-hopper"),
        ({"FLASH_HOPPER_CACHE": "/c"}, "/c"),
        ({"FLASH_HOPPER_CACHE": " /c ", "XDG_CACHE_HOME": "/x"}, "/c"),
        ({"FLASH_HOPPER_CACHE": "~/c"}, "{home}/c"),
        ({"FLASH_HOPPER_CACHE": ""}, "{home}/.cache/flash-hopper"),
        ({"FLASH_HOPPER_CACHE": "off"}, None),
        ({"FLASH_HOPPER_CACHE": "OFF"}, None),
    ],
    ids=str,
)
def test_the_cache_folder_is_the_named_one_or_that_of_the_user(environment, folder, monkeypatch, tmp_path):
    for name in ("FLASH_HOPPER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    assert settings.cache_folder() == (None if folder is None else Path(folder.format(home=tmp_path)))


def test_a_user_without_a_home_has_no_cache_folder(monkeypatch):
    monkeypatch.delenv("FLASH_HOPPER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(settings.Path, "home", no_home)
    assert settings.cache_folder() is None


@pytest.mark.parametrize(
    ("value", "paths"), [("", []), ("/a.so", ["/a.so"]), ("/a.so:/b.so", ["/a.so", "/b.so"]), (":/a.so: ", ["/a.so"])]
)
def test_packs_are_listed_as_in_path(value, paths, monkeypatch):
    monkeypatch.setenv("FLASH_HOPPER_PACK", value.replace(":", os.pathsep))
    assert [str(p) for p in settings.pack_paths()] == paths
