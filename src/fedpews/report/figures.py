"""Figures for papers: one style, one colour for each label, text that stays text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.report.collect import client_names, settings
from fedpews.report.colors import colors
from fedpews.report.curves import plain, plot_curves, plot_over_bytes
from fedpews.report.heatmap import plot_heatmap
from fedpews.report.runs import Run, scale
from fedpews.report.style import PAGE, new_figure, save, styled
from fedpews.results.records import client_values, evaluated, value_of
from fedpews.tasks.names import is_share

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

FORMATS = ("pdf", "svg", "png")


@dataclass(frozen=True)
class Masks:
    """Who owned which neurons in one round of one seed."""

    label: str
    owned: NDArray[np.bool_]  # (clients, neurons)
    clients: Sequence[str]
    layers: Sequence[Mapping[str, Any]]  # name, start, size
    title: str


def draw(
    runs: Sequence[Run],
    kind: str = "curves",
    path: str | Path | None = None,
    format: str | None = None,
    masks: Sequence[Masks] | None = None,
) -> Figure:
    """A figure of one run or several; also written to ``path`` when one is given.

    Args:
        kind: curves (accuracy over rounds), bytes (over what was sent), masks (who owned which neurons in the last
            warmup round), clients (each client's accuracy at the end), heatmap (runs that differ in one or two keys).
        format: pdf, svg or png; by default that of the path.
        masks: what the figure of masks shows, of runs that have no folder.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no figure of kind {kind!r}; choose from {', '.join(KINDS)}")
    with styled():
        figure = KINDS[kind](runs) if masks is None else _masks(masks)
        if path is not None:
            save(figure, path, format)
    return figure


def masks_of(run: Run) -> Masks | None:
    """The masks of a run's first seed in the last round that has any; None where single clients' are not kept."""
    kept = [one for one in run.neurons if one.owned is not None]
    if not kept:
        return None
    last = max((one for one in kept if one.seed == kept[0].seed), key=lambda one: one.round)
    names = client_names(run)
    return Masks(
        run.label,
        last.masks(),
        [names[client] for client in last.clients],
        run.federation.get("layers", []),
        f"{run.label}, round {last.round}, seed {last.seed}",
    )


def _curves(runs: Sequence[Run]) -> Figure:
    figure = new_figure(PAGE, 3.6)
    axes = figure.subplots()
    goal = runs[0].goal
    plot_curves(axes, {run.label: run.records for run in runs}, goal.metric, target=goal.value)
    axes.legend(loc="best")
    return figure


def _bytes(runs: Sequence[Run]) -> Figure:
    figure = new_figure(PAGE, 3.6)
    axes = figure.subplots()
    plot_over_bytes(axes, {run.label: run.records for run in runs}, runs[0].goal.metric)
    axes.legend(loc="best")
    return figure


def _masks(masks: Sequence[Masks]) -> Figure:
    if not masks:
        raise ConfigError("no run here has kept masks: there was no warmup, or there are too many clients")
    heights = [min(3.0, 0.7 + 0.16 * len(one.clients)) for one in masks]
    figure = new_figure(PAGE, sum(heights) + 0.3)
    places = figure.subplots(len(masks), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, one in zip(places, masks, strict=True):
        plot_masks(axes, one)
    return figure


def plot_masks(axes: Any, masks: Masks) -> None:
    """Clients × neurons on given axes: every cell one colour, layers apart by a line."""
    from matplotlib.colors import ListedColormap

    tint = colors([masks.label])[masks.label].light
    axes.imshow(
        masks.owned,
        aspect="auto",
        interpolation="none",
        cmap=ListedColormap(["#eef0f2", tint]),
        vmin=0,
        vmax=1,
    )
    axes.grid(visible=False)
    for layer in masks.layers[1:]:
        axes.axvline(layer["start"] - 0.5, color="white", linewidth=2)
    axes.set_xticks(
        [layer["start"] + (layer["size"] - 1) / 2 for layer in masks.layers],
        [plain(str(layer["name"])) for layer in masks.layers],
    )
    axes.tick_params(length=0)
    if len(masks.clients) <= 30:
        axes.set_yticks(range(len(masks.clients)), [plain(name) for name in masks.clients])
    axes.set_title(plain(masks.title), loc="left")


def _clients(runs: Sequence[Run]) -> Figure:
    metric = runs[0].goal.metric
    known = [run for run in runs if any(client_values(record, metric) for record in run.records)]
    if not known:
        raise ConfigError(f"no run here has kept single clients' {metric}: too many clients, or real sites")
    names = max((client_names(run) for run in known), key=len)
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


def _heatmap(runs: Sequence[Run]) -> Figure:
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
    """Numbers by size, anything else as it came."""
    once = list(dict.fromkeys(values))
    try:
        return sorted(once, key=float)
    except ValueError:
        return once


KINDS: Mapping[str, Callable[[Sequence[Run]], Figure]] = {
    "curves": _curves,
    "bytes": _bytes,
    "masks": lambda runs: _masks([one for run in runs if (one := masks_of(run)) is not None]),
    "clients": _clients,
    "heatmap": _heatmap,
}
"""The figures there are."""
