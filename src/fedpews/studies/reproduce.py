"""Studies from beginning to end: their cells, then their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedpews.errors import ConfigError
from fedpews.studies.cells import MakeWatcher, read_cell, run_cell
from fedpews.studies.page import RUNS, Outcome, conclude, write_page
from fedpews.studies.published import publish
from fedpews.studies.study import Cell, Scale, Study, cells, load_study, scaled, studies, used


def reproduce(
    name: str,
    root: Path,
    scale: Scale | None = None,
    *,
    pages: Path | None = None,
    only: str | None = None,
    data_dir: Path | None = None,
    run: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    watch: MakeWatcher | None = None,
) -> Iterator[Outcome]:
    """One study after the other (``all``: every one), each with its page written to ``pages`` (default ``root``).

    Every cell that is finished is also written in compact form beside the pages. With ``run=False`` nothing is
    trained: the pages show what is there, in run folders or in compact form.

    Args:
        only: cells to run, ``row`` or ``row:column``, several joined by commas, in this order; all by default.
    """
    scale = scale or Scale()
    for one in list(studies()) if name == "all" else [name]:
        study = scaled(load_study(one), scale)
        own = used(study, scale)
        published = (pages or root) / RUNS
        outcome = run_study(
            study,
            root,
            own,
            published=published,
            only=only,
            data_dir=data_dir,
            run=run,
            tell=tell,
            watch=watch,
        )
        write_page(outcome, pages or root, data_dir)
        yield outcome


def run_study(
    study: Study,
    root: Path,
    scale: Scale | None = None,
    *,
    published: Path | None = None,
    only: str | None = None,
    data_dir: Path | None = None,
    run: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    watch: MakeWatcher | None = None,
) -> Outcome:
    """Every cell of a study, then what follows from them."""
    scale = scale or Scale()
    every = cells(study, scale)
    todo = _chosen(study, every, only)
    found = {}
    for number, cell in enumerate(todo, 1):
        one = read_cell(root, cell, published)
        if run and one.missing:
            tell(f"{study.name} {number}/{len(todo)}: {_place(study, cell)}, {cell.experiment.rounds} rounds")
            one = run_cell(root, cell, data_dir, watch, published)
            if one.message:
                tell(f"  {one.status}: {one.message}")
        if published is not None and one.folders:
            publish(cell, one.runs, published)
        found[cell.row, cell.column] = one
    return conclude(
        study, scale, [found.get((c.row, c.column)) or read_cell(root, c, published) for c in every]
    )


def _chosen(study: Study, every: Sequence[Cell], only: str | None) -> list[Cell]:
    """The cells to run, in the order asked for."""
    if only is None:
        return list(every)
    chosen: list[Cell] = []
    for part in only.split(","):
        row, _, column = part.strip().partition(":")
        matches = [c for c in every if c.row == row and column in ("", c.column) and c not in chosen]
        if not matches:
            places = ", ".join(f"{c.row}:{c.column}" for c in every)
            raise ConfigError(f"--cells {part!r}: {study.name} has no such cell; it has {places}")
        chosen += matches
    return chosen


def _place(study: Study, cell: Cell) -> str:
    return f"{study.row_label(cell.row)}, {study.column_label(cell.column)}"
