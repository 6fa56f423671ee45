"""A study as data: a table or figure of the paper as rows × columns of experiments, its numbers and its claims."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedpews.configs import STUDIES, flatten, override, read_config, shipped
from fedpews.errors import ConfigError
from fedpews.experiment import Experiment, WarmupTable
from fedpews.outside import MOST_TOML, parse_toml, read_text
from fedpews.results.layout import legal_name
from fedpews.tables import RuntimeTable


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Line(_Table):
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


class Claim(_Table):
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


class Figure(_Table):
    kind: Literal["curves", "time", "heatmap", "dots", "clients", "splits", "activations", "cost"] = "curves"
    options: dict[str, Any] = {}


class Quick(_Table):
    """What --quick changes: always said on the page."""

    seeds: list[int] | None = None
    rows: list[str] | None = None
    columns: list[str] | None = None
    set: dict[str, Any] = {}


class Study(_Table):
    """One item of the paper. ``paper`` holds its numbers: measure → row → a number for each column, as printed."""

    name: str
    order: int = Field(99, description="its place among the paper's items")
    item: str = Field(description="the table or figure, as the paper numbers it")
    title: str
    base: str = Field(description="the recipe every cell starts from")
    seeds: list[int] = [0, 1, 2]
    draws: int = Field(1, ge=1, description="data draws: seed s is run on draw s modulo this")
    measures: list[str] = ["final"]
    rows: dict[str, Line]
    columns: dict[str, Line]
    paper: dict[str, dict[str, list[str]]] = {}
    claims: list[Claim] = []
    figures: list[Figure] = [Figure()]
    probe: str | None = Field(None, description="what to record besides the rounds: activations")
    notes: str = ""
    command: str = Field("", description="what makes it again, for a study that is in no file")
    quick: Quick = Quick()

    def row_label(self, row: str) -> str:
        return self.rows[row].label or row

    def column_label(self, column: str) -> str:
        return self.columns[column].label or column

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

    quick: bool = False
    seeds: tuple[int, ...] | None = None
    set: Mapping[str, Any] | None = None
    stand_in: Mapping[str, str] | None = None  # data set → the one used in its place

    def describe(self, study: Study) -> list[str]:
        """What is not as in the study, for the page."""
        told = []
        if self.quick:
            less = _settings(flatten(study.quick.set))
            told.append(
                f"scaled down (--quick): {less}" if less else "scaled down (--quick): fewer cells and seeds"
            )
        changed = {key: value for key, value in (self.set or {}).items() if not key.startswith("runtime.")}
        if changed:
            told.append(f"changed: {_settings(changed)}")
        told += [f"{other} stands in for {name}" for name, other in (self.stand_in or {}).items()]
        return told


@dataclass(frozen=True)
class Cell:
    """One entry of a study's table."""

    row: str
    column: str
    experiment: Experiment
    probe: str | None = None
    draws: int = 1

    def changes(self) -> dict[str, Any]:
        """What is not a default, seeds and engine aside."""
        return _bare(self.experiment).model_dump(exclude_defaults=True)

    def draw(self, seed: int) -> int:
        """The data draw that a seed is run on: seeds alone would not show the variance between draws."""
        return self.experiment.data.seed + seed % self.draws

    @property
    def name(self) -> str:
        """Where its runs are kept: the same place for the same experiment in every study.

        Only what is not a default counts, so that a key that a later version adds moves nothing.
        """
        digest = hashlib.sha256(json.dumps(self.changes(), sort_keys=True).encode()).hexdigest()[:10]
        kind = f"-{self.probe}" if self.probe else ""
        return legal_name(f"{self.experiment.data.name}-{self.experiment.method_label}{kind}-{digest}")

    def is_run_by(self, experiment: Experiment) -> bool:
        """Whether a run of that experiment is a run of this cell, whatever its seeds, its draw and what trained it."""
        data = experiment.data.model_copy(update={"seed": self.experiment.data.seed})
        same = canonical(experiment).model_copy(update={"data": data})
        return _bare(same).fingerprint() == _bare(self.experiment).fingerprint()


def _bare(experiment: Experiment) -> Experiment:
    return experiment.model_copy(update={"seeds": [0], "runtime": RuntimeTable()})


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
    values = parse_toml(text, name)
    try:
        study = Study(**values | {"name": stem})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"study {stem}: {place}: {first['msg']}, got {first['input']!r:.60}") from None
    _check(study)
    return study


def studies() -> dict[str, Any]:
    """The paper's items by name, in its order: the file of each."""
    found = shipped(STUDIES)
    order = {name: tomllib.loads(file.read_text()).get("order", 99) for name, file in found.items()}
    return {name: found[name] for name in sorted(found, key=lambda name: (order[name], name))}


def used(study: Study, scale: Scale) -> Scale:
    """The scale without the stand-ins for data that the study does not ask for."""
    if not scale.stand_in:
        return scale
    asked = {cell.experiment.data.name for cell in cells(study, replace(scale, stand_in=None))}
    kept = {name: other for name, other in scale.stand_in.items() if name in asked}
    return replace(scale, stand_in=kept or None)


