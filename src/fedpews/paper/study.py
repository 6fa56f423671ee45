"""A study as data: a table or figure of the paper as rows × columns of experiments, its numbers and its claims."""

from __future__ import annotations

import hashlib
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from fedpews.compose import find_class
from fedpews.config import STUDIES, RuntimeTable, flatten, override, read_config, shipped
from fedpews.errors import ConfigError, explain
from fedpews.experiment import Experiment
from fedpews.options import Table
from fedpews.outside import MOST_TOML, parse_toml, read_text
from fedpews.results.layout import legal_name

SMALL = "-small"
"""Ends the name of a study's small version and of its page."""

SWEEP = "Sweep"
"""The item of a study that is not about the paper."""


class Line(Table):
    """A row or a column: what it changes in the base experiment."""

    label: str | None = None
    base: str | None = Field(None, description="a recipe to start from instead of the study's")
    set: dict[str, Any] = Field({}, description="changes, as nested tables or dotted keys")
    columns: list[str] | None = Field(None, description="for a row: only in these columns")
    drawn: str | None = Field(
        None,
        description="for a row: its method in the paper's figure; for a column: that figure, see curves.json",
    )
    at: dict[str, dict[str, Any]] = Field({}, description="for a row: further changes in single columns")
    baseline: bool = Field(
        False, description="a row that runs in one column and is drawn and compared with in all"
    )


class Claim(Table):
    """A sentence of the paper that our runs can contradict.

    better: each of ``rows`` beats ``than`` in the measure, in the mean ``by`` at least so much.
    near: it differs by at most ``within``.
    shrinks: its gain over ``than`` is larger in the first of the columns than in the last.
    between: its measure lies from ``low`` to ``high``.
    """

    text: str
    kind: Literal["better", "near", "shrinks", "between"] = "better"
    rows: list[str]
    than: str | None = None
    measure: str = "final"
    columns: list[str] | None = None
    by: float = 0.0
    within: float = 1.0
    low: float = float("-inf")
    high: float = float("inf")
    paper: str = Field("", description="the paper's number, where its table has none")


class Figure(Table):
    kind: Literal["curves", "heatmap", "gains", "dots", "activations"] = "curves"
    options: dict[str, Any] = Field({})


class Small(Table):
    """The version of a study that two cores can run; its page says what is scaled down."""

    seeds: list[int] = Field([0, 1, 2, 3, 4, 5])
    set: dict[str, Any] = Field({}, description="changes in all cells")
    columns: dict[str, dict[str, Any]] = Field({}, description="further changes in single columns")
    cells: str | None = Field(None, description="its cells, as --cells names them; by default all")


class Study(Table):
    """One item of the paper. ``paper`` holds its numbers: measure → row → a number for each column, as printed."""

    name: str
    order: int = Field(99, description="its position among the paper's items")
    item: str = Field(description="the table or figure, as the paper numbers it")
    title: str
    base: str = Field(description="the recipe every cell starts from")
    seeds: list[int] = Field([0, 1, 2])
    draws: int = Field(1, ge=1, description="data draws: seed s is run on draw s modulo this")
    measures: list[str] = Field(["final"])
    rows: dict[str, Line]
    columns: dict[str, Line]
    paper: dict[str, dict[str, list[str]]] = Field({})
    claims: list[Claim] = Field([])
    figures: list[Figure] = Field([Figure()])
    probe: Literal["activations"] | None = Field(None, description="what to record besides the rounds")
    notes: str = ""
    command: str = Field("", description="what makes it again, if that is not `fedpews reproduce NAME`")
    small: Small | None = Field(None, description="None for a study that is small already")
    scaled: Small | None = Field(None, description="the small version, if the cells are those of it")
    changed: dict[str, Any] = Field({}, description="what --set changes in every cell; the page says so")

    @property
    def departures(self) -> dict[str, Any]:
        """The changed settings that can change a number."""
        return {key: value for key, value in self.changed.items() if not key.startswith("runtime.")}

    @property
    def scale(self) -> list[str]:
        """What differs from the paper's scale, if anything."""
        changes = {"": self.departures}
        if self.scaled:
            each = {f" in {self.column_label(column)}": set for column, set in self.scaled.columns.items()}
            changes = {" (--small)": self.scaled.set, **each, **changes}
        lists = {
            where: ", ".join(f"{key} = {value}" for key, value in flatten(set).items())
            for where, set in changes.items()
        }
        return [f"changed{where}: {text}" for where, text in lists.items() if text]

    def row_label(self, row: str) -> str:
        return self.rows[row].label or row

    def column_label(self, column: str) -> str:
        return self.columns[column].label or column

    def label(self, cell: Cell) -> str:
        return f"{self.row_label(cell.row)}, {self.column_label(cell.column)}"

    def columns_of(self, row: str) -> list[str]:
        only = self.rows[row].columns
        return [column for column in self.columns if only is None or column in only]

    def column_for(self, row: str, column: str) -> str:
        """The column to read a row in: its own, or a baseline's only one (FedAvg beside any τ)."""
        return self.columns_of(row)[0] if self.rows[row].baseline else column

    def paper_number(self, measure: str, row: str, column: str) -> str:
        """As printed, ``71.23 ± 0.71``; empty where the paper gives none."""
        numbers = self.paper.get(measure, {}).get(row)
        return numbers[self.columns_of(row).index(column)] if numbers else ""


