"""The curves of the paper's figures, as numbers: to draw them beside ours, and to say how far apart they are.

They were read off the published figures pixel by pixel, to about half a point and one round; means over three seeds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

from fedpews.report.curves import curve
from fedpews.results.records import Record
from fedpews.paper.study import Study

Curve = tuple[list[int], list[float]]
"""Rounds and accuracies in percent."""


@cache
def paper_curves() -> dict[str, dict[str, Curve]]:
    """Figure → method → its curve.

    >>> sorted(paper_curves()["four-clients"])
    ['fedavg', 'fedavg+pews']
    """
    file = resources.files("fedpews.paper.studies") / "curves.json"
    found: dict[str, dict[str, Curve]] = json.loads(file.read_text())
    return found


NAMES = {"fedavg": "FedAvg", "fedavg+pews": "FedPeWS", "fedavg+pews-fixed": "FedPeWS-Fixed"}
"""What the paper calls the methods that it drew."""


def curve_of(study: Study, row: str, column: str) -> Curve | None:
    """What the paper drew for a cell, if it did and we have it."""
    figure, method = study.columns[column].drawn, study.rows[row].drawn
    return paper_curves().get(figure or "", {}).get(method or "")


def distance(records: Sequence[Record], paper: Curve) -> float:
    """Root of the mean squared difference between our mean curve and the paper's, in points, over its rounds."""
    rounds, mean, _ = curve(records)
    ours, theirs = dict(zip(rounds, mean, strict=True)), dict(zip(*paper, strict=True))
    both = [(ours[t] - value) ** 2 for t, value in theirs.items() if t in ours]
    return fmean(both) ** 0.5 if both else float("nan")


def plot_paper(axes: Any, study: Study, column: str, rows: Sequence[str]) -> None:
    """The paper's curves, dashed, each in the colour of the first of our rows that it belongs to."""
    drawn = set()
    colours = {line.get_label(): line.get_color() for line in axes.get_lines()}
    for row in rows:
        found, method = curve_of(study, row, column), study.rows[row].drawn
        if found is not None and method not in drawn and study.row_label(row) in colours:
            drawn.add(method)
            colour = colours[study.row_label(row)]
            label = f"the paper: {NAMES.get(method or '', method)}"
            axes.plot(*found, color=colour, linestyle=(0, (3, 1.5)), linewidth=1.1, label=label)