def scaled(study: Study, scale: Scale) -> Study:
    """The study with the rows, columns and seeds that a scale leaves."""
    changes: dict[str, Any] = {}
    if scale.quick:
        quick = study.quick
        columns = [c for c in study.columns if quick.columns is None or c in quick.columns]
        rows = {
            name: line
            for name, line in study.rows.items()
            if (quick.rows is None or name in quick.rows) and set(study.columns_of(name)) & set(columns)
        }
        changes = {
            "columns": {name: study.columns[name] for name in columns},
            "rows": rows,
            "seeds": quick.seeds or study.seeds,
            "paper": _narrow(study, rows, columns),
            "claims": _possible(study.claims, rows, columns, study.columns),
        }
    if scale.seeds is not None:
        changes["seeds"] = list(scale.seeds)
    return study.model_copy(update=changes)


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
    layers = [
        across.set,
        down.set,
        down.at.get(column, {}),
        *([study.quick.set] if scale.quick else []),
        scale.set or {},
    ]
    for layer in layers:
        values = override(values, flatten(layer))
    name = values.get("data", {}).get("name")
    if scale.stand_in and name in scale.stand_in:
        values = override(values, {"data.name": scale.stand_in[name]})
    return canonical(Experiment(**override(values, {"seeds": study.seeds})))


def canonical(experiment: Experiment) -> Experiment:
    """Without the warmup settings that its kind of warmup does not read, so that equal runs are known as equal."""
    everything = set(WarmupTable.model_fields)
    read = {
        "none": set(),
        "fixed": {"kind", "rounds", "fraction", "shares", "evaluate", "unowned"},
    }.get(experiment.warmup_kind, everything - {"shares"})
    values = experiment.to_dict()
    values["warmup"] = {key: value for key, value in values["warmup"].items() if key in read}
    if experiment.warmup_kind != "none":  # τ or W: the same run
        values["warmup"].pop("fraction", None)
        values["warmup"]["rounds"] = experiment.warmup_rounds
    return Experiment(**values)


def with_seeds(cell: Cell, seeds: Sequence[int]) -> Cell:
    """A cell of which only these seeds are wanted."""
    return replace(cell, experiment=cell.experiment.model_copy(update={"seeds": list(seeds)}))


def on_draw(cell: Cell, seeds: Sequence[int], draw: int) -> Experiment:
    """The run of some of a cell's seeds on one data draw."""
    data = cell.experiment.data.model_copy(update={"seed": draw})
    return cell.experiment.model_copy(update={"seeds": list(seeds), "data": data})


def _check(study: Study) -> None:
    """Everything a study names must be there, and every number must have its place."""
    for row, line in study.rows.items():
        for column in [*(line.columns or []), *line.at]:
            if column not in study.columns:
                raise ConfigError(
                    f"study {study.name}: rows.{row} names the column {column!r}, which is not there"
                )
    for measure, table in study.paper.items():
        for row, numbers in table.items():
            if row not in study.rows or len(numbers) != len(study.columns_of(row)):
                raise ConfigError(
                    f"study {study.name}: paper.{measure}.{row} needs a row of that name and one number for each "
                    "of its columns"
                )
    for claim in study.claims:
        for row in [*claim.rows, *([claim.than] if claim.than else [])]:
            if row not in study.rows:
                raise ConfigError(
                    f"study {study.name}: the claim {claim.text!r} names {row!r}, which is no row"
                )
        if claim.kind != "between" and claim.than is None:
            raise ConfigError(
                f"study {study.name}: the claim {claim.text!r} needs a row to compare with (than)"
            )


def _narrow(
    study: Study, rows: Mapping[str, Line], columns: Sequence[str]
) -> dict[str, dict[str, list[str]]]:
    return {
        measure: {
            row: [n for n, c in zip(numbers, study.columns_of(row), strict=True) if c in columns]
            for row, numbers in table.items()
            if row in rows
        }
        for measure, table in study.paper.items()
    }


def _possible(claims: Sequence[Claim], rows: Any, columns: Any, every: Any) -> list[Claim]:
    """The claims of which a scaled-down study still has cells."""
    left = []
    for claim in claims:
        kept_rows = [row for row in claim.rows if row in rows]
        kept = None if claim.columns is None else [c for c in claim.columns if c in columns]
        too_few = kept == [] or (claim.kind == "shrinks" and len(kept or columns) < 2)
        if kept_rows and (claim.than is None or claim.than in rows) and not too_few:
            fewer = len(kept_rows) < len(claim.rows) or len(kept or columns) < len(claim.columns or every)
            # the sentence of a claim names all its cells, so one that is judged by fewer says so
            text = f"{claim.text} (only some of its cells here)" if fewer else claim.text
            left.append(claim.model_copy(update={"rows": kept_rows, "columns": kept, "text": text}))
    return left


def _settings(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in values.items())
