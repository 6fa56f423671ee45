"""The paper's figures, drawn from our runs: one function for each kind, with the paper's curves beside ours.

The paper's curves (``curves.json``) were read from the published figures pixel by pixel, to about half a point and one
round; they are means over three seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from fedpews.config import STUDIES
from fedpews.paper.claims import Outcome
from fedpews.paper.measures import MEASURES, mean, printed
from fedpews.paper.study import Study
from fedpews.report.plots import (
    OUTCOMES,
    USUAL,
    Color,
    colors,
    curve,
    new_figure,
    plot_curves,
    plot_differences,
    plot_heatmap,
)
from fedpews.results.records import Record
from fedpews.results.statistics import Difference, corrected, paired_difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[list[int], list[float]]
"""Rounds and accuracies in percent."""

NAMES = {"fedavg": "FedAvg", "fedavg+pews": "FedPeWS", "fedavg+pews-fixed": "FedPeWS-Fixed"}
"""The paper's names of the methods that it drew."""


@cache
def paper_curves() -> dict[str, dict[str, Curve]]:
    """Figure → method → its curve.

    >>> sorted(paper_curves()["four-clients"])
    ['fedavg', 'fedavg+pews']
    """
    curves: dict[str, dict[str, Curve]] = json.loads((resources.files(STUDIES) / "curves.json").read_text())
    return curves


def curve_of(study: Study, row: str, column: str) -> Curve | None:
    """The paper's curve of a cell, if it drew one and the study has the paper's scale."""
    if study.scale:
        return None
    figure, method = study.columns[column].drawn, study.rows[row].drawn
    return paper_curves().get(figure or "", {}).get(method or "")


def distance(records: Sequence[Record], paper: Curve) -> float:
    """Root mean square difference between our mean curve and the paper's, in points, over the paper's rounds."""
    rounds, mean, _ = curve(records)
    ours, theirs = dict(zip(rounds, mean, strict=True)), dict(zip(*paper, strict=True))
    both = [(ours[t] - value) ** 2 for t, value in theirs.items() if t in ours]
    return fmean(both) ** 0.5 if both else float("nan")


def plot_paper(axes: Any, study: Study, column: str, rows: Sequence[str]) -> None:
    """The paper's curves, dashed, each in the colour of the first of our rows that it belongs to."""
    drawn = set()
    colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
    for row in rows:
        paper, method = curve_of(study, row, column), study.rows[row].drawn
        if paper is not None and method not in drawn and study.row_label(row) in colours:
            drawn.add(method)
            colour = colours[study.row_label(row)]
            label = f"the paper: {NAMES.get(method or '', method)}"
            axes.plot(*paper, color=colour, linestyle=(0, (3, 1.5)), linewidth=1.1, label=label)


@dataclass(frozen=True)
class _View:
    """What a figure is drawn from."""

    outcome: Outcome
    options: Mapping[str, Any]
    rows: Sequence[str]
    tints: Mapping[str, Color]

    @property
    def study(self) -> Study:
        return self.outcome.study

    @property
    def columns(self) -> list[str]:
        """The columns that have runs of the rows."""
        return [column for column in self.study.columns if self.lines(column)]

    def lines(self, column: str, rows: Sequence[str] | None = None) -> dict[str, list[Record]]:
        """Label → records of the rows that have runs in a column, and of baselines."""
        results = {self.study.row_label(row): self.outcome.result(row, column) for row in rows or self.rows}
        return {label: result.records for label, result in results.items() if result and result.runs}


def draw(outcome: Outcome) -> list[Figure]:
    """Every figure of a study that has a run to draw."""
    figures, tints = [], _tints(outcome)
    for figure in outcome.study.figures:
        rows = figure.options.get("rows", list(outcome.study.rows))
        if any(result.runs for (row, _), result in outcome.table.items() if row in rows):
            figures.append(KINDS[figure.kind](_View(outcome, figure.options, rows, tints)))
    return figures


