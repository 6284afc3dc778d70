"""`flash-hopper compile`: kernels ahead of time, into the disk cache or into a pack. Needs the DSL, no GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_hopper.problem.errors import ArgumentError

if TYPE_CHECKING:
    from flash_hopper.compile.key import Plan


def compile_kernels(
    preset: Annotated[str | None, typer.Option(help="A named set: paper, common, training, varlen or all.")] = None,
    suite: Annotated[
        str | None, typer.Option(help="What this suite of `verify` runs, e.g. forward, backward or ragged.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Pack to write (a .so); default: fill the disk cache.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes, 0.6 GB each; default: one a core.")] = None,
) -> None:
    """Compile kernels ahead of time: into the disk cache, or with --out into a pack that needs no compiler."""
    from flash_hopper.compile.pack import build_pack
    from flash_hopper.compile.parallel import fill_cache

    plans = _plans(preset, suite)
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=len(plans))

        def advance(name: str, done: int, total: int) -> None:
            progress.update(task, completed=done, description=name)

        if out is None:
            paths = fill_cache(plans, jobs, advance)
        else:
            pack = build_pack(plans, out, jobs, advance)
    if out is None:
        console.print(f"{len(paths)} kernels in {paths[0].parent}", soft_wrap=True)
    else:
        size = pack.path.stat().st_size
        console.print(
            f"{len(pack)} kernels, {size / 1e6:.1f} MB: {pack.path} (DSL {pack.manifest.dsl_version} {pack.manifest.flavour}). "
            f"Serve it with FLASH_HOPPER_PACK={pack.path.resolve()}",
            soft_wrap=True,
        )


def _plans(preset: str | None, suite: str | None) -> "list[Plan]":
    from flash_hopper.compile.presets import PRESETS, preset_plans

    if preset is None and suite is None:
        choices = "; ".join(f"--preset {name}: {what}" for name, what in PRESETS.items())
        raise ArgumentError(f"say what to compile: {choices}; or --suite forward")
    plans: list[Plan] = [*preset_plans(preset)] if preset is not None else []
    if suite is not None:
        from flash_hopper.testing.suites import plans_of
        from flash_hopper.testing.suites import suite as cases_of

        plans += plans_of(cases_of(suite))
    return list(dict.fromkeys(plans))
