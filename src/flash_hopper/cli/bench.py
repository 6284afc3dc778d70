"""`flash-hopper bench`: time ours and the installed peers over a suite of shapes.

Shows one line per shape and protocol, stores rows, draws figures and fills tables from stored rows. What is measured
and how: `testing/bench_suites.py`, `testing/bench_run.py`, `docs/measuring.md`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flash_hopper.cli.options import length_of, names_of, require_hopper
from flash_hopper.problem.errors import ArgumentError

if TYPE_CHECKING:
    from flash_hopper.compile.key import Plan
    from flash_hopper.testing.bench_rows import BenchRow, Summary
    from flash_hopper.testing.bench_run import Settings
    from flash_hopper.testing.bench_suites import BenchShape, Selection

MASKS = {"both": None, "full": False, "causal": True}


def bench(
    suite: Annotated[str, typer.Option(help="paper, train, host, cold, ragged, fp8 or fp8-accuracy.")] = "paper",
    direction: Annotated[
        str | None, typer.Option(help="forward, backward or both; by default both for train and ragged, else forward.")
    ] = None,
    providers: Annotated[
        str | None,
        typer.Option(
            help="Of ours, ours-out (forward), ours-det (backward), sdpa-flash, sdpa-cudnn, fa3, fa4; ours-block, ours-rows, ours-fast, "
            "ours-bf16, ours-rotary, ours-values, copy (fp8); by default all that fit."
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help="Of burst, steady, graph (paper, train, ragged, fp8); host-idle, host-busy; cold-import, cold-call."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    dims: Annotated[str | None, typer.Option(help="Head dims to keep, e.g. 64,128.")] = None,
    seqlens: Annotated[str | None, typer.Option(help="Lengths to keep, e.g. 512,1k,16k.")] = None,
    mask: Annotated[str, typer.Option(help="both, full or causal.")] = "both",
    cells: Annotated[
        int | None, typer.Option(help="Size of the paper suite: 18 (lengths 1k, 4k, 16k) or 36 (all).")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Launches per provider in burst and graph.")] = 12,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the steady loop.")] = 3.0,
    json: Annotated[Path | None, typer.Option(help="Store the rows here; also while it runs.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the rows; .svg, .png or .pdf; one file a protocol if there are several.")
    ] = None,
    from_json: Annotated[
        Path | None, typer.Option(help="Show stored rows (those of --protocol) instead of measuring.")
    ] = None,
    tables: Annotated[Path | None, typer.Option(help="Only fill the marked tables of this document.")] = None,
    pack: Annotated[
        Path | None, typer.Option(help="Only compile the kernels of these shapes into this pack; needs no GPU.")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to store where this is no git checkout.")] = None,
) -> None:
    """Time attention, forward or backward, against the installed peers; every result is checked first."""
    console = Console()
    if tables is not None:
        _fill_tables(tables, console)
        return
    if suite == "fp8-accuracy":
        _accuracy(names_of(dims), names_of(seqlens), json, plot, from_json, pack, commit, console)
        return
    if from_json is not None:
        from flash_hopper.testing.bench_rows import read_rows

        env, rows = read_rows(from_json)
        rows = [row for row in rows if protocol is None or row.protocol in names_of(protocol)]
        rows = [row for row in rows if direction in (None, "both", row.direction)]
        for row_group in _by_case(rows):
            console.print(_case_line(row_group), soft_wrap=True)
    else:
        from flash_hopper.testing.bench_run import DEFAULT_PROTOCOLS, Settings, check_protocols
        from flash_hopper.testing.bench_suites import bench_suite
        from flash_hopper.testing.environment import environment

        shapes = bench_suite(suite, _selection(dtype, dims, seqlens, mask, cells), direction)
        if pack is not None:
            _build_pack(shapes, pack, console)
            return
        protocols = names_of(protocol) or DEFAULT_PROTOCOLS[suite]
        check_protocols(suite, protocols)
        chosen = names_of(providers)
        _check_providers(chosen)
        require_hopper("bench")
        env = environment(commit)
        settings = Settings(chosen or None, protocols, rounds=rounds, steady_s=seconds)
        rows = _measure_all(shapes, settings, console, env, json)
    _show_summary(rows, console)
    if plot is not None:
        _draw(env, rows, plot, console)
    if any(row.error for row in rows if row.provider.startswith("ours")):
        raise typer.Exit(1)


def _build_pack(shapes: "Sequence[BenchShape]", out: Path, console: Console) -> None:
    """The kernels that ours needs for the shapes, in one library."""
    from flash_hopper.testing.bench_plans import plans_of

    _pack(plans_of(shapes), out, console)


def _pack(plans: "Sequence[Plan]", out: Path, console: Console) -> None:
    from flash_hopper.compile.pack import build_pack

    with Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), console=console) as progress:
        task = progress.add_task("compiling", total=len(plans))
        build_pack(plans, out, None, lambda name, done, _: progress.update(task, completed=done, description=name))
    console.print(f"{len(plans)} kernels: {out}. Serve them with FLASH_HOPPER_PACK={out.resolve()}", soft_wrap=True)


def _accuracy(
    dims: Sequence[str], seqlens: Sequence[str], json: Path | None, plot: Path | None, from_json: Path | None,
    pack: Path | None, commit: str | None, console: Console,
) -> None:  # fmt: skip
    """The fp8-accuracy suite: errors instead of times."""
    from flash_hopper.testing import fp8_accuracy
    from flash_hopper.testing.environment import environment

    if pack is not None:
        _pack(fp8_accuracy.plans_of(), pack, console)
        return
    if from_json is not None:
        env, rows = fp8_accuracy.read_rows(from_json)
    else:
        require_hopper("bench")
        env, rows = environment(commit), []
        chosen = [length_of(text) for text in dims] or fp8_accuracy.OUTLIER_DIMS
        for row in fp8_accuracy.measure("cuda", chosen, [length_of(text) for text in seqlens] or None):
            rows.append(row)
            errors = row.error or f"rmse {row.rmse:.3e}, relative {row.relative:.3%}"
            console.print(
                f"{row.experiment:8} d{row.d} {row.seqlen_k:6} {row.provider}, {row.form}: {escape(errors)}",
                soft_wrap=True,
            )
            if json is not None:
                fp8_accuracy.write_rows(json, env, rows)
    console.print(fp8_accuracy.render(rows), soft_wrap=True, markup=False, highlight=False)
    if plot is not None:
        from flash_hopper.testing.plots import plot_accuracy

        plot_accuracy(env, rows, plot)
        console.print(f"figure: {plot}")


def _measure_all(
    shapes: "Sequence[BenchShape]", settings: "Settings", console: Console, env: dict[str, Any], json: Path | None
) -> "list[BenchRow]":
    from flash_hopper.testing.bench_rows import write_rows
    from flash_hopper.testing.bench_run import measure
    from flash_hopper.testing.timing import GpuQueue

    queue = GpuQueue()
    rows: list[BenchRow] = []
    told: set[tuple[str, str]] = set()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("bench", total=len(shapes))
        for shape in shapes:
            progress.update(task, description=str(shape))
            new = list(measure(shape, settings, queue))
            rows += new
            for row in new:
                if row.error and (row.provider, row.error) not in told:
                    told.add((row.provider, row.error))
                    progress.console.print(f"[yellow]{row.provider}[/] {escape(row.error)}", soft_wrap=True)
            for group in _by_case(new):
                progress.console.print(_case_line(group), soft_wrap=True)
            if json is not None:
                write_rows(json, env, rows)
            progress.advance(task)
    if json is not None:
        console.print(f"rows: {json}")
    return rows


def _by_case(rows: "Sequence[BenchRow]") -> "list[list[BenchRow]]":
    """Rows of one shape and protocol together, in order."""
    groups: dict[tuple[Any, ...], list[BenchRow]] = {}
    for row in rows:
        groups.setdefault(row.cell, []).append(row)
    return list(groups.values())


def _case_line(rows: "Sequence[BenchRow]") -> str:
    """Shape, protocol, each provider's time and rate, ours against the best peer, and what determinism costs."""
    from flash_hopper.testing.bench_rows import compare, deterministic_costs

    first = rows[0]
    times = [_time_text(row) for row in rows if row.us is not None]
    notes = [
        f"[{'green' if c.ratio >= 1 else 'red'}]{c.ratio:.3f}x[/] of {c.other.provider}" for c in compare(rows)
    ] + [f"deterministic {c.ratio:.2f}x the time" for c in deterministic_costs(rows)]
    what = f"{first.dtype} {first.where:26} {first.direction:8} {first.protocol:11}"
    return "  ".join([f"{what} {'  '.join(times) or 'no provider could run'}", *notes])