def _tints(outcome: Outcome) -> dict[str, Color]:
    """A colour for each row, the same in all panels and figures; the first row of a usual method has its colour."""
    study = outcome.study
    known: dict[str, str] = {}  # label → what its colour is chosen by
    named = [row for figure in study.figures for row in figure.options.get("rows", [])]
    # rows that a figure names come first: with more rows than colours, those must not share one
    for row in dict.fromkeys([*named, *study.rows]):
        label = study.row_label(row)
        methods = [result.cell.experiment.method.name for (r, _), result in outcome.table.items() if r == row]
        is_usual = bool(methods) and methods[0] in USUAL and methods[0] not in known.values()
        known[label] = methods[0] if is_usual else label
    chosen = colors(list(known.values()))
    return {label: chosen[key] for label, key in known.items()}


def _panels(count: int, height: float = 3.4, most: int = 4) -> tuple[Figure, list[Any]]:
    across = min(count, most)
    down = math.ceil(count / across)
    figure = new_figure(max(5.0, 3.7 * across), height * down)
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels


def _shared_legend(figure: Figure) -> None:
    """One legend below all panels: a label has one colour in all of them, and inside it would hide the curves."""
    known: dict[str, Any] = {}
    for axes in figure.axes:
        handles, labels = axes.get_legend_handles_labels()
        known |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in known}
    columns = min(len(known), 4 if len(figure.axes) > 2 else 2)
    figure.legend(known.values(), known.keys(), loc="outside lower center", ncols=columns, fontsize=8)


def curves(view: _View) -> Figure:
    """A panel for each column and key: each row's mean over seeds.

    Options: ``keys``; ``titles`` of the panels; ``over`` seconds or bytes instead of rounds; ``target``.
    """
    options, keys = view.options, view.options.get("keys", ["accuracy"])
    panels = [(column, key) for column in view.columns for key in keys]
    titles = options.get("titles", [view.study.column_label(column) for column, _ in panels])
    figure, every = _panels(len(panels))
    for axes, (column, key), title in zip(every, panels, titles, strict=False):
        goals = [result.cell.experiment.goal for (_, c), result in view.outcome.table.items() if c == column]
        target = goals[0].value if options.get("target") and key == "accuracy" else None
        over = options.get("over")
        plot_curves(axes, view.lines(column), key, over=over, target=target, tints=view.tints)
        if key == "accuracy" and over is None:
            plot_paper(axes, view.study, column, view.rows)
        if key == "seconds":
            axes.set_yscale("log")
        axes.set_title(title, fontsize=10)
    _shared_legend(figure)
    return figure


