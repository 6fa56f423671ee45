"""A study's outcome as one Markdown page with its figures, and the index of all pages with the table of claims."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from fedpews.results.schema import read_object
from fedpews.results.statistics import ENOUGH_SEEDS, SIGNIFICANT, unpaired_interval
from fedpews.paper.cells import Found
from fedpews.paper.figures import Table, draw
from fedpews.paper.measures import MEASURES, halves, printed, spread
from fedpews.paper.paper_curves import curve_of, distance
from fedpews.paper.study import Scale, Study, studies
from fedpews.paper.verdicts import Readings, Verdict, judge, summarise

PAPER_SEEDS = 3
"""Behind each of the paper's means and deviations."""

RUNS = "runs"
"""Beside the pages: every cell's runs in compact form."""


_CLAIMS = (
    "Methods are compared seed by seed, because seeds differ far more than methods. A number is the mean of the "
    "paired differences with its 95 % interval (BCa bootstrap from ten seeds on, Student's t below), positive "
    "where the first is better; a seed that never reaches the target counts with all rounds. *Agrees* "
    "is said where all of the interval is on the paper's side, *contradicts* where all of it is on the other; with "
    f"fewer than {ENOUGH_SEEDS} seeds, or a p of {SIGNIFICANT} or more, nothing is. p is that of the exact "
    "sign-flip test (where two are said to be near, of two one-sided ones against the margin), corrected (Holm) "
    "for all claims of a page. *Scaled down* means fewer rounds, fewer images or a narrower network than the "
    f"paper's; the page of the item says which. Every seed's curve is in `{RUNS}/` beside this page: `fedpews "
    "reproduce NAME --no-run --pages docs/results` rebuilds a page from them."
)
"""How an index with claims is to be read."""


class VerdictShape(TypedDict):
    """A `Verdict`, as it lies in a file."""

    claim: str
    where: str
    paper: str
    ours: str
    seeds: int
    finding: str
    agrees: bool | None
    p: float | None


class FactsShape(TypedDict):
    """NAME.json beside a study's page: what the index says of it."""

    name: str
    item: str
    title: str
    command: str
    scale: list[str]
    seeds: int
    cells: str
    verdicts: list[VerdictShape]


@dataclass(frozen=True)
class Outcome:
    """A study as it stands: what was found, and what follows from it."""

    study: Study
    scale: Scale
    table: Table
    readings: Readings
    verdicts: list[Verdict]

    @property
    def command(self) -> str:
        base = self.study.command or f"fedpews reproduce {self.study.name}"
        return " ".join([base, *_flags(self.scale)])


def conclude(study: Study, scale: Scale, found: Sequence[Found]) -> Outcome:
    """Read every measure off the finished cells, and judge the claims."""
    table = {(one.cell.row, one.cell.column): one for one in found}
    names = dict.fromkeys([*study.measures, *(claim.measure for claim in study.claims)])
    readings: dict[tuple[str, str, str], dict[int, float]] = {}
    finite: dict[tuple[str, str, str], dict[int, float]] = {}
    for name in names:
        for (row, column), one in table.items():
            goal = one.cell.experiment.goal
            measure = MEASURES[name]
            for kept, read in ((readings, measure.read), (finite, measure.restricted)):
                values = {seed: read(run, goal) for seed, run in one.runs.items()}
                kept[name, row, column] = {seed: value for seed, value in values.items() if value == value}
    return Outcome(study, scale, table, readings, judge(study, finite))


def number_rows(outcome: Outcome, measure: str) -> list[list[str]]:
    """A measure as a table of text: a header, then a line per row, ours over the paper's."""
    study = outcome.study
    rows = [["", *(study.column_label(column) for column in study.columns)]]
    for row in study.rows:
        line = [study.row_label(row)]
        for column in study.columns:
            found = outcome.table.get((row, column))
            if found is None:
                line.append("")
                continue
            values = list(outcome.readings[measure, row, column].values())
            ours = (
                spread(values, MEASURES[measure].digits) if values else ("–" if found.runs else found.status)
            )
            paper = study.paper_number(measure, row, column)
            line.append(f"{ours} [{paper}]" if paper else ours)
        rows.append(line)
    return rows


def apart_rows(outcome: Outcome, measure: str) -> list[list[str]]:
    """How far each of our means is from the paper's; only a header where it gives no number with a deviation."""
    study, digits = outcome.study, MEASURES[measure].digits
    rows = [["", *(study.column_label(column) for column in study.columns)]]
    for row in study.rows:
        line = {}
        for column in study.columns_of(row):
            values = list(outcome.readings.get((measure, row, column), {}).values())
            mean, deviation = map(printed, halves(study.paper_number(measure, row, column)))
            known = math.isfinite(mean) and math.isfinite(deviation)
            # a seed that never arrives has no number here, and leaving it out would make us look fast
            if known and len(values) > 1 and all(map(math.isfinite, values)):
                apart, low, high = unpaired_interval(values, mean, deviation, PAPER_SEEDS)
                line[column] = f"{apart:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"
        if line:
            rows.append([study.row_label(row), *(line.get(column, "") for column in study.columns)])
    return rows


