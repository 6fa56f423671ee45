"""A study's results as a Markdown page with figures, and the index of all pages with the table of claims."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import fmean

from pydantic import Field

from fedpews.options import Table
from fedpews.paper.cells import NOT_RUN
from fedpews.paper.claims import Outcome, Verdict, summarise
from fedpews.paper.figures import curve_of, distance, draw
from fedpews.paper.measures import MEASURES, printed, spread
from fedpews.paper.study import SMALL, SWEEP, Study, studies
from fedpews.report.compare import markdown
from fedpews.results.schema import read_object
from fedpews.results.statistics import unpaired_interval

PAPER_SEEDS = 3
"""Behind each of the paper's means and deviations."""

RUNS = "runs"
"""Beside the pages: every cell's runs in compact form."""


EXPLAINED = "how-to/results.md"
"""In the documentation: how results are compared."""


class Facts(Table):
    """NAME.json beside a study's page: what the index says of it."""

    name: str
    item: str
    title: str
    command: str
    scale: list[str] = Field([])
    seeds: int
    cells: str
    verdicts: list[Verdict] = Field([])

    def write(self, folder: Path) -> None:
        """Write it, and the index of its folder."""
        text = json.dumps(self.model_dump(), indent=1, ensure_ascii=False)
        (folder / f"{self.name}.json").write_text(text + "\n")
        write_index(folder)


def finding(outcome: Outcome) -> str:
    """What the runs say: a sentence on the first claim that ran, then one on all of them; or else the best cells."""
    ran = [verdict for verdict in outcome.verdicts if verdict.seeds]
    if not ran:
        return best_cells(outcome)
    first = [verdict for verdict in outcome.verdicts if verdict.claim == ran[0].claim]
    measured = [verdict for verdict in first if verdict.seeds]
    number = f", {ran[0].ours}" if len(measured) == 1 else ""
    text = f"{ran[0].claim}: {summarise(first)}{number}{_reserve(outcome.study.scale)}"
    if len(measured) < len(ran):
        text += f". All claims of this page: {summarise(outcome.verdicts)}"
    return f"{text}."


def best_cells(outcome: Outcome) -> str:
    """The best row of each column by the first measure; of a sweep, the best of all cells."""
    study, name = outcome.study, outcome.study.measures[0]
    measure = MEASURES[name]
    pick, word = (max, "highest") if measure.higher_is_better else (min, "lowest")
    known = {
        cell: list(values.values())
        for cell in outcome.table
        if (values := outcome.values(name, *cell, restricted=False))
    }
    columns = [list(study.columns)] if study.item == SWEEP else [[column] for column in study.columns]
    best = []
    for group in ([cell for cell in known if cell[1] in column] for column in columns):
        if group:
            row, column = cell = pick(group, key=lambda cell: fmean(known[cell]))
            labels = [study.row_label(row), study.column_label(column)]
            where = ", ".join(label for label in labels if label != "all")
            best.append(f"{where}: {spread(known[cell], measure.digits)}")
    return f"{word} {measure.label}: {'; '.join(best) or 'no cell has run'}."


def _rows(study: Study, columns: Sequence[str], text: Callable[[str, str], str]) -> list[list[str]]:
    """A table of text: a header, then a line for each row that has some, with the text of its cells."""
    rows = [["", *(study.column_label(column) for column in columns)]]
    for row in study.rows:
        line = [text(row, column) for column in columns]
        if set(line) - {"", "–"}:
            rows.append([study.row_label(row), *line])
    return rows


def number_rows(outcome: Outcome, measure: str) -> list[list[str]]:
    """The values of a measure, ours and in brackets the paper's."""
    study = outcome.study

    def text(row: str, column: str) -> str:
        result = outcome.table.get((row, column))
        if result is None:
            return ""
        values = list(outcome.values(measure, row, column, restricted=False).values())
        ours = "–" if result.runs else result.status.replace(NOT_RUN, "")
        if values:
            ours = spread(values, MEASURES[measure].digits)
        paper = study.paper_number(measure, row, column)
        return f"{ours} [{paper}]".strip() if paper else ours

    columns = [column for column in study.columns if any(text(row, column) for row in study.rows)]
    return _rows(study, columns, text)


