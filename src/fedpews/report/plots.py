"""What a figure is made of: curves, heat maps, masks and splits, drawn on given axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from fedpews.report.style import PALETTE, Color, colors, new_figure
from fedpews.results.columns import COLUMNS
from fedpews.results.records import Record, Rounds, value_of
from fedpews.results.statistics import Difference
from fedpews.tasks.names import is_share

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

LABELS = {
    "accuracy": "global test accuracy (%)",
    "loss": "global test loss",
    "train_loss": "mean training loss of the clients",
}

OUTCOMES = {"better": PALETTE[1].light, "worse": PALETTE[2].light, "undecided": "#c9ced4"}
"""The colour of an outcome; blue and orange differ also with red-green colour blindness."""


COSTS: dict[str, tuple[str, Callable[[Record], float]]] = {
    "seconds": ("seconds", lambda record: float(record["seconds"])),
    "bytes": ("MB sent and received", lambda record: (record["bytes_up"] + record["bytes_down"]) / 1e6),
}
"""What a metric is drawn against: the name of the axis, and the cost of a round."""


def plot_curves(
    axes: Any,
    runs: Mapping[str, Sequence[Record]],
    key: str = "accuracy",
    *,
    over: str | None = None,
    target: float | None = None,
    smooth: int = 1,
    tints: Mapping[str, Color] | None = None,
) -> None:
    """One line per run on given axes, the mean over seeds with its standard deviation.

    A dotted line ends each warmup, the dashed one is the target.

    Args:
        over: a key of ``COSTS``: the mean against the cost so far, without the rest.
        smooth: the window of a running mean.
        tints: the labels' colours where other axes show some of the same runs.
    """
    tints = tints or colors(list(runs))
    name = key.partition(".")[0]
    percent = _factor(name) == 100
    for label, records in runs.items():
        x, mean, spread = curve(records, key)
        look = {"color": tints[label].light, "linewidth": 1.4, "label": plain(label)}
        if over is not None:
            costs = _so_far(records, COSTS[over][1])
            axes.plot([costs[round - 1] for round in x], mean, **look)
            continue
        mean, spread = _smooth(mean, smooth), _smooth(spread, smooth)
        axes.plot(x, mean, **look)
        # no accuracy is below 0 or above 100 %, and no loss below 0, whatever a standard deviation says
        floor, ceiling = (0.0, 100.0) if percent else (-math.inf, math.inf)
        if key.endswith("loss") and min(mean, default=0.0) >= 0:
            floor = 0.0
        low = [max(floor, m - s) for m, s in zip(mean, spread, strict=True)]
        high = [min(ceiling, m + s) for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
        warmup = [record["round"] for record in records if record["phase"] == "warmup"]
        if warmup:
            axes.axvline(max(warmup), color=look["color"], linestyle=":", linewidth=1)
    if target is not None:
        axes.axhline(_factor(name) * target, color="grey", linestyle="--", linewidth=1)
    label = LABELS.get(name) or plain(name.replace("_", " ")) + " (%)" * percent
    axes.set(xlabel="round" if over is None else COSTS[over][0], ylabel=label)


def _so_far(records: Sequence[Record], cost: Callable[[Record], float]) -> list[float]:
    """The cost up to each round, mean over seeds; rounds that were not evaluated cost something, too."""
    rounds = Rounds(records)
    seeds = [accumulate(map(cost, rounds.of_seed(seed))) for seed in rounds.seeds]
    return [fmean(column) for column in zip(*seeds, strict=False)]


def curve(records: Sequence[Record], key: str = "accuracy") -> tuple[list[int], list[float], list[float]]:
    """Rounds, mean over seeds and standard deviation; shares in percent.

    Only rounds that every seed has, and in which the key was measured. ``client_accuracy.1`` is of the second client.
    """
    name, _, client = key.partition(".")
    factor = _factor(name)

    def value(record: Record) -> float:
        number = record[name][int(client)] if client else value_of(record, name)
        return math.nan if number is None else factor * float(number)

    measured = Rounds([record for record in records if name in record])
    runs = [measured.of_seed(seed) for seed in measured.seeds]
    columns = list(zip(*[[value(record) for record in run] for run in runs], strict=False))
    rounds = [record["round"] for record in runs[0]][: len(columns)] if runs else []
    return rounds, [fmean(column) for column in columns], [pstdev(column) for column in columns]


def plain(text: str) -> str:
    """A label as it is: to matplotlib, two dollar signs hold a formula.

    >>> plain("$5 or $6")
    '\\\\$5 or \\\\$6'
    """
    return text.replace("$", r"\$")


def _factor(key: str) -> int:
    """Metrics between 0 and 1 are shown in percent; other columns (density, seconds) as they are."""
    return 100 if key not in COLUMNS and key != "seconds" and is_share(key) else 1


def _smooth(values: list[float], window: int) -> list[float]:
    """Running mean over the last ``window`` values.

    >>> _smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def plot_heatmap(
    axes: Any,
    values: Sequence[Sequence[float]],  # (rows, columns); nan is an empty cell
    rows: Sequence[str],
    columns: Sequence[str],
    digits: int = 1,
) -> None:
    """Brighter is higher; an empty cell is grey."""
    known = [value for row in values for value in row if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    high = high if high > low else low + 1
    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in values]
    axes.set_facecolor("0.85")
    axes.imshow(shown, cmap="viridis", vmin=low, vmax=high, aspect="auto", interpolation="none")
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if math.isfinite(value):
                dark = value < low + 0.6 * (high - low)
                text = f"{value:.{digits}f}"
                axes.text(j, i, text, ha="center", va="center", color="w" if dark else "k", fontsize=8)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)


