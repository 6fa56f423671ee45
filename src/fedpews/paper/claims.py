"""What our runs say about a claim of the paper: a paired difference with its interval, and a finding in words.

Seeds are paired because they differ far more than methods do. A finding never says that a claim holds. It says *better
by a to b*, *worse*, *undecided* or *not enough runs* (``Difference.outcome``), or for two methods that are claimed to
be near *no difference larger than d*, and whether that agrees with the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import NamedTuple

from fedpews.options import Table
from fedpews.paper.cells import NOT_RUN, CellResult
from fedpews.paper.measures import MEASURES, printed
from fedpews.paper.study import Claim, Study
from fedpews.results.statistics import (
    ENOUGH_SEEDS,
    SIGNIFICANT,
    Difference,
    corrected,
    equivalence_test,
    interval,
    paired_difference,
    paired_gains,
)

Readings = Mapping[tuple[str, str, str], Mapping[int, float]]
"""(measure, row, column) → seed → number; unfinished cells are absent."""


class Verdict(Table):
    """A claim in one cell: the paper's evidence, ours, and the finding."""

    claim: str
    where: str
    paper: str
    ours: str
    """The mean gain and its 95 % interval."""
    seeds: int
    finding: str
    agrees: bool | None = None
    """Whether the whole interval is on the paper's side; False when it is on the other side, None when undecided."""
    p: float | None = None
    """Of the exact sign-flip test, corrected (Holm) for all claims of the page; None where there is no such test.

    For a claim that no difference is large, of the two one-sided tests against the margin."""


@dataclass(frozen=True)
class Outcome:
    """A study with the results of its cells."""

    study: Study
    table: Mapping[tuple[str, str], CellResult]
    """By row and column."""
    failed: int = 0
    """Cells that should have run now and failed, diverged or had no data."""

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """On every claim, row and column."""
        measures = dict.fromkeys(claim.measure for claim in self.study.claims)
        return evaluate_claims(
            self.study, {(m, *c): self.values(m, *c) for m in measures for c in self.table}
        )

    def result(self, row: str, column: str) -> CellResult | None:
        """Of a cell; of a baseline, in the column where it was run."""
        return self.table.get((row, self.study.column_for(row, column)))

    def values(self, measure: str, row: str, column: str, restricted: bool = True) -> dict[int, float]:
        """A measure of each finished seed of a cell.

        Args:
            restricted: a target that was never reached counts as all rounds, else it is infinite.
        """
        result = self.result(row, column)
        if result is None:
            return {}
        read = MEASURES[measure].restricted if restricted else MEASURES[measure].read
        values = {seed: read(run, result.cell.experiment.goal) for seed, run in result.runs.items()}
        return {seed: value for seed, value in values.items() if not math.isnan(value)}

    @property
    def command(self) -> str:
        """The command that runs it again."""
        return self.study.command or f"fedpews reproduce {self.study.name}"


def conclude(study: Study, results: Sequence[CellResult]) -> Outcome:
    """A study with the results of its cells."""
    return Outcome(study, {(result.cell.row, result.cell.column): result for result in results})


class _Draft(NamedTuple):
    """A verdict before its p is corrected for the other claims of its page."""

    claim: Claim
    where: str
    paper: str
    difference: Difference
    agrees: bool | None
    """By the interval alone."""

    @property
    def is_tested(self) -> bool:
        return self.claim.kind != "between" and self.difference.seeds >= ENOUGH_SEEDS


def evaluate_claims(study: Study, readings: Readings) -> list[Verdict]:
    """A verdict for every claim, row and column."""
    drafts = [
        draft
        for claim in study.claims
        for row in claim.rows
        for draft in _drafts(study, claim, row, readings)
    ]
    # all claims of a page at once: among many, some would look significant by chance
    tested = iter(corrected([draft.difference for draft in drafts if draft.is_tested]))
    return [
        _finish(draft._replace(difference=next(tested)) if draft.is_tested else draft) for draft in drafts
    ]


