"""Figures from stored bench rows.

One panel per head dim (and head counts, if queries share keys) and mask, one line per provider over the length. Needs the `plot` extra (matplotlib).
"""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flash_hopper.problem.errors import ArgumentError, MissingDependencyError
from flash_hopper.testing.bench_rows import OURS, BenchRow
from flash_hopper.testing.bench_suites import QUANTISE
from flash_hopper.testing.fp8_accuracy import AccuracyRow
from flash_hopper.testing.tables import LABELS, columns_of, label_of, unit_of, value_of

COLOURS = {
    "ours": "#d1495b",
    "ours-out": "#e8964f",
    "ours-det": "#e8964f",
    "ours-block": "#e8964f",
    "ours-rows": "#edae49",
    "ours-fast": "#b5651d",
    "ours-rotary": "#e8964f",
    "ours-values": "#edae49",
    "ours-bf16": "#f0a6ae",
    "copy": "#333333",
    "fa3": "#30638e",
    "fa4": "#6ba368",
    "sdpa-cudnn": "#8e7dbe",
    "sdpa-flash": "#9a9a9a",
}
INK, GRID = "#333333", "#e4e4e4"


def plot_rows(env: dict[str, Any], rows: Sequence[BenchRow], path: Path) -> None:
    """Draw TFLOP/s (TB/s of quantisations, us for host protocols) of rows of one protocol and direction and write an svg, png or pdf.

    Raises MissingDependencyError without matplotlib and ArgumentError if there is nothing to draw.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot needs matplotlib: pip install 'flash-hopper[plot]'")
    held = list(dict.fromkeys(f"{row.protocol} {row.direction}" for row in rows if row.us is not None))
    if len(held) != 1:
        raise ArgumentError(f"a figure shows one protocol and direction, the rows hold {', '.join(held) or 'none'}")
    from matplotlib import rc_context  # an optional package
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.us is not None]
    kinds, masks = list(dict.fromkeys(row.kind for row in measured)), sorted({row.causal for row in measured})
    figure = Figure(figsize=(3.7 * len(kinds) + 0.4, 2.9 * len(masks) + 0.8), layout="constrained")
    axes: Any = figure.subplots(len(masks), len(kinds), squeeze=False)
    for line, causal in enumerate(masks):
        for column, kind in enumerate(kinds):
            panel = [row for row in measured if row.kind == kind and row.causal == causal]
            mask = "" if panel and panel[0].direction == QUANTISE else ", causal" if causal else ", full"
            _draw_panel(axes[line][column], panel, f"head dim {kind}{mask}")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False, fontsize=9)
    first = measured[0]
    caption = f"{env.get('gpu') or 'no GPU'}, {first.direction}, {first.dtype}, protocol {first.protocol}"
    figure.supxlabel(caption, fontsize=8, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    # without a date and with fixed ids the same rows give the same file
    with rc_context({"svg.hashsalt": "flash-hopper"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=160)


def plot_accuracy(env: dict[str, Any], rows: Sequence[AccuracyRow], path: Path) -> None:
    """Draw errors of the fp8-accuracy suite: relative error by number of keys, and root mean square errors with outliers.

    Raises as `plot_rows`.
    """
    if find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot needs matplotlib: pip install 'flash-hopper[plot]'")
    measured = [row for row in rows if row.relative is not None and row.rmse is not None]
    if not measured:
        raise ArgumentError("there is no measured row to plot")
    from matplotlib import rc_context  # an optional package
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.4, 3.6), layout="constrained")
    axes: Any = figure.subplots(1, 2)
    for provider, label in (("ours", "flash-hopper"), ("fa3", "FA3 C++")):
        of_provider = [row for row in measured if row.experiment == "length" and row.provider == provider]
        for style, d in zip(("-", "--", ":"), sorted({row.d for row in of_provider}), strict=False):
            line = sorted((row.seqlen_k, 100 * (row.relative or 0.0)) for row in of_provider if row.d == d)
            axes[0].plot(
                *zip(*line, strict=True),
                style,
                color=COLOURS[provider],
                marker="o",
                markersize=3,
                label=f"{label}, d {d}",
            )
    axes[0].set_xscale("log", base=2)
    axes[0].set_yscale("log")
    axes[0].set_title("values of one sign: error of out, %", fontsize=10, color=INK)
    axes[0].set_xlabel("keys", fontsize=9, color=INK)
    axes[0].legend(frameon=False, fontsize=8)
    outliers = [row for row in measured if row.experiment == "outliers" and row.provider == "ours"]
    forms = list(dict.fromkeys(row.form for row in outliers))
    for colour, d in zip(("#d1495b", "#30638e", "#6ba368"), sorted({row.d for row in outliers}), strict=False):
        longest = max(row.seqlen_k for row in outliers if row.d == d)
        points = {row.form: row.rmse for row in outliers if (row.d, row.seqlen_k) == (d, longest)}
        axes[1].plot(
            [points.get(form) for form in forms],
            range(len(forms)),
            "o",
            color=colour,
            label=f"d {d}, {longest // 1024}k",
        )
    axes[1].set_yticks(range(len(forms)), forms)
    axes[1].invert_yaxis()
    axes[1].set_xscale("log")
    axes[1].set_title("outliers: root mean square error", fontsize=10, color=INK)
    axes[1].legend(frameon=False, fontsize=8)
    for axis in axes:
        axis.tick_params(labelsize=8, colors=INK, length=0)
        axis.grid(color=GRID, linewidth=0.8)
        axis.set_axisbelow(True)
        for side in axis.spines.values():
            side.set_visible(False)
    figure.supxlabel(f"{env.get('gpu') or 'no GPU'}, e4m3 forward", fontsize=8, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "flash-hopper"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=160)


def _draw_panel(axis: Any, rows: Sequence[BenchRow], title: str) -> None:
    unit = unit_of(rows)
    columns = columns_of(rows)
    for provider in (p for p in LABELS if any(row.provider == p for row in rows)):
        points = sorted((r for r in rows if r.provider == provider), key=lambda row: columns.index(row.column))
        is_ours = provider == OURS
        axis.plot(
            [columns.index(row.column) for row in points],
            [value_of(row, unit) for row in points],
            color=COLOURS[provider],
            label=label_of(provider, rows).replace("`", ""),
            marker="o",
            markersize=4.5 if is_ours else 3,
            linewidth=2.2 if is_ours else 1.3,
            zorder=3 if is_ours else 2,
        )
    axis.set_title(title, fontsize=10, color=INK)
    axis.set_xticks(range(len(columns)), [column.replace(", ", "\n").replace(" w", "\nw") for column in columns])
    axis.set_ylabel(unit, fontsize=9, color=INK)
    axis.set_ylim(bottom=0)
    axis.tick_params(labelsize=8, colors=INK, length=0)
    axis.grid(axis="y", color=GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(GRID)
