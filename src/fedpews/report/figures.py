"""Figures for papers, in one style; text stays text. A kind of figure of runs is a function in this file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.report.plots import PAGE, colors, new_figure, plain, plot_curves, save, styled
from fedpews.report.runs import Run
from fedpews.results.masks import Ownership
from fedpews.results.records import client_values, evaluated
from fedpews.tasks.names import is_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("pdf", "svg", "png")

NAMED = 30
"""Up to so many classes or clients, each is named."""

DRAWN = 200
"""Up to so many clients are drawn; dots of more would overlap."""


def draw(
    runs: Sequence[Run],
    kind: str = "curves",
    path: str | Path | None = None,
    format: str | None = None,
) -> Figure:
    """A figure of one run or several; also written to ``path`` when one is given.

    Args:
        kind: one of ``KINDS``.
        format: pdf, svg or png; by default that of the path.
    """
    if kind not in KINDS:
        raise ConfigError(f"there is no figure of kind {kind!r}; choose from {', '.join(KINDS)}")
    with styled():
        figure = KINDS[kind](runs)
        if path is not None:
            save(figure, path, format)
    return figure


def curves(runs: Sequence[Run]) -> Figure:
    """The metric over rounds."""
    return _curves(runs, target=runs[0].goal.value)


def bytes(runs: Sequence[Run]) -> Figure:
    """The metric over what was sent and received."""
    return _curves(runs, over="bytes")


def _curves(runs: Sequence[Run], **options: Any) -> Figure:
    figure = new_figure(PAGE, 3.6)
    axes = figure.subplots()
    plot_curves(axes, {run.label: run.records for run in runs}, runs[0].goal.metric, **options)
    axes.legend(loc="best")
    return figure


def masks(runs: Sequence[Run]) -> Figure:
    """Who owned which neurons in the last warmup round of the first seed, one run below the other."""
    shown = []
    for run in runs:
        # with many clients, single clients' masks are not kept
        kept = [record for record in run.neurons if record.owned is not None]
        of_seed = [record for record in kept if record.seed == kept[0].seed]
        if of_seed:
            shown.append((run, max(of_seed, key=lambda record: record.round)))
    if not shown:
        raise ConfigError("these runs have no masks: there was no warmup, or there are too many clients")
    heights = [min(3.0, 0.7 + 0.16 * len(last.clients)) for _, last in shown]
    figure = new_figure(PAGE, sum(heights) + 0.3)
    rows = figure.subplots(len(shown), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (run, last) in zip(rows, shown, strict=True):
        _plot_masks(axes, run, last)
    return figure


def _plot_masks(axes: Any, run: Run, last: Ownership) -> None:
    """Clients × neurons: every cell one colour, a line between layers."""
    from matplotlib.colors import ListedColormap

    layers = run.federation.get("layers", [])
    shades = ListedColormap(["#eef0f2", colors([run.label])[run.label].light])
    axes.imshow(last.masks(), aspect="auto", interpolation="none", cmap=shades, vmin=0, vmax=1)
    axes.grid(visible=False)
    for layer in layers[1:]:
        axes.axvline(layer["start"] - 0.5, color="white", linewidth=2)
    axes.set_xticks(
        [layer["start"] + (layer["size"] - 1) / 2 for layer in layers],
        [plain(str(layer["name"])) for layer in layers],
    )
    axes.tick_params(length=0)
    if len(last.clients) <= NAMED:
        names = run.client_names or [f"client {number}" for number in range(1 + max(last.clients))]
        axes.set_yticks(range(len(last.clients)), [plain(names[client]) for client in last.clients])
    axes.set_title(plain(f"{run.label}, round {last.round}, seed {last.seed}"), loc="left")


def clients(runs: Sequence[Run]) -> Figure:
    """Each client's metric at the end."""
    metric = runs[0].goal.metric
    known = [run for run in runs if any(client_values(record, metric) for record in run.records)]
    if not known:
        raise ConfigError(
            f"these runs have no {metric} of single clients: there are too many clients, or real sites"
        )
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


def draw_split(
    counts: Sequence[Sequence[int]],
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    path: str | Path | None = None,
) -> Figure:
    """The split of a data set; ``counts`` is (clients, classes), a tensor or nested lists.

    >>> figure = draw_split([[400, 0], [0, 400]])
    """
    clients, classes = min(len(counts), DRAWN), len(counts[0])
    figure = new_figure(min(16, 2.5 + 0.3 * clients), min(14, 1.5 + 0.25 * classes))
    plot_split(figure.subplots(), counts, class_names, client_names)
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def plot_split(
    axes: Any,
    counts: Sequence[Sequence[int]],
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
) -> None:
    """Classes × clients, a dot's area the number of samples, on given axes."""
    rows = [[int(value) for value in row] for row in counts[:DRAWN]]
    most = max((value for row in rows for value in row), default=1) or 1
    clients, classes = len(rows), len(rows[0])
    box = axes.get_window_extent()
    points = 72 / axes.figure.dpi
    # a dot at most fills its cell
    cell = min(16, points * box.width / clients, points * box.height / classes)
    dots = [
        (i, k, max(0.5, (0.9 * cell) ** 2 * n / most))
        for i, row in enumerate(rows)
        for k, n in enumerate(row)
        if n
    ]
    x, y, sizes = zip(*dots, strict=True) if dots else ((), (), ())
    axes.scatter(x, y, s=sizes, color="C0", alpha=0.8, linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(classes - 0.3, -0.7))
    if len(counts) > DRAWN:
        axes.set_title(f"the first {DRAWN} of {len(counts):,} clients")
    if clients <= NAMED:
        names = [plain(name) for name in client_names] or [str(i) for i in range(clients)]
        axes.set_xticks(range(clients), names, rotation=90 * bool(client_names))
    if classes <= NAMED:
        axes.set_yticks(
            range(classes), [plain(name) for name in class_names] or [str(k) for k in range(classes)]
        )


KINDS: dict[str, Callable[[Sequence[Run]], Figure]] = {
    "curves": curves,
    "bytes": bytes,
    "masks": masks,
    "clients": clients,
}
"""Every kind of figure of runs, by name."""
