"""`flash-hopper tune`: find the tile for a shape on this GPU, and make a row of it for FLASH_HOPPER_TILES.

What is tried and how it is measured: `plan/candidates.py`, `testing/tune.py`, `docs/tuning.md`.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flash_hopper.cli.options import length_of, require_hopper

if TYPE_CHECKING:
    from flash_hopper.plan.forward import ForwardPlan
    from flash_hopper.testing.bench_suites import BenchShape
    from flash_hopper.testing.tune import Measured, Tuning

SHOWN = 10
INTERRUPTED = 130

Tell = Callable[[str, int, int], None]


def tune(
    d: Annotated[int, typer.Option(help="Head dim of q and k.")] = 128,
    dv: Annotated[int | None, typer.Option(help="Head dim of v; default: that of q.")] = None,
    mask: Annotated[str, typer.Option(help="full, causal, or window:N (causal, N keys to the left).")] = "causal",
    seqlen: Annotated[
        str, typer.Option(help="Length of queries and keys, e.g. 4096 or 4k; the longest with --lengths.")
    ] = "4k",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences; default: 16k tokens in all.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Query heads; default: 2048 features.")] = None,
    heads_k: Annotated[int | None, typer.Option(min=1, help="Key and value heads; default: the query heads.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16 or fp16.")] = "bf16",
    lengths: Annotated[
        str | None, typer.Option(help="A packed batch of such lengths: equal, zipf, one_long, ... or 100.4096.7.")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Candidates to try, the most promising first.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Launches of each of the best.")] = 12,
    json: Annotated[Path | None, typer.Option(help="Store what was measured here; also while it runs.")] = None,
    write: Annotated[
        Path | None, typer.Option(help="Add a row for the best to this file; use it with FLASH_HOPPER_TILES.")
    ] = None,
    pack: Annotated[Path | None, typer.Option(help="Only compile the candidates into this pack; needs no GPU.")] = None,
    commit: Annotated[str | None, typer.Option(help="Commit to store where this is no git checkout.")] = None,
) -> None:
    """Find the fastest forward tile for a shape on this GPU; every candidate's result is checked first."""
    from flash_hopper.plan.candidates import candidates
    from flash_hopper.testing.tune import Tuning, tune_shape

    console = Console()
    shape = tune_shape(dtype, d, dv, mask, length_of(seqlen), batch, heads, heads_k, lengths)
    plans = candidates(shape.problem, most)
    if pack is not None:
        _build_pack(plans, pack, console)
        return
    require_hopper("tune", "; --pack compiles the candidates for one without it")
    from flash_hopper.testing.environment import environment

    env = environment(commit)
    if write is not None:
        _check_addable(write, shape, Tuning(plans), env)
    tuning = Tuning(plans)
    console.print(f"{shape}: {len(plans)} candidates", soft_wrap=True)
    is_complete = _run(tuning, shape, rounds, lambda: _store(json, env, shape, tuning), console)
    _show(tuning, shape, console)
    _store(json, env, shape, tuning)
    if json is not None:
        console.print(f"rows: {json}", soft_wrap=True)
    if not is_complete:
        console.print(
            "[yellow]interrupted[/]: what was measured until then is shown, no row is written", soft_wrap=True
        )
        raise typer.Exit(INTERRUPTED)
    if write is not None:
        _write(write, shape, tuning, env, console)


def _build_pack(plans: "Sequence[ForwardPlan]", out: Path, console: Console) -> None:
    from flash_hopper.compile.key import Plan
    from flash_hopper.compile.pack import build_pack
    from flash_hopper.testing.tune import kernels_of, left_out_by

    failures: dict[Plan, str] = {}
    with _progress(console) as stage:
        build_pack(kernels_of(plans), out, None, stage("compiling"), failures=failures)
    gone = left_out_by(plans, failures)
    console.print(
        f"{len(plans) - len(gone)} candidates, {len(gone)} left out by the compiler: {out}. Run the same command without --pack "
        f"and with FLASH_HOPPER_PACK={out.resolve()}",
        soft_wrap=True,
    )