def apart_rows(outcome: Outcome, measure: str) -> list[list[str]]:
    """How far each of our means is from the paper's, where the paper gives a number with a deviation."""
    study, digits = outcome.study, MEASURES[measure].digits

    def text(row: str, column: str) -> str:
        # at another scale the paper's numbers are no target
        if study.scaled or column not in study.columns_of(row):
            return ""
        values = list(outcome.values(measure, row, column, restricted=False).values())
        mean, deviation = printed(study.paper_number(measure, row, column))
        # a seed that never reaches the target has no number, and without it the mean would be too good
        if len(values) < 2 or not all(map(math.isfinite, [mean, deviation, *values])):
            return ""
        apart, low, high = unpaired_interval(values, mean, deviation, PAPER_SEEDS)
        return f"{apart:+.{digits}f} [{low:+.{digits}f}, {high:+.{digits}f}]"

    return _rows(study, list(study.columns), text)


def distance_rows(outcome: Outcome) -> list[list[str]]:
    """How far each row's mean curve is from the one that the paper drew."""
    study = outcome.study

    def text(row: str, column: str) -> str:
        result = outcome.result(row, column)
        paper = curve_of(study, row, column)
        return f"{distance(result.records, paper):.1f}" if result and result.runs and paper else "–"

    return _rows(study, [column for column, line in study.columns.items() if line.drawn], text)


def write_page(outcome: Outcome, folder: Path) -> Path:
    """Write NAME.md, its figures, and NAME.json for the index; a NAME.notes.md beside them becomes part of the page."""
    study = outcome.study
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for number, figure in enumerate(draw(outcome), 1):
        names.append(f"{study.name}.png" if number == 1 else f"{study.name}-{number}.png")
        figure.savefig(folder / names[-1], dpi=110)
    path, notes = folder / f"{study.name}.md", folder / f"{study.name}.notes.md"
    path.write_text(_page(outcome, names, notes.read_text() if notes.exists() else ""))
    done = sum(result.status in ("done", "diverged") for result in outcome.table.values())
    Facts(
        name=study.name,
        item=study.item,
        title=study.title,
        command=outcome.command,
        scale=outcome.study.scale,
        seeds=len(study.seeds),
        cells=f"{done} of {len(outcome.table)}",
        verdicts=outcome.verdicts,
    ).write(folder)
    return path


def write_index(folder: Path) -> Path:
    """README.md of a folder of pages: README.notes.md if there is one, the table of claims, then the items."""
    order = list(studies())
    facts = [Facts(**read_object(file, Facts)) for file in sorted(folder.glob("*.json"))]
    studied = {fact.name: fact.name.removesuffix(SMALL) for fact in facts}
    names = set(studied.values())
    facts.sort(key=lambda f: (order.index(studied[f.name]) if studied[f.name] in order else 99, f.name))
    is_paper = any(name in order for name in names)
    items = [["figure", "item", "what", "cells finished", "seeds", *["scale"] * is_paper]] + [
        [
            _thumbnail(folder / f"{fact.name}.md", fact.title),
            fact.item,
            f"[{fact.title}]({fact.name}.md)",
            fact.cells,
            str(fact.seeds),
            *["; ".join(fact.scale) or "not scaled down"] * is_paper,
        ]
        for fact in facts
    ]
    text = ["# The paper's results, as measured here" if is_paper else "# Results"]
    if (notes := folder / "README.notes.md").exists():
        text.append(notes.read_text().strip())
    claims = [row for fact in facts for row in _claim_rows(fact) if row[3]]
    if claims:
        is_here = (folder.parent / EXPLAINED).exists()
        how = f"[how results are compared](../{EXPLAINED})" if is_here else f"docs/{EXPLAINED}"
        all_claims = summarise([verdict for fact in facts for verdict in fact.verdicts if verdict.seeds])
        head = ["claim of the paper", "item", "the paper", "here", "seeds", "finding", "command"]
        text += [
            f"{len(claims)} claims were measured: {all_claims} ({how}).",
            "## Claims",
            markdown([head, *claims]),
        ]
    text += ["## Items", markdown(items)]
    missing = [f"`fedpews reproduce {name}`" for name in order if name not in names]
    if is_paper and missing:
        text.append(f"Not measured yet: {', '.join(missing)}.")
    path = folder / "README.md"
    path.write_text("\n\n".join(text) + "\n")
    return path


def _thumbnail(page: Path, title: str) -> str:
    """The first figure of a page, small, as a link to the page; Markdown itself has no width."""
    figure = f"{page.stem}.png"
    shown = page.exists() and f"({figure})" in page.read_text()
    return f'[<img src="{figure}" width="180" alt="{escape(title)}">]({page.name})' if shown else ""


