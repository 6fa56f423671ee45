"""A table of numbers as colours with the numbers in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def plot_heatmap(
    axes: Any,
    values: Sequence[Sequence[float]],  # (rows, columns); nan: nothing there
    rows: Sequence[str],
    columns: Sequence[str],
    digits: int = 1,
) -> None:
    """Brighter is higher; an empty place is grey."""
    known = [value for row in values for value in row if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    high = high if high > low else low + 1
    shown = [[value if math.isfinite(value) else math.nan for value in row] for row in values]
    axes.set_facecolor("0.85")
    axes.imshow(
        shown,
        cmap="viridis",
        vmin=low,
        vmax=high,
        aspect="auto",
        interpolation="none",
    )
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            if math.isfinite(value):
                dark = value < low + 0.6 * (high - low)
                text = f"{value:.{digits}f}"
                axes.text(j, i, text, ha="center", va="center", color="w" if dark else "k", fontsize=8)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
