"""The style of every figure, a colour for each label, and what is drawn on given axes: curves and heat maps.

Colours differ also with red-green colour blindness. The page uses them, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpews.errors import ConfigError
from fedpews.results.files import write_atomically
from fedpews.results.records import COLUMNS, Record, Rounds, value_of
from fedpews.results.statistics import Difference
from fedpews.tasks.names import is_share

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a929b",
    "axes.linewidth": 0.8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.7,
    "xtick.color": "#5b636d",
    "ytick.color": "#5b636d",
    "xtick.labelcolor": "#16191d",
    "ytick.labelcolor": "#16191d",
    "lines.solid_capstyle": "round",
    # text stays text: a journal can search it and set it in its own font
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    # the same runs give the same bytes
    "svg.hashsalt": "fedpews",
}

PAGE = 7.2
"""Inches: the width of a page, both columns of a two-column paper."""


@contextmanager
def styled() -> Iterator[None]:
    """Figures that are drawn and saved inside have the style."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with no window and no global state, unlike pyplot's; a notebook shows it."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        def _repr_png_(self) -> bytes:
            return _drawn(self, "png")

    return Shown(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: str | Path, format: str | None = None) -> None:
    """Write a figure without the time of day in it; the format is that of the name unless given."""
    kind = format or Path(path).suffix.removeprefix(".") or "png"
    undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})
    known = figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise ConfigError(
            f"{path}: there is no picture of kind {kind!r}; choose from {', '.join(sorted(known))}"
        )
    # whole or not at all, and never through a link in a folder of others
    write_atomically(Path(path), _drawn(figure, kind, dpi=200, metadata=undated))


def _drawn(figure: Figure, kind: str, **options: Any) -> bytes:
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, **options)
    return drawn.getvalue()


class Color(NamedTuple):
    """The same colour on white and on black."""

    light: str
    dark: str


# after Okabe and Ito, with enough contrast for thin lines on either ground
PALETTE = (
    Color("#5c6773", "#a9b4c0"),  # grey: the baseline
    Color("#0072b2", "#56b4e9"),
    Color("#c8500a", "#ff9145"),
    Color("#00835f", "#3dd6a5"),
    Color("#a8327d", "#ea8cc6"),
    Color("#836400", "#e6c84a"),
    Color("#5a4fcf", "#a8a2ff"),
    Color("#7a3b12", "#d3a17e"),
    # for more than eight labels at once; these differ in lightness as much as in hue
    Color("#1c2126", "#eef2f6"),
    Color("#5c7a00", "#bfe05a"),
    Color("#b3001b", "#ff7a85"),
)

USUAL = {
    "fedavg": 0,
    "fedavg+pews": 1,
    "fedavg+pews-fixed": 2,
    "fedavg+pews-auto": 3,
    "fedprox": 7,
    "fedprox+pews": 4,
    "scaffold": 5,
    "scaffold+pews": 6,
}
"""The most common methods have the same colour on every page."""


def colors(labels: Sequence[str]) -> dict[str, Color]:
    """A colour for each label; two share one only when there are more labels than colours.

    >>> colors(["mine", "fedavg"])["fedavg"] == PALETTE[0]
    True
    """
    chosen = {label: USUAL[label] for label in labels if label in USUAL}
    free = [number for number in range(1, len(PALETTE)) if number not in chosen.values()]
    free = free or list(range(len(PALETTE)))
    others = [label for label in dict.fromkeys(labels) if label not in chosen]
    chosen |= {label: free[index % len(free)] for index, label in enumerate(others)}
    return {label: PALETTE[chosen[label]] for label in labels}


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
    tints: Mapping[str, Color] | None = None,
) -> None:
    """One line per run on given axes, the mean over seeds with its standard deviation.

    A dotted line ends each warmup, the dashed one is the target.

    Args:
        over: a key of ``COSTS``: the mean against the cost so far, without the rest.
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
        frame = Rectangle(
            (j - 0.47, i - 0.47), 0.94, 0.94, fill=False, edgecolor="k", linewidth=1.4, zorder=3
        )
        axes.add_patch(frame)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
