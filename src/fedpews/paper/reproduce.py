"""Studies from their files to their pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from fedpews.errors import ConfigError, explain
from fedpews.outside import MOST_TOML, parse_toml, read_text
from fedpews.paper.cells import NOT_RUN, CellResult, Runner
from fedpews.paper.cluster import Cluster
from fedpews.paper.figures import KINDS
from fedpews.paper.page import RUNS, Outcome, conclude, write_page
from fedpews.paper.published import Published, publish
from fedpews.paper.study import Cell, Scale, Study, cells, scaled, studies, used


def load_study(name: str) -> Study:
    """A study by name, or from a TOML file."""
    known = studies()
    if name in known:
        text, stem = known[name].read_text(), name
    elif name.endswith(".toml") and Path(name).is_file():
        text, stem = read_text(Path(name), MOST_TOML), Path(name).stem
    else:
        raise ConfigError(
            f"there is no study {name!r}; choose from {', '.join(known)}, all, or give a TOML file"
        )
    try:
        study = Study(**parse_toml(text, name) | {"name": stem})
    except ValidationError as error:
        raise ConfigError(f"study {stem}: {explain(error)}") from None
    for problem in _problems(study):
        raise ConfigError(f"study {stem}: {problem}")
    return study


def _problems(study: Study) -> Iterator[str]:
    """Names that do not exist, and numbers that belong to no cell."""
    for row, line in study.rows.items():
        for column in [*(line.columns or []), *line.at]:
            if column not in study.columns:
                yield f"rows.{row} names the column {column!r}, which does not exist"
    for measure, table in study.paper.items():
        for row, numbers in table.items():
            if row not in study.rows or len(numbers) != len(study.columns_of(row)):
                yield f"paper.{measure}.{row} needs a row of that name and one number for each of its columns"
    for claim in study.claims:
        for row in [*claim.rows, *([claim.than] if claim.than else [])]:
            if row not in study.rows:
                yield f"the claim {claim.text!r} names {row!r}, which is no row"
        if claim.kind != "between" and claim.than is None:
            yield f"the claim {claim.text!r} needs a row to compare with (than)"
    for figure in study.figures:
        if figure.kind not in KINDS:
            yield f"there is no figure of kind {figure.kind!r}; choose from {', '.join(KINDS)}"
        for row in itertools.chain.from_iterable(figure.options.get("than", {}).items()):
            if row not in study.rows:
                yield f"a figure of kind {figure.kind!r} names {row!r}, which is no row"


def reproduce(
    name: str,
    runner: Runner,
    scale: Scale | None = None,
    *,
    pages: Path | None = None,
    only: str | None = None,
    run: bool = True,
    cluster: Cluster | None = None,
) -> Iterator[Outcome]:
    """A study, or one after the other (``all``), each with its page in ``pages`` (by default the runner's root).

    Every finished cell is also written in compact form beside the pages. With ``run=False`` nothing is trained: the
    pages show the runs that exist, in run folders or in compact form.

    Args:
        only: cells to run, ``row``, ``row:column`` or ``:column``, several joined by commas, in this order; all by
            default.
    """
    folder, scale = pages or runner.root, scale or Scale()
    for each in list(studies()) if name == "all" else [name]:
        study = scaled(load_study(each), scale)
        publishing = replace(runner, published=folder / RUNS)
        outcome = run_study(study, publishing, used(study, scale), only=only, run=run, cluster=cluster)
        if any(result.status != NOT_RUN for result in outcome.table.values()):
            write_page(outcome, folder, runner.data_dir)
        yield outcome


def run_study(
    study: Study,
    runner: Runner,
    scale: Scale | None = None,
    *,
    only: str | None = None,
    run: bool = True,
    cluster: Cluster | None = None,
) -> Outcome:
    """Run the missing cells of a study, here or on a cluster, then read all of them."""
    scale = scale or Scale()
    every = cells(study, scale)
    # rows can be the same experiment, which is run once
    selected = [runner.read(cell) for cell in {c.name: c for c in _selected(study, every, only)}.values()]
    todo = [result.cell for result in selected if run and result.missing]
    finished = [result for result in selected if result.cell not in todo]
    new = cluster.run_cells(runner, todo, study.label) if cluster else _run_here(study, runner, todo)
    results = {}
    for result in itertools.chain(finished, new):
        if runner.published is not None and (result.folders or result.status == "diverged"):
            diverged = result.message if result.status == "diverged" else ""
            publish(result.cell, Published(result.runs, diverged, result.machines), runner.published)
        results[result.cell.name] = result
    table = [replace(results[c.name], cell=c) if c.name in results else runner.read(c) for c in every]
    return conclude(study, scale, table)


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
        row, _, column = name.strip().partition(":")
        matches = [c for c in every if row in ("", c.row) and column in ("", c.column) and c not in selected]
        if not matches:
            names = ", ".join(f"{c.row}:{c.column}" for c in every)
            raise ConfigError(f"--cells {name!r}: {study.name} has no such cell; it has {names}")
        selected += matches
    return selected