def _drafts(study: Study, claim: Claim, row: str, readings: Readings) -> Iterator[_Draft]:
    columns = [c for c in study.columns_of(row) if claim.columns is None or c in claim.columns]
    label, higher_is_better = study.row_label(row), MEASURES[claim.measure].higher_is_better

    def read(row: str, column: str) -> Mapping[int, float]:
        return readings.get((claim.measure, row, study.column_for(row, column)), {})

    if claim.kind == "between":
        for column in columns:
            values = list(read(row, column).values())
            low, high = interval(values)
            difference = Difference(fmean(values) if values else math.nan, low, high, len(values), p=0.0)
            agrees = _agrees(claim.low <= low and high <= claim.high, low > claim.high or high < claim.low)
            paper = study.paper_number(claim.measure, row, column) or claim.paper
            yield _Draft(claim, f"{label}, {study.column_label(column)}", paper, difference, agrees)
        return
    assert claim.than is not None
    if claim.kind == "shrinks":
        sign = 1 if higher_is_better else -1
        # paired within a seed first, then across the columns
        first, last = (
            {seed: sign * (ours[seed] - other[seed]) for seed in ours.keys() & other.keys()}
            for ours, other in ((read(row, c), read(claim.than, c)) for c in (columns[0], columns[-1]))
        )
        difference = paired_difference(first, last)
        where = f"{label}: {study.column_label(columns[0])} → {study.column_label(columns[-1])}"
        yield _Draft(claim, where, claim.paper, difference, _agrees(difference.low > 0, difference.high < 0))
        return
    for column in columns:
        ours, other = read(row, column), read(claim.than, column)
        difference = paired_difference(ours, other, higher_is_better)
        low, high, within = difference.low, difference.high, claim.within
        if claim.kind == "better":
            agrees = _agrees(low > claim.by, high < claim.by)
        else:
            # a difference that is not significant may still be large: the whole interval must be inside the margin
            agrees = _agrees(-within <= low and high <= within, low > within or high < -within)
            if agrees is not False:
                # a test for any difference at all does not answer whether a difference is large
                gains = paired_gains(ours, other, higher_is_better)
                difference = replace(difference, p=equivalence_test(gains, within))
        where = f"{label} against {study.row_label(claim.than)}"
        where += f", {study.column_label(column)}" if len(study.columns) > 1 else ""
        yield _Draft(claim, where, _papers_gain(study, claim, row, column) or claim.paper, difference, agrees)


def _agrees(inside: bool, outside: bool) -> bool | None:
    """What an interval says; None where it lies across a margin."""
    return True if inside else False if outside else None


def _finish(draft: _Draft) -> Verdict:
    claim, difference, agrees = draft.claim, draft.difference, draft.agrees
    is_gain, seeds = claim.kind != "between", difference.seeds
    digits, sign = MEASURES[claim.measure].digits, "+" if is_gain else ""
    unit = f" {MEASURES[claim.measure].unit}" if is_gain and MEASURES[claim.measure].unit else ""
    ours = f"{difference.mean:{sign}.{digits}f}{unit}" if seeds else ""
    if seeds > 1:
        ours += f" [{difference.low:{sign}.{digits}f}, {difference.high:{sign}.{digits}f}]"
    # numbers are shown with any number of seeds, but nothing is concluded from too few
    enough = seeds >= ENOUGH_SEEDS
    if not enough or difference.p >= SIGNIFICANT:
        agrees = None
    if not seeds:
        finding = NOT_RUN
    elif not enough or (is_gain and (claim.kind != "near" or agrees is False)):
        finding = difference.describe(digits, unit)
    elif not is_gain:
        finding = f"{difference.low:.{digits}f} to {difference.high:.{digits}f}"
    else:
        # its p says how sure it is that the difference is small, not that there is one
        finding = difference.describe_bound(digits, unit) if agrees else "undecided"
    return Verdict(
        claim=claim.text,
        where=draft.where,
        paper=draft.paper,
        ours=ours,
        seeds=seeds,
        finding=finding,
        agrees=agrees,
        p=difference.p if draft.is_tested else None,
    )


def _papers_gain(study: Study, claim: Claim, row: str, column: str) -> str:
    """The gain in the numbers that the paper prints; in words where one side never reached the target."""
    assert claim.than is not None
    measure = MEASURES[claim.measure]
    pair = (row, column), (claim.than, study.column_for(claim.than, column))
    ours, other = (printed(study.paper_number(claim.measure, *cell))[0] for cell in pair)
    if math.isnan(ours) or math.isnan(other):
        return ""
    if math.isinf(ours) or math.isinf(other):
        only = "the other" if math.isinf(ours) else "it"
        return "neither arrives" if ours == other else f"only {only} arrives"
    gain = ours - other if measure.higher_is_better else other - ours
    return f"{gain:+.{measure.digits}f} {measure.unit}".strip()


def summarise(verdicts: Sequence[Verdict]) -> str:
    """One line for a claim out of the findings in its cells, of those that have run."""
    ran = [verdict for verdict in verdicts if verdict.seeds]
    if not ran:
        return NOT_RUN
    part = "" if len(ran) == len(verdicts) else f" ({len(ran)} of {len(verdicts)} cells measured)"
    words: dict[bool | None, str] = {True: "agrees", False: "contradicts", None: "undecided"}
    if len(ran) == 1:
        (only,) = ran
        return (only.finding if only.agrees is None else words[only.agrees]) + part
    count = {answer: sum(verdict.agrees is answer for verdict in ran) for answer in words}
    first, *others = [(words[answer], number) for answer, number in count.items() if number]
    cells = (
        f"{first[0]} in {first[1]} of {len(ran)} cells" if others else f"{first[0]} in all {len(ran)} cells"
    )
    return ", ".join([cells, *(f"{word} in {number}" for word, number in others)]) + part
