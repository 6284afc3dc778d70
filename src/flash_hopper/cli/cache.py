"""`flash-hopper cache`: the compiled kernels on disk: list, clear, verify."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from flash_hopper import settings
from flash_hopper.compile.disk import LIBRARY, OBJECT, DiskCache, Record
from flash_hopper.compile.key import key_of_text
from flash_hopper.compile.target import toolkit
from flash_hopper.problem.errors import CacheError, MissingDependencyError

cache_app = typer.Typer(help="The compiled kernels on disk.", no_args_is_help=True)

STALE_S = 600.0  # what a writer left unfinished for so long, it will not finish
Folder = Annotated[Path | None, typer.Option(help=f"Cache folder; default: {settings.CACHE} or the user cache folder.")]


@cache_app.command("list")
def list_kernels(folder: Folder = None) -> None:
    """List the kernels on disk."""
    cache = _cache(folder)
    records = _records(cache)
    current = _current(records)
    table = Table(box=None)
    for column in ("kernel", "key", "DSL", "registers", "seconds", "KB", "made", "current"):
        table.add_column(column, justify="right" if column in ("registers", "seconds", "KB") else "left", no_wrap=True)
    for r in records:
        table.add_row(
            r.symbol,
            r.key[:8],
            f"{r.dsl_version} {r.flavour}",
            str(r.registers),
            f"{r.compile_seconds:.1f}",
            str(r.bytes // 1000),
            r.created[:16].replace("T", " "),
            "yes" if r.stem in current else "no",
        )
    console = _wide_console(table)
    console.print(table)
    total = sum(r.bytes for r in records)
    console.print(f"{len(records)} kernels, {total / 1e6:.1f} MB in {cache.folder}", soft_wrap=True)


@cache_app.command()
def clear(
    folder: Folder = None,
    old: Annotated[bool, typer.Option("--old", help="Only kernels of other sources, compilers or targets.")] = False,
) -> None:
    """Delete the kernels on disk."""
    cache = _cache(folder)
    stems = cache.stems()
    if old:
        current = _current(_records(cache))
        stems = [stem for stem in stems if stem not in current]
    try:
        for stem in stems:
            cache.remove(stem)
        cache.remove_leftovers(STALE_S)
    except OSError as error:
        raise CacheError(f"{cache.folder} cannot be cleared: {error}") from error
    Console().print(f"{len(stems)} kernels deleted from {cache.folder}", soft_wrap=True)


@cache_app.command()
def verify(folder: Folder = None) -> None:
    """Check every kernel on disk against its checksum; exit status 1 if one is damaged."""
    cache = _cache(folder)
    console = Console()
    damaged = [stem for stem in cache.stems() if not _is_intact(cache, stem)]
    for stem in damaged:
        console.print(f"damaged, will be compiled again when needed: {stem}", soft_wrap=True)
    console.print(
        f"{len(cache.stems()) - len(damaged)} kernels intact, {len(damaged)} damaged in {cache.folder}", soft_wrap=True
    )
    if damaged:
        raise typer.Exit(1)


def _cache(folder: Path | None) -> DiskCache:
    chosen = folder or settings.cache_folder()
    if chosen is None:
        raise CacheError(f"the disk cache is off ({settings.CACHE}); name a folder with --folder")
    return DiskCache(chosen)


def _records(cache: DiskCache) -> list[Record]:
    return [record for record in map(cache.record, cache.stems()) if record is not None]


def _wide_console(table: Table) -> Console:
    """A console on which the table keeps its columns, also in a narrow terminal or a pipe."""
    console = Console()
    wanted = console.measure(table, options=console.options.update(max_width=1000)).maximum
    return Console(width=max(console.width, wanted), soft_wrap=True)


def _current(records: list[Record]) -> set[str]:
    """Entries that the sources and the compiler of today would be served from."""
    try:
        kit = toolkit()
    except MissingDependencyError:
        return set()
    return {r.stem for r in records if r.key == key_of_text(r.plan, kit)}


def _is_intact(cache: DiskCache, stem: str) -> bool:
    record = cache.record(stem)
    if record is None or not record.files:
        return False
    present = [suffix for suffix in (OBJECT, LIBRARY) if cache.path(stem, suffix).exists()]
    return set(present) == set(record.files) and all(cache.has(record, suffix) for suffix in record.files)
