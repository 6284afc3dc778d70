"""Documents name only what exists, show code that runs, and hold tables that their files back."""

import importlib.util
import re
from pathlib import Path

import pytest
from typer.main import get_command

import flash_hopper
from flash_hopper.cli.main import app
from flash_hopper.testing.tables import BLOCK, render_tables

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SOURCES = sorted((ROOT / "src").rglob("*.py"))
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]

LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# `src/...`, `plan/roles.py`, `tests/cpu`: a path in backticks has a slash or a suffix of a file of ours
PATH = re.compile(r"`([A-Za-z_.][\w./-]*(?:/[\w.-]*|\.(?:py|md|toml|json|svg)))`")
DOC_PATH = re.compile(r"\b(docs/[\w/]+\.md)\b")
COMMAND = re.compile(r"flash-hopper ((?:[a-z-]+ ?)+)((?:--[a-z-]+[^\n`|]*)?)")


def code_blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", document.read_text(), re.DOTALL)


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document):
    targets = [t for t in LINK.findall(document.read_text()) if not t.startswith(("http://", "https://"))]
    missing = [t for t in targets if not (document.parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_paths_in_backticks_exist(document):
    places = (
        ROOT,
        ROOT / "src" / "flash_hopper",
        ROOT / "src" / "flash_hopper" / "kernels" / "forward",
        document.parent,
    )
    named = {p for p in PATH.findall(document.read_text()) if p.isascii() and "FILE" not in p}
    missing = {p for p in named if not any((place / p).exists() for place in places)}
    assert not missing


def test_documents_named_in_sources_exist():
    missing = {
        f"{source.relative_to(ROOT)}: {name}"
        for source in SOURCES
        for name in DOC_PATH.findall(source.read_text())
        if not (ROOT / name).exists()
    }
    assert not missing


@pytest.mark.parametrize("block", code_blocks(ROOT / "README.md", "python"))
def test_code_in_the_readme_runs(block):
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_commands_and_options_in_documents_exist(document):
    root = get_command(app)
    for words, options in COMMAND.findall(document.read_text()):
        command = root
        for word in words.split():
            children = getattr(command, "commands", {})
            if not children:
                break
            assert word in children, f"flash-hopper {words}"
            command = children[word]
        known = {option for parameter in command.params for option in parameter.opts}
        wrong = set(re.findall(r"--[a-z][a-z-]*", options)) - known - {"--help"}
        assert not wrong, f"flash-hopper {words}{options}"


def test_the_readme_lists_every_command():
    listed = set(re.findall(r"^\| `([a-z]+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert listed == set(get_command(app).commands)


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_tables_are_what_their_files_say(document):
    text = document.read_text()
    stored = [match for match in BLOCK.finditer(text) if "FILE" not in match["file"]]
    if stored:
        assert render_tables(text, document.parent) == text


def test_figures_are_what_their_script_draws():
    script = ROOT / "docs" / "figures" / "make_figures.py"
    spec = importlib.util.spec_from_file_location("make_figures", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, draw in module.FIGURES.items():
        assert (script.parent / name).read_text() == draw(), f"run python {script.relative_to(ROOT)}"


def test_the_version_is_stated_once_and_in_the_changelog():
    assert f"## {flash_hopper.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert 'path = "src/flash_hopper/version.py"' in (ROOT / "pyproject.toml").read_text()


def test_the_licence_is_bsd_3_clause():
    text = (ROOT / "LICENSE").read_text()
    assert text.startswith("BSD 3-Clause License")
    assert "flash-hopper developers" in text