def _page(outcome: Outcome, figures: Sequence[str], notes: str) -> str:
    """The finding, which is the first paragraph of notes with several, then figures, how it was made, tables."""
    study = outcome.study
    # a sweep has no scale of the paper's to keep to
    scale = "" if study.item == SWEEP else " Not scaled down."
    if outcome.study.scale:
        scale = f" **Not at the paper's scale**: {'; '.join(outcome.study.scale)}."
    draws = f", seed s on data draw s mod {study.draws}" if study.draws > 1 else ""
    known = dict.fromkeys(machine for result in outcome.table.values() for machine in result.machines)
    machines = f"; measured on {' and '.join(known)}" if known else ""
    sentence = finding(outcome)
    first, _, rest = notes.partition("\n\n")
    if rest:
        sentence, notes = first, rest
    text = [
        f"# {study.item}: {study.title}",
        sentence[0].upper() + sentence[1:],
        *(f"![{study.title}]({figure})" for figure in figures),
        f"    {outcome.command}",
        f"Seeds {', '.join(map(str, study.seeds))}{draws}{machines}.{scale}",
        study.notes.strip(),
    ]
    for measure in study.measures:
        label = MEASURES[measure].label
        text.append(f"## {label[0].upper()}{label[1:]}")
        text.append("Here, and in brackets the paper's." if study.paper.get(measure) else "")
        text.append(markdown(number_rows(outcome, measure)))
        if len(apart := apart_rows(outcome, measure)) > 1:
            text += [
                f"Ours less the paper's, with the 95 % interval of that difference (Welch; the paper has {PAPER_SEEDS} "
                "seeds). An interval without 0 is a number that we do not reproduce.",
                markdown(apart),
            ]
    if len(distances := distance_rows(outcome)) > 1:
        text += [
            "## Distance to the paper's curve (points)",
            "Root mean square over the rounds of the paper's figure, of the mean over seeds.",
            markdown(distances),
        ]
    if any(verdict.seeds for verdict in outcome.verdicts):
        head = ["claim", "where", "the paper", "here: mean [95 % interval]", "seeds", "p (Holm)", "finding"]
        rows = [
            [v.claim, v.where, v.paper, v.ours, str(v.seeds), "" if v.p is None else f"{v.p:.3f}", v.finding]
            for v in outcome.verdicts
            if v.seeds
        ]
        text += ["## Claims", markdown([head, *rows])]
    if notes:
        text += ["## What we found", notes.strip()]
    ran = [["cell", "rounds", "seeds finished", "minutes", "status"]] + [
        [
            study.label(result.cell),
            str(result.cell.experiment.rounds),
            ", ".join(map(str, result.runs)) or "none",
            f"{sum(record['seconds'] for record in result.records) / 60:.1f}",
            f"{result.status}: {result.message}" if result.message else result.status,
        ]
        for result in outcome.table.values()
        if result.status != NOT_RUN
    ]
    count = len(ran) - 1
    text += [
        "## What ran",
        f"{count} of {len(outcome.table)} cells." if count < len(outcome.table) else "All cells.",
    ]
    return "\n\n".join(filter(None, [*text, markdown(ran)])) + "\n"


def _reserve(scale: Sequence[str]) -> str:
    """In brackets: whether a scale differs from the paper's."""
    return " (scaled down)" if scale else ""


def _claim_rows(fact: Facts) -> list[list[str]]:
    """A line for each claim of a study, over all its cells."""
    rows = []
    for text in dict.fromkeys(verdict.claim for verdict in fact.verdicts):
        verdicts = [verdict for verdict in fact.verdicts if verdict.claim == text]
        ran = [verdict for verdict in verdicts if verdict.seeds]
        counts = sorted({verdict.seeds for verdict in ran})
        rows.append(
            [
                text,
                fact.item,
                _joined([verdict.paper for verdict in verdicts]),
                _joined([verdict.ours for verdict in ran]),
                " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]]))) if counts else "",
                (summarise(verdicts) + _reserve(fact.scale)) * bool(ran),
                f"`{fact.command}`",
            ]
        )
    return rows


def _joined(texts: Sequence[str]) -> str:
    texts = [text for text in texts if text]
    if len(set(texts)) == 1:
        return texts[0]
    return " / ".join(texts) if len(texts) <= 4 else f"{texts[0]} / … / {texts[-1]} (see its page)"
