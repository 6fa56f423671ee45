"""What our runs say about a claim of the paper: a paired difference with its interval, and words that follow from it.

Seeds are paired because they differ far more than methods do. A claim is never said to hold: it says *better by a to
b*, *worse*, *undecided* or *not enough runs* (``Difference.outcome``), or of two that are claimed to be near *no
difference larger than d*, and whether that agrees with the paper.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

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
from fedpews.paper.measures import MEASURES, printed
from fedpews.paper.study import Claim, Study

Readings = Mapping[tuple[str, str, str], Mapping[int, float]]
"""(measure, row, column) → seed → number; cells that are not finished are absent."""


@dataclass(frozen=True)
class Verdict:
    """One claim at one place: the paper's evidence, ours, and what follows."""

    claim: str
    where: str
    paper: str
    ours: str
    """The mean gain and its 95 % interval."""
    seeds: int
    finding: str
    """In words that follow from the interval."""
    agrees: bool | None
    """Whether the whole interval is on the paper's side; False when it is wholly against it, None when undecided."""
    p: float | None = None
    """Of the exact sign-flip test, corrected (Holm) for all claims of the page; None where there is no such test.

    Where no large difference is claimed, of the two one-sided tests against the margin."""


class _Draft(NamedTuple):
    """A verdict before its p is corrected for the other claims of its page."""

    claim: Claim
    where: str
    paper: str
    found: Difference
    agrees: bool | None
    """By the interval alone."""


def judge(study: Study, readings: Readings) -> list[Verdict]:
    """A verdict for every claim, row and column."""
    found = [one for claim in study.claims for one in _judge(study, claim, readings)]
    tested = [one for one in found if isinstance(one, _Draft) and one.found.seeds >= ENOUGH_SEEDS]
    # all claims of a page at once: with many of them some would look significant by chance
    known = dict(zip(map(id, tested), corrected([one.found for one in tested]), strict=True))
    return [
        one if isinstance(one, Verdict) else _finish(one._replace(found=known.get(id(one), one.found)))
        for one in found
    ]


def _judge(study: Study, claim: Claim, readings: Readings) -> list[Verdict | _Draft]:
    found: list[Verdict | _Draft] = []
    for row in claim.rows:
        own = [c for c in study.columns_of(row) if claim.columns is None or c in claim.columns]
        if claim.kind == "shrinks":
            found.append(_shrinks(study, claim, row, own, readings))
        elif claim.kind == "between":
            found += [_between(study, claim, row, column, readings) for column in own]
        else:
            rule = _near if claim.kind == "near" else _better
            found += [rule(study, claim, row, column, readings) for column in own]
    return found


def _sides(
    study: Study, claim: Claim, row: str, column: str, readings: Readings
) -> tuple[Mapping[int, float], Mapping[int, float], bool]:
    """The row's numbers, those of what it is compared with, and whether more is better."""
    assert claim.than is not None
    mine = readings.get((claim.measure, row, column), {})
    other = readings.get((claim.measure, claim.than, study.column_for(claim.than, column)), {})
    return mine, other, MEASURES[claim.measure].higher_is_better


def _better(study: Study, claim: Claim, row: str, column: str, readings: Readings) -> _Draft:
    found = paired_difference(*_sides(study, claim, row, column, readings))
    # the whole interval must lie on one side; an interval across the margin decides nothing
    agrees = True if found.low > claim.by else False if found.high < claim.by else None
    return _draft(study, claim, row, column, found, agrees)


def _near(study: Study, claim: Claim, row: str, column: str, readings: Readings) -> _Draft:
    sides = _sides(study, claim, row, column, readings)
    found = paired_difference(*sides)
    # the whole interval must lie inside the margin: a difference that is not significant may still be large
    inside = -claim.within <= found.low and found.high <= claim.within
    outside = found.low > claim.within or found.high < -claim.within
    if not outside:
        # the claim is that no difference is large, which a test for any difference at all does not answer
        found = replace(found, p=equivalence_test(paired_gains(*sides), claim.within))
    return _draft(study, claim, row, column, found, True if inside else False if outside else None)


def _draft(
    study: Study, claim: Claim, row: str, column: str, found: Difference, agrees: bool | None
) -> _Draft:
    where = f"{study.row_label(row)} against {study.row_label(claim.than or '')}"
    if len(study.columns) > 1:
        where = f"{where}, {study.column_label(column)}"
    return _Draft(claim, where, _papers_gain(study, claim, row, column) or claim.paper, found, agrees)


