"""Who holds what: classes × clients, a dot's area the number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.report.curves import plain
from fedpews.report.style import new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAMED = 30
"""Up to so many classes or clients, each is named."""

DRAWN = 200
"""Up to so many clients are drawn; dots of more could not be told apart."""


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
    """The same on given axes."""
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
