"""A study as data: a table or figure of the paper as rows × columns of experiments, its numbers and its claims."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import Field

from fedpews.compose import find_class
from fedpews.config import STUDIES, RuntimeTable, flatten, override, read_config, shipped
from fedpews.experiment import Experiment
from fedpews.options import Table
from fedpews.results.layout import legal_name

SMALL = "-small"
"""Ends the name of a study's small version and of its page."""


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
    kind: str = Field("curves", description="a key of figures.KINDS")
    options: dict[str, Any] = Field({})


class Small(Table):
    """What --small changes; the page says so."""

    seeds: list[int] | None = None
    rows: list[str] | None = None
    columns: list[str] | None = None
    set: dict[str, Any] = Field({})
    at: dict[str, dict[str, Any]] = Field({}, description="further changes in single columns")


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
    command: str = Field("", description="what makes it again, for a study that is in no file")
    small: Small | None = Field(
        None, description="a version for one machine; None for a study that is small already"
    )

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
class Scale:
    """How a reproduction departs from the paper's scale."""

    small: bool = False
    seeds: tuple[int, ...] | None = None
    set: Mapping[str, Any] = field(default_factory=dict)
    stand_in: Mapping[str, str] = field(default_factory=dict)  # data set → the one used instead

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that can change a number."""
        return {key: value for key, value in self.set.items() if not key.startswith("runtime.")}

    def describe(self, study: Study) -> list[str]:
        """What differs from the study, for the page."""
        sentences = []
        if self.small and study.small is not None:
            sentences.append(f"scaled down (--small): {_settings(flatten(study.small.set))}")
            for column, changes in study.small.at.items():
                sentences.append(f"{study.column_label(column)}: {_settings(flatten(changes))}")
        if self.changed:
            sentences.append(f"changed: {_settings(self.changed)}")
        return sentences + [f"{other} stands in for {name}" for name, other in self.stand_in.items()]


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())


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


def used(study: Study, scale: Scale) -> Scale:
    """The scale without stand-ins for data that the study does not use."""
    names = {cell.experiment.data.name for cell in cells(study, replace(scale, stand_in={}))}
    return replace(scale, stand_in={name: other for name, other in scale.stand_in.items() if name in names})


def scaled(study: Study, scale: Scale) -> Study:
    """The study with only the rows, columns and seeds of a scale."""
    seeds = {} if scale.seeds is None else {"seeds": list(scale.seeds)}
    small = study.small
    if not scale.small or small is None:
        return study.model_copy(update=seeds)
    columns = {c: line for c, line in study.columns.items() if small.columns is None or c in small.columns}
    rows = {
        row: line
        for row, line in study.rows.items()
        if (small.rows is None or row in small.rows) and columns.keys() & study.columns_of(row)
    }
    paper = {
        measure: {
            row: [n for n, c in zip(numbers, study.columns_of(row), strict=True) if c in columns]
            for row, numbers in table.items()
            if row in rows
        }
        for measure, table in study.paper.items()
    }
    claims = [left for claim in study.claims if (left := _narrowed(claim, study, rows, columns))]
    changes = {"name": study.name + SMALL, "rows": rows, "columns": columns, "paper": paper, "claims": claims}
    return study.model_copy(update={"seeds": small.seeds or study.seeds, **changes, **seeds})


def _narrowed(claim: Claim, study: Study, rows: Container[str], columns: Container[str]) -> Claim | None:
    """The claim about the cells that are left; None if they are too few for it."""
    left_rows = [row for row in claim.rows if row in rows]
    all_columns = claim.columns or list(study.columns)
    left_columns = [column for column in all_columns if column in columns]
    enough = len(left_columns) >= (2 if claim.kind == "shrinks" else 1)
    if not left_rows or not enough or (claim.than is not None and claim.than not in rows):
        return None
    fewer = len(left_rows) < len(claim.rows) or len(left_columns) < len(all_columns)
    # the sentence of a claim names all its cells
    text = f"{claim.text} (only some of its cells here)" if fewer else claim.text
    changes = {"rows": left_rows, "columns": claim.columns and left_columns, "text": text}
    return claim.model_copy(update=changes)


def cells(study: Study, scale: Scale | None = None) -> list[Cell]:
    """Every cell of a study that `scaled` returned, column by column."""
    scale = scale or Scale()
    return [
        Cell(row, column, _experiment(study, row, column, scale), study.probe, study.draws)
        for column in study.columns
        for row in study.rows
        if column in study.columns_of(row)
    ]


def _experiment(study: Study, row: str, column: str, scale: Scale) -> Experiment:
    across, down = study.columns[column], study.rows[row]
    values = read_config(down.base or across.base or study.base)
    small = study.small if scale.small else None
    smaller = [] if small is None else [small.set, small.at.get(column, {})]
    for layer in (across.set, down.set, down.at.get(column, {}), *smaller, scale.set):
        values = override(values, flatten(layer))
    name = values.get("data", {}).get("name")
    if name in scale.stand_in:
        values = override(values, {"data.name": scale.stand_in[name]})
    return canonical(Experiment(**override(values, {"seeds": study.seeds})))


def canonical(experiment: Experiment) -> Experiment:
    """The experiment without settings that change nothing in its run: equal runs become equal."""
    from fedpews.options import option_types

    values, kind = experiment.to_dict(), experiment.warmup_kind
    read = set() if kind == "none" else {"kind", *option_types(find_class("masks", kind))}
    if kind == "random":
        read.add("diversity")  # not read, but in the names of the published runs
    values["warmup"] = {key: value for key, value in values["warmup"].items() if key in read}
    if kind != "none":  # τ or W: the same run
        values["warmup"]["rounds"] = experiment.warmup_rounds
    return Experiment(**values)
