"""How every figure looks: one style, and one colour for each label, also on the page.

Colours differ also with red-green colour blindness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