def _time_text(row: "BenchRow") -> str:
    text = f"[bold]{row.provider}[/] {row.us:.1f} us"
    if row.tflops is not None:
        text += f" {row.tflops:.0f} TFLOP/s"
    if row.mhz is not None and row.watt is not None:
        text += f" ({row.mhz:.0f} MHz, {row.watt:.0f} W)"
    return text


def _show_summary(rows: "Sequence[BenchRow]", console: Console) -> None:
    from flash_hopper.testing.bench_rows import relative_rates, summarise

    for summary in summarise(rows):
        for line in _summary_lines(summary):
            console.print(line, soft_wrap=True)
    for rate in relative_rates(rows):
        row = rate.row
        console.print(
            f"[bold]{row.protocol} {row.direction}[/]: ours, d{row.kind} {'causal' if row.causal else 'full'} {row.column}: "
            f"[bold]{rate.ratio:.3f}[/] of its rate for {rate.base.column}",
            soft_wrap=True,
        )


def _summary_lines(summary: "Summary") -> list[str]:
    """Ours against the best peer, and the deterministic mode against ours; each if there is anything to compare."""
    lines = []
    name = f"[bold]{summary.protocol} {summary.direction}[/]"
    if summary.worst is not None:
        unmatched = f", {summary.unmatched} without a peer" if summary.unmatched else ""
        lines.append(
            f"{name}: ours / best peer, geometric mean of {summary.cells} cells{unmatched}: "
            f"[bold]{summary.geometric_mean:.3f}[/]; worst {summary.worst.ratio:.3f} "
            f"({summary.worst.ours.where}, {summary.worst.other.provider})"
        )
    if summary.deterministic_worst is not None:
        worst = summary.deterministic_worst
        lines.append(
            f"{name}: deterministic mode, time over ours, geometric mean: [bold]{summary.deterministic_mean:.3f}[/]; "
            f"worst {worst.ratio:.3f} ({worst.ours.where})"
        )
    return lines


