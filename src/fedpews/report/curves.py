"""Accuracy over the rounds, one line per method: the mean over seeds with its spread."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from statistics import fmean, pstdev
from typing import Any

from fedpews.report.colors import Color, colors
from fedpews.results.records import Record, Rounds, value_of
from fedpews.tasks.names import METRICS, is_share

LABELS = {
    "accuracy": "global test accuracy (%)",
    "loss": "global test loss",
    "train_loss": "mean training loss of the clients",
}


def plot_curves(
    axes: Any,
    runs: Mapping[str, Sequence[Record]],
    key: str = "accuracy",
    client: int | None = None,
    target: float | None = None,
    smooth: int = 1,
    tints: Mapping[str, Color] | None = None,
) -> None:
    """One line per run on given axes, the mean over seeds with its standard deviation.

    A dotted line ends each warmup, the dashed one is the target; ``smooth`` is the window of a running mean. ``tints``
    are the labels' colours where other axes show some of the same runs.
    """
    tints = tints or colors(list(runs))
    for label, records in runs.items():
        rounds, mean, spread = curve(records, key, client)
        mean, spread = _smooth(mean, smooth), _smooth(spread, smooth)
        color = tints[label].light
        axes.plot(rounds, mean, color=color, label=plain(label), linewidth=1.4)
        # no accuracy is below 0 or above 100 %, and no loss below 0, whatever a standard deviation says
        floor, ceiling = (0.0, 100.0) if _factor(key) == 100 else (-math.inf, math.inf)
        if key.endswith("loss") and min(mean, default=0.0) >= 0:
            floor = 0.0
        low = [max(floor, m - s) for m, s in zip(mean, spread, strict=True)]
        high = [min(ceiling, m + s) for m, s in zip(mean, spread, strict=True)]
        axes.fill_between(rounds, low, high, color=color, alpha=0.2, linewidth=0)
        warmup = [record["round"] for record in records if record["phase"] == "warmup"]
        if warmup:
            axes.axvline(max(warmup), color=color, linestyle=":", linewidth=1)
    if target is not None:
        axes.axhline(_factor(key) * target, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="round", ylabel=_axis(key) + " (%)" * (key not in LABELS and _factor(key) == 100))


def plot_over_time(
    axes: Any, runs: Mapping[str, Sequence[Record]], tints: Mapping[str, Color] | None = None
) -> None:
    """Accuracy against seconds, both means over seeds."""
    _plot_over(axes, runs, lambda record: float(record["seconds"]), tints=tints)
    axes.set(xlabel="seconds", ylabel=LABELS["accuracy"])


def plot_over_bytes(axes: Any, runs: Mapping[str, Sequence[Record]], key: str = "accuracy") -> None:
    """A metric against what was sent and received so far, both means over seeds."""
    _plot_over(axes, runs, lambda record: (record["bytes_up"] + record["bytes_down"]) / 1e6, key)
    axes.set(xlabel="MB sent and received", ylabel=_axis(key))


def _plot_over(
    axes: Any,
    runs: Mapping[str, Sequence[Record]],
    cost: Callable[[Record], float],
    key: str = "accuracy",
    tints: Mapping[str, Color] | None = None,
) -> None:
    tints = tints or colors(list(runs))
    for label, records in runs.items():
        seeds = [Rounds(records).of_seed(seed) for seed in Rounds(records).seeds]
        so_far = zip(*(accumulate(map(cost, run)) for run in seeds), strict=False)
        costs = [fmean(column) for column in so_far]
        # rounds count from 1; those that were not evaluated cost something and show nothing
        rounds, values, _ = curve(records, key)
        axes.plot(
            [costs[round - 1] for round in rounds],
            values,
            color=tints[label].light,
            label=plain(label),
            linewidth=1.4,
        )


def curve(
    records: Sequence[Record], key: str = "accuracy", client: int | None = None
) -> tuple[list[int], list[float], list[float]]:
    """Rounds, mean over seeds and standard deviation; shares in percent.

    Only rounds that every seed has, and in which the key was measured.
    """
    factor = _factor(key)

    def value(record: Record) -> float:
        found = value_of(record, key) if client is None else record[key][client]
        return math.nan if found is None else factor * float(found)

    measured = Rounds([record for record in records if key in record])
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


def _axis(key: str) -> str:
    return LABELS.get(key) or plain(key.replace("_", " "))


def _factor(key: str) -> int:
    """Metrics that are a part of a whole are shown in percent; what is no metric (density, seconds) as it is."""
    known = key in METRICS or key == "client_accuracy"
    return 100 if known and is_share(key) else 1


def _smooth(values: list[float], window: int) -> list[float]:
    """Running mean over the last ``window`` values.

    >>> _smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]
