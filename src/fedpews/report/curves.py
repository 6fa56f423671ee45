"""Accuracy over the rounds, one line per method: the mean over seeds with its spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from fedpews.results.records import Record, Rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LABELS = {
    "accuracy": "test accuracy of the global model (%)",
    "loss": "test loss of the global model",
    "train_loss": "mean training loss of the clients",
}
PERCENT = ("accuracy", "client_accuracy")


def draw_curves(
    runs: Mapping[str, Sequence[Record]], target: float | None = None, path: str | Path | None = None
) -> Figure:
    """The figure people look at first. A dotted line ends each warmup; the dashed one is the target."""
    figure = new_figure(7, 4.2)
    axes = figure.subplots()
    plot_curves(axes, runs, target=target)
    axes.legend(loc="lower right")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def new_figure(width: float, height: float) -> Figure:
    """An empty figure with no window and no global state, unlike pyplot's."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plot_curves(
    axes: Any,
    runs: Mapping[str, Sequence[Record]],
    key: str = "accuracy",
    client: int | None = None,
    target: float | None = None,
    smooth: int = 1,
) -> None:
    """One line per run on given axes; ``smooth`` is the window of a running mean over rounds."""
    for index, (label, records) in enumerate(runs.items()):
        rounds, mean, spread = curve(records, key, client)
        mean, spread = _smooth(mean, smooth), _smooth(spread, smooth)
        color = f"C{index}"
        axes.plot(rounds, mean, color=color, label=label, linewidth=1.4)
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
        warmup = [record["round"] for record in records if record["phase"] == "warmup"]
        if warmup:
            axes.axvline(max(warmup), color=color, linestyle=":", linewidth=1)
    if target is not None:
        axes.axhline(100 * target, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="round", ylabel=LABELS.get(key, key.replace("_", " ")))


def plot_over_time(axes: Any, runs: Mapping[str, Sequence[Record]]) -> None:
    """Accuracy against seconds, the first seed of each run."""
    for index, (label, records) in enumerate(runs.items()):
        run = Rounds(records).of_seed(Rounds(records).seeds[0])
        seconds = list(accumulate(record["seconds"] for record in run))
        axes.plot(seconds, [100 * r["accuracy"] for r in run], color=f"C{index}", label=label, linewidth=1.4)
    axes.set(xlabel="seconds", ylabel=LABELS["accuracy"])


def curve(
    records: Sequence[Record], key: str = "accuracy", client: int | None = None
) -> tuple[list[int], list[float], list[float]]:
    """Rounds, mean over seeds and standard deviation; accuracies in percent; only rounds that every seed has."""
    factor = 100 if key in PERCENT else 1

    def value(record: Record) -> float:
        found = record[key] if client is None else record[key][client]
        return factor * float(found)

    runs = [Rounds(records).of_seed(seed) for seed in Rounds(records).seeds]
    columns = list(zip(*[[value(record) for record in run] for run in runs], strict=False))
    rounds = [record["round"] for record in runs[0]][: len(columns)] if runs else []
    return rounds, [fmean(column) for column in columns], [pstdev(column) for column in columns]


def _smooth(values: list[float], window: int) -> list[float]:
    """Running mean over the last ``window`` values.

    >>> _smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