def _draw(env: dict[str, Any], rows: "Sequence[BenchRow]", path: Path, console: Console) -> None:
    """One figure for each protocol and direction that has times."""
    from flash_hopper.testing.plots import plot_rows

    measured = [row for row in rows if row.us is not None]
    if not measured:
        raise ArgumentError("there is no measured row to plot")
    several = len({row.protocol for row in measured}) > 1, len({row.direction for row in measured}) > 1
    for names in dict.fromkeys((row.protocol, row.direction) for row in measured):
        suffix = "".join(f"-{name}" for name, is_needed in zip(names, several, strict=True) if is_needed)
        target = path.with_stem(path.stem + suffix)
        plot_rows(env, [row for row in measured if (row.protocol, row.direction) == names], target)
        console.print(f"figure: {target}")


def _fill_tables(document: Path, console: Console) -> None:
    from flash_hopper.testing.tables import update_tables

    if not document.is_file():
        raise ArgumentError(f"tables must name a document, got {document}")
    changed = update_tables(document, document.resolve().parent)
    console.print(f"{document}: {'tables renewed' if changed else 'tables are up to date'}")


def _selection(dtype: str, dims: str | None, seqlens: str | None, mask: str, cells: int | None) -> "Selection":
    from flash_hopper.problem.dtypes import DType
    from flash_hopper.testing.bench_suites import MAIN_SEQLENS, Selection

    if dtype not in {str(d) for d in DType}:
        raise ArgumentError(f"dtype must be bf16 or fp16, got {dtype!r}")
    if mask not in MASKS:
        raise ArgumentError(f"mask must be one of {', '.join(MASKS)}, got {mask!r}")
    if cells not in (None, 18, 36):
        raise ArgumentError(f"cells must be 18 or 36, got {cells}")
    lengths = [length_of(text) for text in names_of(seqlens)] or (MAIN_SEQLENS if cells == 18 else None)
    return Selection(DType(dtype), [length_of(text) for text in names_of(dims)] or None, lengths, MASKS[mask])


def _check_providers(names: Sequence[str]) -> None:
    from flash_hopper.testing.providers import NAMES

    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ArgumentError(f"providers must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