def _run(tuning: "Tuning", shape: "BenchShape", rounds: int, store: Callable[[], None], console: Console) -> bool:
    """Compile, check and measure. False if the user interrupted it; the tuning holds what was measured until then."""
    from flash_hopper.testing.timing import GpuQueue
    from flash_hopper.testing.tune import PlanCalls, left_out

    try:
        with _progress(console) as stage:
            tuning.leave_out(left_out(tuning.plans, stage("compiling")))
            tuning.check(PlanCalls(shape), stage("checking"))
            told = stage("measuring")

            def tell(name: str, done: int, total: int) -> None:
                told(name, done, total)
                store()

            tuning.measure(GpuQueue(), tell, rounds=rounds)
    except KeyboardInterrupt:
        return False
    return True


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str], Tell]]:
    """A function that begins a stage and gives what is to be called after each step of it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:

        def stage(what: str) -> Tell:
            task = progress.add_task(what, total=None)

            def tell(name: str, done: int, total: int) -> None:
                progress.update(task, completed=done, total=total, description=f"{what} {name}")

            return tell

        yield stage


def _show(tuning: "Tuning", shape: "BenchShape", console: Console) -> None:
    """The best, the tables' choice, and how many candidates fell away and why."""
    results = tuning.results()
    if results:
        console.print(_table(tuning, results, shape.flops))
    gone = list(tuning.errors.values())
    wrong = sum(reason.startswith("wrong") for reason in gone)
    absent = sum(reason.startswith("in no pack") for reason in gone)
    parts = [
        f"{len(tuning.plans)} candidates", f"{len(results)} measured", f"{len(gone) - wrong - absent} left out by the compiler",
        f"{absent} in no pack", f"{wrong} with wrong results",
    ]  # fmt: skip
    console.print(", ".join(parts), soft_wrap=True)
    for plan, reason in tuning.errors.items():
        if reason.startswith("wrong"):
            console.print(f"[red]{plan.name}[/] {escape(reason)}", soft_wrap=True)


def _table(tuning: "Tuning", results: "list[Measured]", flops: float) -> Table:
    from flash_hopper.plan.budget import PLACE_WORDS

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("rows x keys", "turns", "Q stages", "K/V stages", "O", "us", "TFLOP/s", "gain", "launches", ""):
        table.add_column(name, justify="left" if name in ("rows x keys", "turns", "O", "") else "right")
    shown = [m for i, m in enumerate(results) if i < SHOWN or m.plan == tuning.table]
    for m in shown:
        x, is_table = m.plan.layout, m.plan == tuning.table
        times = f"{x.streams} x " if x.streams > 1 else ""
        table.add_row(
            f"{times}{x.m} x {x.n}", "yes" if x.has_pingpong else "no", str(x.q_stages), str(x.kv_stages),
            PLACE_WORDS[x.o_place], f"{m.us:.1f}", f"{flops / m.us * 1e-6:.0f}", f"{m.gain:.3f}", str(m.launches),
            "the tables' choice" if is_table else "", style="bold" if is_table else None,
        )  # fmt: skip
    return table


def _store(path: Path | None, env: dict[str, Any], shape: "BenchShape", tuning: "Tuning") -> None:
    from flash_hopper.testing.bench_rows import write_rows
    from flash_hopper.testing.tune import rows_of

    if path is not None:
        write_rows(path, env, rows_of(shape, tuning))


def _check_addable(path: Path, shape: "BenchShape", tuning: "Tuning", env: dict[str, Any]) -> None:
    """Raise ArgumentError before anything is measured if the file is bad or has a row in the way."""
    from flash_hopper.plan.own_tiles import rows_beside
    from flash_hopper.testing.tune import Measured, own_row_of

    rows_beside(path, own_row_of(shape, Measured(tuning.table, 1.0, 1.0, 0, True), env["gpu"], env["date"]))


def _write(path: Path, shape: "BenchShape", tuning: "Tuning", env: dict[str, Any], console: Console) -> None:
    from flash_hopper.plan.own_tiles import add_row
    from flash_hopper.testing.tune import MIN_GAIN, own_row_of

    best = tuning.winner()
    if best is None:
        console.print(f"{path}: no row, as nothing gains {MIN_GAIN - 1:.0%} over the tables' choice", soft_wrap=True)
        return
    row = own_row_of(shape, best, env["gpu"], env["date"][:10])
    add_row(path, row)
    kind = "ragged" if row.is_ragged else "dense"
    console.print(
        f"{path}: {best.plan.layout} for head dims {row.hdim}/{row.hdimv}, {row.mask}, {kind}, {row.rows_from} to {row.rows_to} rows on "
        f"{row.gpu}. Use it with FLASH_HOPPER_TILES={path.resolve()}",
        soft_wrap=True,
    )