def heatmap(view: _View) -> Figure:
    """Left: the curves of some rows in one column. Right: every cell's mean."""
    study, name = view.study, view.options.get("measure", "final")
    rows = [row for row in study.rows if study.columns_of(row)]
    columns = [column for column in study.columns if any(column in study.columns_of(row) for row in rows)]
    figure = new_figure(12, max(3.5, 1.4 + 0.34 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    column = view.options.get("curves_column", columns[0])
    if column in columns:
        drawn = view.options.get("curves_rows", rows)
        plot_curves(left, view.lines(column, drawn), tints=view.tints)
        plot_paper(left, study, column, drawn)
        left.set_title(study.column_label(column), fontsize=10)
        left.legend(fontsize=8)
    known = [[view.outcome.values(name, row, column).values() for column in columns] for row in rows]
    means = [[mean(list(values)) for values in line] for line in known]
    plot_heatmap(right, means, [*map(study.row_label, rows)], [*map(study.column_label, columns)])
    right.set_title(MEASURES[name].label, fontsize=10)
    return figure


def gains(view: _View) -> Figure:
    """What each row gains over another one (``options.than``: row → the other), a cell for each column.

    The p of a column's cells are corrected for each other. Framed are the rows whose other is the best in the column.
    """
    from matplotlib.patches import Patch

    study, values, than = view.study, view.outcome.values, view.options["than"]
    name = view.options.get("measure", "final")
    measure = MEASURES[name]
    rows = list(than)
    sign = 1 if measure.higher_is_better else -1
    cells: dict[tuple[int, int], Difference] = {}
    framed = []
    shown = [column for column in study.columns if any(values(name, row, column) for row in rows)]
    for j, column in enumerate(shown):
        others = {
            row: values(name, row, column)
            for row in dict.fromkeys(than.values())
            if column in study.columns_of(row)
        }
        pairs = [(values(name, row, column), others.get(than[row], {})) for row in rows]
        differences = [paired_difference(*pair, measure.higher_is_better) for pair in pairs]
        tested = [i for i, difference in enumerate(differences) if difference.seeds]
        adjusted = corrected([differences[i] for i in tested])
        cells |= {(i, j): difference for i, difference in zip(tested, adjusted, strict=True)}
        means = {row: sign * fmean(known.values()) for row, known in others.items() if known}
        best = max(means, key=lambda row: means[row], default=None)
        # unless all of the others have run, the best of them is not known
        framed += [(i, j) for i in tested if than[rows[i]] == best and len(means) == len(others)]
    columns = [study.column_label(column).replace(", ", "\n") for column in shown]
    figure = new_figure(max(7.0, 2.4 + 0.95 * len(columns)), 1.5 + 0.36 * len(rows))
    axes = figure.subplots()
    plot_differences(axes, cells, [study.row_label(row) for row in rows], columns, framed)
    axes.tick_params(axis="x", labelsize=8)
    for i in range(1, len(rows)):
        if than[rows[i]] != than[rows[i - 1]]:
            axes.axhline(i - 0.5, color="w", linewidth=4)
    axes.set_title(f"{view.options.get('title', 'gain')}\n{measure.label}", fontsize=10)
    key = [Patch(color=color, label=outcome) for outcome, color in OUTCOMES.items()]
    key.append(Patch(fill=False, edgecolor="k", label="over the best method of the column"))
    figure.legend(handles=key, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def dots(view: _View) -> Figure:
    """A row's mean and deviation beside the paper's, a panel per column: as bars, such means would look equal."""
    study, name = view.study, view.options.get("measure", "final")
    measure = MEASURES[name]
    figure, panels = _panels(len(view.columns), most=2, height=1.3 + 0.34 * len(study.rows))
    for axes, column in zip(panels, view.columns, strict=False):
        rows = [row for row in study.rows if column in study.columns_of(row)]
        ours = [list(view.outcome.values(name, row, column).values()) for row in rows]
        here = [(mean(values), stdev(values) if len(values) > 1 else 0.0) for values in ours]
        paper = [printed(study.paper_number(name, row, column)) for row in rows]
        for label, side, shift, look, color in (
            ("here", here, -0.13, "o", "C0"),
            ("the paper", paper, 0.13, "s", "0.6"),
        ):
            means, deviations = zip(*side, strict=True)
            heights = [i + shift for i in range(len(rows))]
            # a number that is not known is NaN, and not drawn
            axes.errorbar(means, heights, xerr=deviations, fmt=look, color=color, capsize=3, label=label)
        axes.set_yticks(range(len(rows)), [study.row_label(row) for row in rows])
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.grid(axis="y", color="0.92")
        axes.set_axisbelow(True)
        axes.set(xlabel=measure.label, title=study.column_label(column))
    _shared_legend(figure)
    return figure


def activations(view: _View) -> Figure:
    """Per client and layer: each neuron's activation over the rounds, of one row and its first seed."""
    (row,) = view.rows
    runs = view.outcome.table[row, next(iter(view.study.columns))].runs
    records = [record for record in next(iter(runs.values())) if "activations" in record]
    if not records:  # published runs have none
        return new_figure(4, 1)
    warm = [record["round"] for record in records if record["phase"] == "warmup"]
    count, layers = len(records[0]["activations"]), len(records[0]["activations"][0])
    figure = new_figure(3.1 * layers, 2.5 * count)
    for i, panels in enumerate(figure.subplots(count, layers, squeeze=False)):
        for k, axes in enumerate(panels):
            image = list(zip(*[record["activations"][i][k] for record in records], strict=True))
            extent = (0.5, len(records) + 0.5, len(image) - 0.5, -0.5)
            axes.imshow(image, aspect="auto", cmap="magma", extent=extent, interpolation="nearest")
            if warm:
                axes.axvline(max(warm) + 0.5, color="w", linestyle="--", linewidth=1)
            axes.axhline(len(image) / 2 - 0.5, color="w", linestyle=":", linewidth=0.6)
            axes.set_title(f"client {i + 1}, FC{k + 1}", fontsize=9)
    figure.supxlabel("round")
    figure.supylabel("neuron")
    figure.suptitle(view.study.row_label(row))
    return figure


KINDS: dict[str, Callable[[_View], Figure]] = {
    "curves": curves,
    "heatmap": heatmap,
    "gains": gains,
    "dots": dots,
    "activations": activations,
}
"""Every kind of figure that a study can name."""
