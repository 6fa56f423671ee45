"""How every figure looks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import ConfigError
from fedpews.results.files import write_atomically

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

COLUMN, PAGE = 3.5, 7.2
"""Inches: one column of a two-column paper, and both."""


@contextmanager
def styled() -> Iterator[None]:
    """What is drawn and saved inside has the style."""
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
    # whole or not at all, and never through a link in somebody else's folder
    write_atomically(Path(path), _drawn(figure, kind, dpi=200, metadata=undated))


def _drawn(figure: Figure, kind: str, **options: Any) -> bytes:
    drawn = BytesIO()
    figure.savefig(drawn, format=kind, **options)
    return drawn.getvalue()
