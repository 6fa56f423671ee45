"""The paper's figures, drawn from our runs: one function per kind of figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedpews.report.colors import USUAL, Color, colors
from fedpews.report.curves import plot_curves, plot_over_time
from fedpews.report.heatmap import plot_heatmap
from fedpews.report.split import plot_split
from fedpews.report.style import new_figure
from fedpews.results.records import Record
from fedpews.paper.cells import Found
from fedpews.paper.measures import MEASURES, halves, printed
from fedpews.paper.paper_curves import plot_paper
from fedpews.paper.study import Study
from fedpews.tasks.names import Goal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Table = Mapping[tuple[str, str], Found]
"""(row, column) → what is there."""


def draw(study: Study, table: Table, data_dir: Path | None = None) -> list[Figure]:
    """Every figure of a study for which there is a run to draw."""
    figures, tints = [], _tints(study, table)
    for figure in study.figures:
        # --quick leaves rows out that a figure names
        rows = [row for row in figure.options.get("rows", study.rows) if row in study.rows]
        if any(found.runs for (row, _), found in table.items() if row in rows):
            options = {**figure.options, "rows": rows, "data_dir": data_dir, "tints": tints}
            figures.append(KINDS[figure.kind](study, table, options))
    return figures


def _tints(study: Study, table: Table) -> dict[str, Color]:
    """A colour for each row, the same in all panels and figures; a usual method's first row has that method's own."""
    known: dict[str, str] = {}  # label → what its colour is chosen by
    named = [row for figure in study.figures for row in figure.options.get("rows", []) if row in study.rows]
    # rows that a figure names come first: with more rows than colours, those must not share one
    for row in dict.fromkeys([*named, *study.rows]):
        label = study.row_label(row)
        method = next((found.cell.experiment.method.name for (r, _), found in table.items() if r == row), "")
        known[label] = method if method in USUAL and method not in known.values() else label
    chosen = colors(list(known.values()))
    return {label: chosen[key] for label, key in known.items()}


def _records(found: Found) -> list[Record]:
    return [record for run in found.runs.values() for record in run]


def _lines(
    study: Study, table: Table, column: str, rows: Sequence[str] | None = None
) -> dict[str, list[Record]]:
    """Label → records of the rows that have runs in a column (or serve every column)."""
    found = {}
    for row in rows or study.rows:
        cell = table.get((row, study.column_for(row, column)))
        if cell is not None and cell.runs:
            found[study.row_label(row)] = _records(cell)
    return found


def _panels(count: int, height: float = 3.4, most: int = 4, rows: int = 1) -> tuple[Figure, list[Any]]:
    across = min(count, most)
    down = math.ceil(count / across) * rows
    figure = new_figure(max(5.0, 3.7 * across), height * down)
    axes = figure.subplots(down, across, squeeze=False)
    flat = [place for line in axes for place in line]
    for place in flat[count * rows :]:
        place.set_visible(False)
    return figure, flat


def _curves(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """A panel per column (and per key): each row's mean over seeds."""
    keys, smooth = options.get("keys", ["accuracy"]), options.get("smooth", 1)
    columns = [c for c in study.columns if _lines(study, table, c, options["rows"])]
    figure, places = _panels(len(columns) * len(keys))
    panels = [(column, key) for column in columns for key in keys]
    for axes, (column, key) in zip(places, panels, strict=False):
        lines = _lines(study, table, column, options["rows"])
        target = _target(table, column) if options.get("target") and key == "accuracy" else None
        plot_curves(axes, lines, key, target=target, smooth=smooth, tints=options["tints"])
        if key == "accuracy":
            plot_paper(axes, study, column, options["rows"])
        axes.set_title(study.column_label(column), fontsize=10)
    _shared_legend(figure)
    return figure


def _shared_legend(figure: Figure) -> None:
    """One legend below all panels, since a label has one colour in all of them: inside it would hide the curves."""
    known: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        known |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in known}
    columns = min(len(known), 4 if len(figure.axes) > 2 else 2)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=columns, fontsize=8)


def _target(table: Table, column: str) -> float | None:
    return next(found.cell.experiment.goal.value for (_, c), found in table.items() if c == column)