def plot_differences(
    axes: Any,
    differences: Mapping[tuple[int, int], Difference],  # (row, column)
    rows: Sequence[str],
    columns: Sequence[str],
    framed: Sequence[tuple[int, int]] = (),
    digits: int = 1,
) -> None:
    """Blue is better, orange worse, the more the darker; grey is undecided, and white has not enough runs."""
    from matplotlib.patches import Rectangle

    decided = [abs(d.mean) for d in differences.values() if d.outcome in ("better", "worse")]
    most = max(decided, default=1.0)
    for (i, j), difference in differences.items():
        if not difference.seeds:
            continue
        color = OUTCOMES.get(difference.outcome, "w")
        is_decided = difference.outcome in ("better", "worse")
        strength = 0.3 + 0.7 * abs(difference.mean) / most if is_decided else 0.6
        axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, color=color, alpha=strength, linewidth=0))
        ink = "w" if is_decided and strength > 0.8 else "k"
        axes.text(
            j, i - 0.13, f"{difference.mean:+.{digits}f}", ha="center", va="center", color=ink, fontsize=9
        )
        if difference.seeds > 1:
            ends = f"{difference.low:+.{digits}f} to {difference.high:+.{digits}f}"
            axes.text(j, i + 0.25, ends, ha="center", va="center", color=ink, fontsize=6)
    for i, j in framed:
        axes.add_patch(Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor="k", linewidth=1.4))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)


@dataclass(frozen=True)
class Masks:
    """Who owned which neurons in one round of one seed."""

    label: str
    owned: NDArray[np.bool_]  # (clients, neurons)
    clients: Sequence[str]
    layers: Sequence[Mapping[str, Any]]  # name, start, size
    title: str


def plot_masks(axes: Any, masks: Masks) -> None:
    """Clients × neurons on given axes: every cell one colour, a line between layers."""
    from matplotlib.colors import ListedColormap

    tint = colors([masks.label])[masks.label].light
    shades = ListedColormap(["#eef0f2", tint])
    axes.imshow(masks.owned, aspect="auto", interpolation="none", cmap=shades, vmin=0, vmax=1)
    axes.grid(visible=False)
    for layer in masks.layers[1:]:
        axes.axvline(layer["start"] - 0.5, color="white", linewidth=2)
    axes.set_xticks(
        [layer["start"] + (layer["size"] - 1) / 2 for layer in masks.layers],
        [plain(str(layer["name"])) for layer in masks.layers],
    )
    axes.tick_params(length=0)
    if len(masks.clients) <= NAMED:
        axes.set_yticks(range(len(masks.clients)), [plain(name) for name in masks.clients])
    axes.set_title(plain(masks.title), loc="left")


NAMED = 30
"""Up to so many classes or clients, each is named."""

DRAWN = 200
"""Up to so many clients are drawn; dots of more would overlap."""


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