def _shrinks(study: Study, claim: Claim, row: str, columns: list[str], readings: Readings) -> _Draft:
    """Whether the gain in the first column is larger than in the last."""
    gains = []
    for column in (columns[0], columns[-1]):
        mine, other, higher_is_better = _sides(study, claim, row, column, readings)
        sign = 1 if higher_is_better else -1
        # paired within a seed first, then across the columns
        gains.append({seed: sign * (mine[seed] - other[seed]) for seed in mine.keys() & other.keys()})
    found = paired_difference(gains[0], gains[1])
    agrees = True if found.low > 0 else False if found.high < 0 else None
    where = f"{study.row_label(row)}: {study.column_label(columns[0])} → {study.column_label(columns[-1])}"
    return _Draft(claim, where, claim.paper, found, agrees)


def _between(study: Study, claim: Claim, row: str, column: str, readings: Readings) -> Verdict:
    values = list(readings.get((claim.measure, row, column), {}).values())
    low, high = interval(values) if values else (-math.inf, math.inf)
    inside, outside = claim.low <= low and high <= claim.high, low > claim.high or high < claim.low
    measure, seeds = MEASURES[claim.measure], len(values)
    where = f"{study.row_label(row)}, {study.column_label(column)}"
    paper = study.paper_number(claim.measure, row, column) or claim.paper
    number = f"{{:.{measure.digits}f}}".format
    ours = (
        f"{number(fmean(values))} [{number(low)}, {number(high)}]"
        if seeds > 1
        else "".join(map(number, values))
    )
    if seeds < ENOUGH_SEEDS:
        return Verdict(claim.text, where, paper, ours, seeds, _too_few(seeds), None)
    finding = f"{number(low)} to {number(high)}"
    return Verdict(
        claim.text, where, paper, ours, seeds, finding, True if inside else False if outside else None
    )


def _finish(draft: _Draft) -> Verdict:
    claim, where, paper, found, agrees = draft
    measure = MEASURES[claim.measure]
    digits, unit = measure.digits, f" {measure.unit}" if measure.unit else ""
    ours = ""
    if found.seeds:
        ours = f"{found.mean:+.{digits}f}{unit}"
    if found.seeds > 1:
        ours = f"{ours} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
    # numbers are shown with any number of seeds, but nothing is concluded from too few
    if found.seeds < ENOUGH_SEEDS:
        return Verdict(claim.text, where, paper, ours, found.seeds, _too_few(found.seeds), None)
    if found.p >= SIGNIFICANT:
        agrees = None
    if claim.kind == "near" and agrees is True:
        finding = found.describe_bound(digits, unit)
    elif claim.kind == "near" and agrees is None:
        # its p says how sure it is that the difference is small, not that there is one
        finding = "undecided"
    else:
        finding = found.describe(digits, unit)
    return Verdict(claim.text, where, paper, ours, found.seeds, finding, agrees, found.p)


def _too_few(seeds: int) -> str:
    return "not run" if not seeds else f"not enough runs ({seeds} seed{'s' * (seeds > 1)})"


def _papers_gain(study: Study, claim: Claim, row: str, column: str) -> str:
    """The paper's own gain, from the numbers it prints; in words where one side never reached the target."""
    assert claim.than is not None
    measure = MEASURES[claim.measure]
    places = (row, column), (claim.than, study.column_for(claim.than, column))
    mine, other = (printed(study.paper_number(claim.measure, *place)) for place in places)
    if math.isnan(mine) or math.isnan(other):
        return ""
    # infinite stands for a target that was never reached
    if math.isinf(mine) or math.isinf(other):
        sides = (math.isinf(mine), math.isinf(other))
        return {(False, True): "only it arrives", (True, False): "only the other arrives"}.get(
            sides, "neither arrives"
        )
    gain = mine - other if measure.higher_is_better else other - mine
    return f"{gain:+.{measure.digits}f} {measure.unit}".strip()


def summarise(verdicts: Sequence[Mapping[str, object]]) -> str:
    """One line for a claim out of the findings at its places."""
    ran = [v for v in verdicts if v["seeds"]]
    if len(verdicts) == 1 or not ran:
        return str(verdicts[0]["finding"])
    count = {answer: sum(v["agrees"] is answer for v in ran) for answer in (True, False, None)}
    parts = [
        f"agrees in {count[True]} of {len(verdicts)} places",
        f"contradicts in {count[False]}" if count[False] else "",
        f"undecided in {count[None]}" if count[None] else "",
        f"{len(verdicts) - len(ran)} not run" if len(ran) < len(verdicts) else "",
    ]
    return ", ".join(filter(None, parts))