def _time(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """Accuracy against seconds, one seed of each run."""
    columns = [c for c in study.columns if _lines(study, table, c)]
    figure, places = _panels(len(columns))
    for axes, column in zip(places, columns, strict=False):
        plot_over_time(axes, _lines(study, table, column), options["tints"])
        axes.set_title(study.column_label(column), fontsize=10)
    _shared_legend(figure)
    return figure


def _heatmap(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """Left: the curves of some rows in one column. Right: every cell's mean."""
    measure = MEASURES[options.get("measure", "final")]
    means = [
        [
            fmean([measure.read(run, Goal()) for run in table[row, c].runs.values()])
            if (row, c) in table and table[row, c].runs
            else math.nan
            for c in study.columns
        ]
        for row in study.rows
    ]
    figure = new_figure(12, max(3.5, 1.4 + 0.34 * len(study.rows)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    column = options.get("curves_column", next(iter(study.columns)))
    if column in study.columns:
        rows = options.get("curves_rows")
        plot_curves(left, _lines(study, table, column, rows), tints=options["tints"])
        plot_paper(left, study, column, rows or [*study.rows])
        left.set_title(study.column_label(column), fontsize=10)
        left.legend(fontsize=8)
    labels = [study.row_label(row) for row in study.rows]
    plot_heatmap(right, means, labels, [study.column_label(c) for c in study.columns])
    right.set_title(measure.label, fontsize=10)
    return figure


def _dots(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """A row's mean and deviation beside the paper's, a panel per column: means so close would be bars of one length."""
    measure_name = options.get("measure", "final")
    measure = MEASURES[measure_name]
    columns = [c for c in study.columns if _lines(study, table, c)]
    figure, places = _panels(len(columns), most=2, height=1.3 + 0.34 * len(study.rows))
    for axes, column in zip(places, columns, strict=False):
        rows = [row for row in study.rows if column in study.columns_of(row)]
        sides: dict[str, dict[int, tuple[float, float]]] = {"here": {}, "the paper": {}}
        for i, row in enumerate(rows):
            values = [measure.read(run, Goal()) for run in table[row, column].runs.values()]
            if values:
                sides["here"][i] = fmean(values), stdev(values) if len(values) > 1 else 0.0
            text = study.paper_number(measure_name, row, column)
            mean, deviation = map(printed, halves(text))
            if math.isfinite(mean):
                sides["the paper"][i] = mean, deviation if math.isfinite(deviation) else 0.0
        for (label, found), shift, look in zip(sides.items(), (-0.13, 0.13), ("o", "s"), strict=True):
            axes.errorbar(
                [mean for mean, _ in found.values()],
                [i + shift for i in found],
                xerr=[deviation for _, deviation in found.values()],
                fmt=look,
                color="C0" if label == "here" else "0.6",
                capsize=3,
                label=label,
            )
        axes.set_yticks(range(len(rows)), [study.row_label(row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.set(xlabel=measure.label, title=study.column_label(column))
    _shared_legend(figure)
    return figure


def _clients(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """The global model on everything, then on each client's own mix of classes."""
    column = next(iter(study.columns))
    lines = _lines(study, table, column)
    names = options["clients"]
    figure, places = _panels(1 + len(names))
    plot_curves(places[0], lines, tints=options["tints"])
    places[0].set_title("all", fontsize=10)
    for client, name in enumerate(names):
        plot_curves(places[client + 1], lines, "client_accuracy", client, tints=options["tints"])
        places[client + 1].set_title(name, fontsize=10)
    for axes in places:
        axes.legend(fontsize=8)
    return figure


def _splits(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """Above, who holds what in each column; below, the curves."""
    from fedpews.build import load_data

    columns = [c for c in study.columns if _lines(study, table, c)]
    figure = new_figure(3.4 * len(columns), 7)
    places = figure.subplots(2, len(columns), squeeze=False)
    for k, column in enumerate(columns):
        found = next(cell for (_, c), cell in table.items() if c == column and cell.runs)
        labels = load_data(found.cell.experiment, data_dir=options.get("data_dir"))
        plot_split(places[0][k], labels.counts().tolist())
        places[0][k].set_title(study.column_label(column), fontsize=10)
        plot_curves(places[1][k], _lines(study, table, column), tints=options["tints"])
        places[1][k].legend(fontsize=8)
    return figure


def _activations(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """Per client and layer: each neuron's activation over the rounds, of one row and its first seed."""
    row = options["row"]
    found = table[row, next(iter(study.columns))]
    if not found.runs:
        return new_figure(4, 1)
    records = [record for record in next(iter(found.runs.values())) if "activations" in record]
    clients, layers = len(records[0]["activations"]), len(records[0]["activations"][0])
    figure = new_figure(3.1 * layers, 2.5 * clients)
    places = figure.subplots(clients, layers, squeeze=False)
    for i in range(clients):
        for k in range(layers):
            image = list(zip(*[record["activations"][i][k] for record in records], strict=True))
            extent = (0.5, len(records) + 0.5, len(image) - 0.5, -0.5)
            places[i][k].imshow(image, aspect="auto", cmap="magma", extent=extent, interpolation="nearest")
            warm = [record["round"] for record in records if record["phase"] == "warmup"]
            if warm:
                places[i][k].axvline(max(warm) + 0.5, color="w", linestyle="--", linewidth=1)
            places[i][k].axhline(len(image) / 2 - 0.5, color="w", linestyle=":", linewidth=0.6)
            places[i][k].set_title(f"client {i + 1}, FC{k + 1}", fontsize=9)
    figure.supxlabel("round")
    figure.supylabel("neuron")
    figure.suptitle(study.row_label(row))
    return figure


def _cost(study: Study, table: Table, options: Mapping[str, Any]) -> Figure:
    """Seconds of every round, and the part of the network that a client trains in it."""
    columns = [c for c in study.columns if _lines(study, table, c)]
    figure, places = _panels(len(columns), rows=2, most=4)
    for k, column in enumerate(columns):
        lines = _lines(study, table, column)
        plot_curves(places[k], lines, "seconds", tints=options["tints"])
        places[k].set_yscale("log")
        plot_curves(places[len(columns) + k], lines, "density", tints=options["tints"])
        places[k].set_title(study.column_label(column), fontsize=10)
        places[k].legend(fontsize=8)
    return figure


KINDS: dict[str, Callable[[Study, Table, Mapping[str, Any]], Figure]] = {
    "curves": _curves,
    "time": _time,
    "heatmap": _heatmap,
    "dots": _dots,
    "clients": _clients,
    "splits": _splits,
    "activations": _activations,
    "cost": _cost,
}
