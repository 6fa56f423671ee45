"""Figures for papers, in one style; text stays text. A kind of figure is a function in this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.report.plots import Masks, plain, plot_curves, plot_heatmap, plot_masks
from fedpews.report.runs import Run, scale, settings
from fedpews.report.style import PAGE, colors, new_figure, save, styled
from fedpews.results.records import client_values, evaluated, value_of
from fedpews.tasks.names import is_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")

Kinds = dict[str, Callable[[Any], "Figure"]]

KINDS: Kinds = {}
"""Every kind of figure of runs, by name."""


def figure_of(kinds: Kinds) -> Callable[[Callable[[Any], Figure]], Callable[[Any], Figure]]:
    """Add a function to kinds of figures, under its name."""

    def add(function: Callable[[Any], Figure]) -> Callable[[Any], Figure]:
        kinds[function.__name__] = function
        return function

    return add


def draw(
    runs: Sequence[Run],
    kind: str = "curves",
    path: str | Path | None = None,
    format: str | None = None,
    masks: Sequence[Masks] | None = None,
) -> Figure:
    """A figure of one run or several; also written to ``path`` when one is given.

    Args:
        kind: one of ``KINDS``.
        format: pdf, svg or png; by default that of the path.
        masks: what the figure of masks shows, of runs that have no folder.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no figure of kind {kind!r}; choose from {', '.join(KINDS)}")
    with styled():
        figure = KINDS[kind](runs) if masks is None else draw_masks(masks)
        if path is not None:
            save(figure, path, format)
    return figure


def masks_of(run: Run) -> Masks | None:
    """The masks of a run's first seed in the last round that has any; None where single clients' are not kept."""
    kept = [record for record in run.neurons if record.owned is not None]
    if not kept:
        return None
    last = max((r for r in kept if r.seed == kept[0].seed), key=lambda r: r.round)
    return Masks(
        run.label,
        last.masks(),
        [run.client_names[client] for client in last.clients],
        run.federation.get("layers", []),
        f"{run.label}, round {last.round}, seed {last.seed}",
    )


@figure_of(KINDS)
def curves(runs: Sequence[Run]) -> Figure:
    """The metric over rounds."""
    return _curves(runs, target=runs[0].goal.value)


@figure_of(KINDS)
def bytes(runs: Sequence[Run]) -> Figure:
    """The metric over what was sent and received."""
    return _curves(runs, over="bytes")


def _curves(runs: Sequence[Run], **options: Any) -> Figure:
    figure = new_figure(PAGE, 3.6)
    axes = figure.subplots()
    plot_curves(axes, {run.label: run.records for run in runs}, runs[0].goal.metric, **options)
    axes.legend(loc="best")
    return figure


@figure_of(KINDS)
def masks(runs: Sequence[Run]) -> Figure:
    """Who owned which neurons in the last warmup round."""
    return draw_masks([masks for run in runs if (masks := masks_of(run)) is not None])


def draw_masks(masks: Sequence[Masks]) -> Figure:
    """The masks of several runs, one below the other."""
    if not masks:
        raise ConfigError("no run here has kept masks: there was no warmup, or there are too many clients")
    heights = [min(3.0, 0.7 + 0.16 * len(each.clients)) for each in masks]
    figure = new_figure(PAGE, sum(heights) + 0.3)
    rows = figure.subplots(len(masks), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, each in zip(rows, masks, strict=True):
        plot_masks(axes, each)
    return figure


@figure_of(KINDS)
def clients(runs: Sequence[Run]) -> Figure:
    """Each client's metric at the end."""
    metric = runs[0].goal.metric
    known = [run for run in runs if any(client_values(record, metric) for record in run.records)]
    if not known:
        raise ConfigError(f"no run here has kept single clients' {metric}: too many clients, or real sites")
    names = max((run.client_names for run in known), key=len)
    figure = new_figure(PAGE, min(9.0, 1.2 + 0.24 * len(names)))
    axes = figure.subplots()
    tints = colors([run.label for run in runs])
    for run in known:
        ends = [client_values(evaluated(rows)[-1], metric) or [] for rows in run.by_seed.values()]
        factor = 100 if is_share(metric) else 1
        # a client without test samples has no dot
        values = [
            factor * fmean(math.nan if value is None else value for value in client)
            for client in zip(*ends, strict=True)
        ]
        axes.plot(values, range(len(values)), "o", color=tints[run.label].light, label=plain(run.label))
    axes.set_yticks(range(len(names)), [plain(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    own = any("client_metrics" in record for run in known for record in run.records[-1:])
    where = "the client's own test samples" if own else "the client's own classes"
    axes.set(xlabel=f"{metric.replace('_', ' ')} on {where}{' (%)' if is_share(metric) else ''}")
    figure.legend(loc="outside upper left", ncols=3)
    return figure


@figure_of(KINDS)
def heatmap(runs: Sequence[Run]) -> Figure:
    """The final metric of runs that differ in one or two keys."""
    varied = [(key, values) for key, values in settings(runs) if len(set(values)) > 1]
    if not 1 <= len(varied) <= 2:
        keys = ", ".join(key for key, _ in varied) or "nothing"
        raise ConfigError(f"a heat map needs runs that differ in one or two keys; these differ in {keys}")
    (across, columns), (down, rows) = varied[-1], (varied[0] if len(varied) == 2 else ("", [""] * len(runs)))
    wide, tall, metric = _ordered(columns), _ordered(rows), runs[0].goal.metric
    values = [[math.nan] * len(wide) for _ in tall]
    for run, row, column in zip(runs, rows, columns, strict=True):
        ends = [scale(metric, value_of(evaluated(records)[-1], metric)) for records in run.by_seed.values()]
        known = [value for value in ends if value is not None]
        values[tall.index(row)][wide.index(column)] = fmean(known) if known else math.nan
    figure = new_figure(min(PAGE, 2.2 + 0.8 * len(wide)), 1.2 + 0.4 * len(tall))
    axes = figure.subplots()
    plot_heatmap(axes, values, [plain(row) for row in tall], [plain(column) for column in wide])
    axes.grid(visible=False)
    axes.set(
        xlabel=plain(across),
        ylabel=plain(down),
        title=plain(f"final {metric}{' (%)' * is_share(metric)}, mean over seeds"),
    )
    return figure


def _ordered(values: Sequence[str]) -> list[str]:
    """Numbers by size, anything else in its order."""
    once = list(dict.fromkeys(values))
    try:
        return sorted(once, key=float)
    except ValueError:
        return once
