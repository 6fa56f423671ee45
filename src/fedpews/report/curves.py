"""Accuracy over the rounds, one line per method: the mean over seeds with its spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from fedpews.results import Record, Rounds

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curves(
    runs: Mapping[str, Sequence[Record]], target: float | None = None, path: str | Path | None = None
) -> Figure:
    """The figure people look at first. A dotted line ends each warmup; the dashed one is the target."""
    from matplotlib.figure import Figure  # no window and no global state, unlike pyplot

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for index, (label, records) in enumerate(runs.items()):
        rounds, mean, spread = curve(records)
        color = f"C{index}"
        axes.plot(rounds, mean, color=color, label=label)
        low = [m - s for m, s in zip(mean, spread, strict=True)]
        high = [m + s for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
        warmup = [record["round"] for record in records if record["phase"] == "warmup"]
        if warmup:
            axes.axvline(max(warmup), color=color, linestyle=":", linewidth=1)
    if target is not None:
        axes.axhline(100 * target, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="round", ylabel="test accuracy of the global model (%)")
    axes.legend(loc="lower right")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def curve(records: Sequence[Record], key: str = "accuracy") -> tuple[list[int], list[float], list[float]]:
    """Rounds, mean over seeds and standard deviation, in percent; only rounds that every seed has."""
    runs = [Rounds(records).of_seed(seed) for seed in Rounds(records).seeds]
    columns = list(zip(*[[100 * record[key] for record in run] for run in runs], strict=False))
    rounds = [record["round"] for record in runs[0]][: len(columns)] if runs else []
    return rounds, [fmean(column) for column in columns], [pstdev(column) for column in columns]