def distance_rows(outcome: Outcome) -> list[list[str]]:
    """How far each row's mean curve lies from the one that the paper drew; only a header where it drew none."""
    study = outcome.study
    columns = [column for column, line in study.columns.items() if line.drawn]
    rows = [["", *(study.column_label(column) for column in columns)]]
    for row in study.rows:
        line = []
        for column in columns:
            found = outcome.table.get((row, study.column_for(row, column)))
            paper = curve_of(study, row, column)
            records = [] if found is None else [record for run in found.runs.values() for record in run]
            line.append(f"{distance(records, paper):.1f}" if records and paper else "–")
        if set(line) != {"–"} and line:
            rows.append([study.row_label(row), *line])
    return rows


def claim_rows(verdicts: Sequence[Verdict]) -> list[list[str]]:
    header = ["claim", "where", "the paper", "here: mean [95 % interval]", "seeds", "p (Holm)", "finding"]
    return [header] + [
        [v.claim, v.where, v.paper, v.ours, str(v.seeds), "" if v.p is None else f"{v.p:.3f}", v.finding]
        for v in verdicts
    ]


def write_page(outcome: Outcome, folder: Path, data_dir: Path | None = None) -> Path:
    """Write NAME.md, its figures, and NAME.json for the index; a NAME.notes.md beside them is taken in."""
    study = outcome.study
    folder.mkdir(parents=True, exist_ok=True)
    figures = draw(study, outcome.table, data_dir)
    for number, figure in enumerate(figures):
        figure.savefig(folder / _figure(study, number), dpi=110)
    (folder / f"{study.name}.json").write_text(
        json.dumps(_facts(outcome), indent=1, ensure_ascii=False) + "\n"
    )
    path = folder / f"{study.name}.md"
    notes = folder / f"{study.name}.notes.md"
    path.write_text(_page(outcome, len(figures), notes.read_text() if notes.exists() else ""))
    write_index(folder)
    return path


def write_index(folder: Path) -> Path:
    """README.md of a folder of pages: the table of claims, then the items."""
    order = list(studies())
    facts = [read_object(file, FactsShape) for file in sorted(folder.glob("*.json"))]
    facts.sort(key=lambda fact: (order.index(fact["name"]) if fact["name"] in order else 99, fact["name"]))
    is_paper = any(fact["name"] in order for fact in facts)
    items = [["item", "what", "cells finished", "seeds", *["scale"] * is_paper]] + [
        [
            fact["item"],
            f"[{fact['title']}]({fact['name']}.md)",
            fact["cells"],
            str(fact["seeds"]),
            *["; ".join(fact["scale"]) or "not scaled down"] * is_paper,
        ]
        for fact in facts
    ]
    claims = [row for fact in facts for row in _summed(fact)]
    head = ["claim of the paper", "item", "the paper", "here", "seeds", "finding", "command"]
    # of a claim without a number there is nothing to read but the claim, so those stand apart
    measured = [head] + [row for row in claims if row[head.index("here")]]
    kept = [head.index(name) for name in ("claim of the paper", "item", "the paper", "command")]
    missing = [[row[i] for i in kept] for row in [head] + [row for row in claims if row not in measured]]
    text = [
        "# The paper's results, as measured here" if is_paper else "# Results",
        "",
        f"Written by `fedpews {'reproduce' if is_paper else 'sweep'}`; every number comes from run folders that the "
        f"command made. {_CLAIMS if claims else 'The page of an item has its command.'}",
        "",
        *(["## Claims", "", markdown(measured), ""] if claims else []),
        *(["## Claims of which nothing has run", "", markdown(missing), ""] if len(missing) > 1 else []),
        "## Items",
        "",
        markdown(items),
        "",
    ]
    path = folder / "README.md"
    path.write_text("\n".join(text))
    return path


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def _page(outcome: Outcome, figures: int, notes: str) -> str:
    study = outcome.study
    told = outcome.scale.describe(study)
    # a sweep has no scale of the paper's to keep to
    scale = "" if study.command else " Not scaled down."
    if told:
        scale = f" **Not at the paper's scale**: {'; '.join(told)}."
    text = [
        f"# {study.item}: {study.title}",
        "",
        f"    {outcome.command}",
        "",
        f"Seeds {', '.join(map(str, study.seeds))}{_draws(study)}{_machines(outcome)}.{scale}",
        "",
    ]
    if study.notes:
        text += [study.notes.strip(), ""]
    for number in range(figures):
        text += [f"![{study.title}]({_figure(study, number)})", ""]
    for measure in study.measures:
        text += [f"## {MEASURES[measure].label[0].upper()}{MEASURES[measure].label[1:]}", ""]
        if study.paper.get(measure):
            text += ["Here, and in brackets the paper's.", ""]
        text += [markdown(number_rows(outcome, measure)), ""]
        if len(table := apart_rows(outcome, measure)) > 1:
            text += [
                f"Ours less the paper's, with the 95 % interval of that difference (Welch; the paper has {PAPER_SEEDS} "
                "seeds). An interval without 0 is a number that we do not reproduce.",
                "",
                markdown(table),
                "",
            ]
    apart = distance_rows(outcome)
    if len(apart) > 1:
        text += ["## Distance to the paper's curve (points)", ""]
        text += ["Root mean square over the rounds of the paper's figure, of the mean over seeds.", ""]
        text += [markdown(apart), ""]
    if study.claims:
        text += ["## Claims", "", markdown(claim_rows(outcome.verdicts)), ""]
    if notes:
        text += ["## What we found", "", notes.strip(), ""]
    text += ["## What ran", "", markdown(_ran(outcome)), ""]
    return "\n".join(text)


