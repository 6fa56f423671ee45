"""Studies from beginning to end: their cells, then their pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedpews.errors import ConfigError
from fedpews.paper.cells import Found, Job, MakeWatcher, RunCells, read_cell, run_cell
from fedpews.paper.page import RUNS, Outcome, conclude, write_page
from fedpews.paper.published import publish
from fedpews.paper.study import Cell, Scale, Study, cells, load_study, scaled, studies, used

Elsewhere = Callable[[Path, Path | None, Path | None], RunCells]
"""From where runs are kept, where they are published and where data lie: who runs cells."""


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
    elsewhere: Elsewhere | None = None,
) -> Iterator[Outcome]:
    """One study after the other (``all``: every one), each with its page written to ``pages`` (default ``root``).

    Every cell that is finished is also written in compact form beside the pages. With ``run=False`` nothing is
    trained: the pages show what is there, in run folders or in compact form.

    Args:
        only: cells to run, ``row`` or ``row:column``, several joined by commas, in this order; all by default.
        elsewhere: who runs the cells instead of this process, such as a cluster.
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
            elsewhere=elsewhere,
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
    elsewhere: Elsewhere | None = None,
) -> Outcome:
    """Every cell of a study, then what follows from them."""
    scale = scale or Scale()
    every = cells(study, scale)
    todo = _chosen(study, every, only)
    found = {(cell.row, cell.column): read_cell(root, cell, published) for cell in todo}
    todo = [cell for cell in todo if run and found[cell.row, cell.column].missing]
    as_it_is = [one for one in found.values() if one.cell not in todo]
    run_cells = run_here(study.name, root, published, data_dir, tell, watch)
    if elsewhere is not None:
        run_cells = elsewhere(root, published, data_dir)
    for one in itertools.chain(as_it_is, run_cells([(_place(study, cell), cell) for cell in todo])):
        diverged = one.message if one.status == "diverged" else ""
        if published is not None and (one.folders or diverged):
            publish(one.cell, one.runs, published, diverged, one.machines)
        found[one.cell.row, one.cell.column] = one
    return conclude(
        study, scale, [found.get((c.row, c.column)) or read_cell(root, c, published) for c in every]
    )


def run_here(
    name: str,
    root: Path,
    published: Path | None,
    data_dir: Path | None,
    tell: Callable[[str], None],
    watch: MakeWatcher | None,
) -> RunCells:
    """Cells one after the other in this process."""

    def run_cells(jobs: Sequence[Job]) -> Iterator[Found]:
        for number, (place, cell) in enumerate(jobs, 1):
            tell(f"{name} {number}/{len(jobs)}: {place}, {cell.experiment.rounds} rounds")
            one = run_cell(root, cell, data_dir, watch, published)
            if one.message:
                tell(f"  {one.status}: {one.message}")
            yield one

    return run_cells


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