@dataclass(frozen=True)
class Cell:
    """An entry of a study's table."""

    row: str
    column: str
    experiment: Experiment
    probe: str | None = None
    draws: int = 1

    def changes(self) -> dict[str, Any]:
        """What differs from the defaults, except seeds and engine."""
        return _bare(self.experiment).model_dump(exclude_defaults=True)

    def settings(self) -> dict[str, Any]:
        """All settings with their values, as JSON has them, defaults too, except seeds and engine."""
        return _bare(self.experiment).model_dump(mode="json", exclude={"seeds", "runtime"})

    def draw(self, seed: int) -> int:
        """The data draw of a seed: with one draw for all seeds, the variance between draws would stay hidden."""
        return self.experiment.data.seed + seed % self.draws

    @property
    def name(self) -> str:
        """The name of its folder: the same for the same experiment in every study.

        Only what differs from the defaults counts, so that a key added later changes no name.
        """
        digest = hashlib.sha256(json.dumps(self.changes(), sort_keys=True).encode()).hexdigest()[:10]
        kind = f"-{self.probe}" if self.probe else ""
        return legal_name(f"{self.experiment.data.name}-{self.experiment.method_label}{kind}-{digest}")

    def matches(self, experiment: Experiment) -> bool:
        """Whether a run of that experiment is a run of this cell, whatever its seeds, data draw and engine."""
        data = experiment.data.model_copy(update={"seed": self.experiment.data.seed})
        same = canonical(experiment).model_copy(update={"data": data})
        return _bare(same).fingerprint() == _bare(self.experiment).fingerprint()

    def on_draw(self, draw: int, seeds: Sequence[int]) -> Experiment:
        """The experiment of some of its seeds on one data draw."""
        data = self.experiment.data.model_copy(update={"seed": draw})
        return self.experiment.model_copy(update={"seeds": list(seeds), "data": data})


def _bare(experiment: Experiment) -> Experiment:
    return experiment.model_copy(update={"seeds": [0], "runtime": RuntimeTable()})


def studies() -> dict[str, Any]:
    """The paper's studies by name, in the paper's order: the file of each."""
    files = shipped(STUDIES)
    order = {name: tomllib.loads(file.read_text()).get("order", 99) for name, file in files.items()}
    return {name: files[name] for name in sorted(files, key=lambda name: (order[name], name))}


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
        options = figure.options
        named = [*options.get("rows", []), *options.get("curves_rows", [])]
        for row in itertools.chain(named, *options.get("than", {}).items()):
            if row not in study.rows:
                yield f"a figure of kind {figure.kind!r} names {row!r}, which is no row"


def adapted(
    study: Study, seeds: Sequence[int] | None, changed: Mapping[str, Any], small: bool = False
) -> Study:
    """The study, or its small version, with other seeds and with settings changed in every cell."""
    values: dict[str, Any] = {"seeds": list(seeds or study.seeds), "changed": dict(changed)}
    flags = []
    if small and study.small is not None:
        values |= {"name": study.name + SMALL, "scaled": study.small}
        values |= _restricted(study, study.small.cells) if study.small.cells else {}
        values["seeds"] = list(seeds or study.small.seeds)
        flags.append("--small")
    new = study.model_copy(update=values)
    flags += [f"--seeds {','.join(map(str, seeds))}"] if seeds else []
    flags += [f"--set {key}={value}" for key, value in new.departures.items()]
    return new.model_copy(update={"command": " ".join([f"fedpews reproduce {study.name}", *flags])})


def is_named(text: str, row: str, column: str) -> bool:
    """Whether ``row``, ``row:column`` or ``:column`` names this cell.

    >>> is_named("fedavg", "fedavg", "t02"), is_named(":t04", "fedavg", "t02")
    (True, False)
    """
    wanted_row, _, wanted_column = text.strip().partition(":")
    return wanted_row in ("", row) and wanted_column in ("", column)


def _restricted(study: Study, names: str) -> dict[str, Any]:
    """The rows and the paper's numbers of a study with only the cells of these names."""
    columns = {
        row: [c for c in study.columns_of(row) if any(is_named(name, row, c) for name in names.split(","))]
        for row in study.rows
    }
    paper = {
        measure: {row: [study.paper_number(measure, row, column) for column in columns[row]] for row in rows}
        for measure, rows in study.paper.items()
    }
    rows = {row: line.model_copy(update={"columns": columns[row]}) for row, line in study.rows.items()}
    return {"rows": rows, "paper": paper}


def cells(study: Study) -> list[Cell]:
    """Every cell of a study, column by column."""
    return [
        Cell(row, column, _experiment(study, row, column), study.probe, study.draws)
        for column in study.columns
        for row in study.rows
        if column in study.columns_of(row)
    ]


def _experiment(study: Study, row: str, column: str) -> Experiment:
    across, down = study.columns[column], study.rows[row]
    values = read_config(down.base or across.base or study.base)
    layers = [across.set, down.set, down.at.get(column, {})]
    if study.scaled:
        layers += [study.scaled.set, study.scaled.columns.get(column, {})]
    for layer in (*layers, study.changed, {"seeds": study.seeds}):
        values = override(values, flatten(layer))
    return canonical(Experiment(**values))


def canonical(experiment: Experiment) -> Experiment:
    """The experiment without settings that change nothing in its run: equal runs become equal."""
    from fedpews.options import option_types

    values, kind = experiment.to_dict(), experiment.warmup_kind
    read = set() if kind == "none" else {"kind", "ramp", *option_types(find_class("masks", kind))}
    if kind == "random":
        read.add("diversity")  # not read, but in the names of the published runs
    values["warmup"] = {key: value for key, value in values["warmup"].items() if key in read}
    if kind != "none":  # τ or W: the same run
        values["warmup"]["rounds"] = experiment.warmup_rounds
    return Experiment(**values)