def _ran(outcome: Outcome) -> list[list[str]]:
    rows = [["cell", "rounds", "seeds finished", "minutes", "status"]]
    for found in outcome.table.values():
        cell = found.cell
        place = f"{outcome.study.row_label(cell.row)}, {outcome.study.column_label(cell.column)}"
        seeds = ", ".join(map(str, found.runs)) or "none"
        status = f"{found.status}: {found.message}" if found.message else found.status
        rows.append([place, str(cell.experiment.rounds), seeds, f"{found.seconds / 60:.1f}", status])
    return rows


def _facts(outcome: Outcome) -> dict[str, Any]:
    study = outcome.study
    done = sum(found.status in ("done", "diverged") for found in outcome.table.values())
    return {
        "name": study.name,
        "item": study.item,
        "title": study.title,
        "command": outcome.command,
        "scale": outcome.scale.describe(study),
        "seeds": len(study.seeds),
        "cells": f"{done} of {len(outcome.table)}",
        "verdicts": [asdict(verdict) for verdict in outcome.verdicts],
    }


def _summed(fact: Mapping[str, Any]) -> list[list[str]]:
    """A line for each claim of a study, over all the places it was looked at."""
    rows = []
    for text in dict.fromkeys(verdict["claim"] for verdict in fact["verdicts"]):
        places = [verdict for verdict in fact["verdicts"] if verdict["claim"] == text]
        ran = [verdict for verdict in places if verdict["seeds"]]
        counts = sorted({verdict["seeds"] for verdict in ran})
        rows.append(
            [
                text,
                fact["item"],
                _joined([verdict["paper"] for verdict in places]),
                _joined([verdict["ours"] for verdict in ran]),
                " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else "",
                summarise(places) + _reserve(fact) * bool(ran),
                f"`{fact['command']}`",
            ]
        )
    return rows


def _reserve(fact: Mapping[str, Any]) -> str:
    """What a finding in the index does not say by itself."""
    told = ["scaled down"] if any("stands in" not in sentence for sentence in fact["scale"]) else []
    told += ["other data"] if any("stands in" in sentence for sentence in fact["scale"]) else []
    return f" ({', '.join(told)})" if told else ""


def _joined(parts: Sequence[str]) -> str:
    parts = [part for part in parts if part]
    if len(set(parts)) == 1:
        return parts[0]
    return " / ".join(parts) if len(parts) <= 4 else f"{parts[0]} / … / {parts[-1]} (see its page)"


def _draws(study: Study) -> str:
    return f", seed s on data draw s mod {study.draws}" if study.draws > 1 else ""


def _figure(study: Study, number: int) -> str:
    return f"{study.name}.png" if number == 0 else f"{study.name}-{number + 1}.png"


def _flags(scale: Scale) -> list[str]:
    flags = ["--quick"] if scale.quick else []
    if scale.seeds is not None:
        flags.append("--seeds " + ",".join(map(str, scale.seeds)))
    settings = {key: value for key, value in (scale.set or {}).items() if not key.startswith("runtime.")}
    flags += [f"--set {key}={value}" for key, value in settings.items()]
    return flags + [f"--stand-in {name}={other}" for name, other in (scale.stand_in or {}).items()]


def _machines(outcome: Outcome) -> str:
    """What the runs were trained on, where they recorded it."""
    known = dict.fromkeys(machine for found in outcome.table.values() for machine in found.machines)
    return f"; measured on {' and '.join(known)}" if known else ""
