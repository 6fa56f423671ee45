"""Studies from beginning to end: their cells, then their pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from fedpews.studies.cells import MakeWatcher, read_cell, run_cell
from fedpews.studies.page import Outcome, conclude, write_page
from fedpews.studies.study import Cell, Scale, Study, cells, load_study, scaled, studies, used


def reproduce(
    name: str,
    root: Path,
    scale: Scale | None = None,
    *,
    pages: Path | None = None,
    data_dir: Path | None = None,
    run: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    watch: MakeWatcher | None = None,
) -> Iterator[Outcome]:
    """One study after the other (``all``: every one), each with its page written to ``pages`` (default ``root``).

    With ``run=False`` nothing is trained: the pages show what is there.
    """
    scale = scale or Scale()
    for one in list(studies()) if name == "all" else [name]:
        study = scaled(load_study(one), scale)
        own = used(study, scale)
        outcome = run_study(study, root, own, data_dir=data_dir, run=run, tell=tell, watch=watch)
        write_page(outcome, pages or root, data_dir)
        yield outcome


def run_study(
    study: Study,
    root: Path,
    scale: Scale | None = None,
    *,
    data_dir: Path | None = None,
    run: bool = True,
    tell: Callable[[str], None] = lambda text: None,
    watch: MakeWatcher | None = None,
) -> Outcome:
    """Every cell of a study, then what follows from them."""
    scale = scale or Scale()
    todo = cells(study, scale)
    found = []
    for number, cell in enumerate(todo, 1):
        one = read_cell(root, cell)
        if run and one.missing:
            tell(f"{study.name} {number}/{len(todo)}: {_place(study, cell)}, {cell.experiment.rounds} rounds")
            one = run_cell(root, cell, data_dir, watch)
            if one.message:
                tell(f"  {one.status}: {one.message}")
        found.append(one)
    return conclude(study, scale, found)


def _place(study: Study, cell: Cell) -> str:
    return f"{study.row_label(cell.row)}, {study.column_label(cell.column)}"
