"""A study from its cells to its page."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError
from fedpews.paper.cells import NOT_RUN, CellResult, Runner, publish
from fedpews.paper.claims import Outcome, conclude
from fedpews.paper.cluster import Cluster
from fedpews.paper.page import RUNS, write_page
from fedpews.paper.study import Cell, Study, adapted, cells, is_named, load_study, studies


def reproduce(
    name: str,
    runner: Runner,
    *,
    small: bool = False,
    seeds: Sequence[int] | None = None,
    changed: Mapping[str, Any] | None = None,
    pages: Path | None = None,
    only: str | None = None,
    run: bool = True,
    cluster: Cluster | None = None,
) -> Iterator[Outcome]:
    """A study, or one after the other (``all``), each with its page in ``pages`` (by default the runner's root).

    Every finished cell is also written in compact form beside the pages. With ``run=False`` nothing is trained: the
    pages show the runs that exist, in run folders or in compact form.

    Args:
        small: the scaled-down version of a study that has one.
        changed: settings that are changed in every cell.
        only: cells to run, ``row``, ``row:column`` or ``:column``, several joined by commas, in this order; all by
            default.
    """
    folder = pages or runner.root
    for each in list(studies()) if name == "all" else [name]:
        study = adapted(load_study(each), seeds, changed or {}, small)
        publishing = replace(runner, published=folder / RUNS)
        outcome = run_study(study, publishing, only=only, run=run, cluster=cluster)
        if any(result.status != NOT_RUN for result in outcome.table.values()):
            write_page(outcome, folder)
        yield outcome


def run_study(
    study: Study,
    runner: Runner,
    *,
    only: str | None = None,
    run: bool = True,
    cluster: Cluster | None = None,
) -> Outcome:
    """Run the missing cells of a study, here or on a cluster, then read all of them."""
    every = cells(study)
    # rows can be the same experiment, which is run once
    selected = [runner.read(cell) for cell in {c.name: c for c in _selected(study, every, only)}.values()]
    todo = [result.cell for result in selected if run and result.missing]
    finished = [result for result in selected if result.cell not in todo]
    new = cluster.run_cells(runner, todo, study.label) if cluster else _run_here(study, runner, todo)
    results = {}
    for result in itertools.chain(finished, new):
        if runner.published is not None and (result.folders or result.status == "diverged"):
            publish(result, runner.published)
        results[result.cell.name] = result
    table = [replace(results[c.name], cell=c) if c.name in results else runner.read(c) for c in every]
    failed = [c.name for c in todo if results[c.name].status in ("failed", "diverged", "data missing")]
    return replace(conclude(study, table), failed=len(failed))


def _run_here(study: Study, runner: Runner, todo: Sequence[Cell]) -> Iterator[CellResult]:
    for number, cell in enumerate(todo, 1):
        rounds = cell.experiment.rounds
        runner.log(f"{study.name} {number}/{len(todo)}: {study.label(cell)}, {rounds} rounds")
        result = runner.run(cell)
        if result.message:
            runner.log(f"  {result.status}: {result.message}")
        yield result


def _selected(study: Study, every: Sequence[Cell], only: str | None) -> list[Cell]:
    """The cells to run, in the order of ``only``."""
    if only is None:
        return list(every)
    selected: list[Cell] = []
    for name in only.split(","):
        matches = [c for c in every if is_named(name, c.row, c.column) and c not in selected]
        if not matches:
            names = ", ".join(f"{c.row}:{c.column}" for c in every)
            raise ConfigError(f"--cells {name!r}: {study.name} has no such cell; it has {names}")
        selected += matches
    return selected
