"""Does a claim of the paper hold in our runs? Seeds are paired: they differ far more than methods do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from fedpews.studies.measures import MEASURES, Measure, printed
from fedpews.studies.study import Claim, Study

Readings = Mapping[tuple[str, str, str], Mapping[int, float]]
"""(measure, row, column) → seed → number; cells that are not finished are absent."""


@dataclass(frozen=True)
class Verdict:
    """One claim at one place: the paper's evidence, ours, and whether it holds."""

    claim: str
    where: str
    paper: str
    ours: str
    wins: int  # seeds in which it is so
    pairs: int  # seeds looked at
    outcome: str
    """holds, unclear, does not hold, tied, not run; with a single seed: one seed for it, one seed against it"""

    @property
    def holds(self) -> bool:
        return self.outcome == "holds"


def judge(study: Study, readings: Readings) -> list[Verdict]:
    """A verdict for every claim, row and column."""
    return [verdict for claim in study.claims for verdict in _judge(study, claim, readings)]


def _judge(study: Study, claim: Claim, readings: Readings) -> list[Verdict]:
    verdicts = []
    for row in claim.rows:
        own = [c for c in study.columns_of(row) if claim.columns is None or c in claim.columns]
        if claim.kind == "shrinks":
            verdicts.append(_shrinks(study, claim, row, own, readings))
            continue
        for column in own:
            rule = {"better": _better, "near": _near, "between": _between}[claim.kind]
            verdicts.append(rule(study, claim, row, column, readings))
    return verdicts


def _paired(
    study: Study, claim: Claim, row: str, column: str, readings: Readings
) -> dict[int, tuple[float, float]]:
    """For every seed that both have: the row's number, and that of what it is compared with."""
    assert claim.than is not None
    mine = readings.get((claim.measure, row, column), {})
    other = readings.get((claim.measure, claim.than, study.column_for(claim.than, column)), {})
    return {seed: (mine[seed], other[seed]) for seed in sorted(set(mine) & set(other))}


def _better(study: Study, claim: Claim, row: str, column: str, readings: Readings) -> Verdict:
    measure = MEASURES[claim.measure]
    assert claim.than is not None
    pairs = list(_paired(study, claim, row, column, readings).values())
    wins, losses = _count(pairs, measure)
    places = (row, column), (claim.than, study.column_for(claim.than, column))
    mine, other = (printed(study.paper_number(claim.measure, *place)) for place in places)
    paper = _gain([(mine, other)], measure)
    outcome = _majority(wins, losses, _mean_gain(pairs, measure), claim.by, pairs)
    where = _where(study, claim, row, column)
    return Verdict(claim.text, where, paper or claim.paper, _gain(pairs, measure), wins, len(pairs), outcome)


def _majority(wins: int, losses: int, gain: float, by: float, pairs: Sequence[object]) -> str:
    """Holds when three quarters of the seeds that differ are for it, and so is the mean gain."""
    holds = wins > losses and gain > 0 and gain >= by
    if len(pairs) < 2:
        return _outcome(holds, pairs)
    if wins == losses and not by:
        return "tied"
    return "unclear" if holds and 4 * wins < 3 * (wins + losses) else _outcome(holds, pairs)


def _mean_gain(pairs: list[tuple[float, float]], measure: Measure) -> float:
    """Over the seeds in which both got there; where none did so, what the others say."""
    gains = [_difference(a, b, measure) for a, b in pairs]
    known = [gain for gain in gains if math.isfinite(gain)]
    return fmean(known) if any(known) else max(gains, default=0.0)


def _near(study: Study, claim: Claim, row: str, column: str, readings: Readings) -> Verdict:
    found = _better(study, claim, row, column, readings)
    pairs = list(_paired(study, claim, row, column, readings).values())
    close = bool(pairs) and abs(fmean(a - b for a, b in pairs)) <= claim.within
    wins = sum(abs(a - b) <= claim.within for a, b in pairs)
    return Verdict(claim.text, found.where, found.paper, found.ours, wins, len(pairs), _outcome(close, pairs))


def _shrinks(study: Study, claim: Claim, row: str, columns: list[str], readings: Readings) -> Verdict:
    measure = MEASURES[claim.measure]
    first, last = (_paired(study, claim, row, column, readings) for column in (columns[0], columns[-1]))
    pairs = [
        (_difference(*first[seed], measure), _difference(*last[seed], measure))
        for seed in first
        if seed in last
    ]
    wins, losses = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
    ours = " → ".join(_signed(fmean(part), measure) for part in zip(*pairs, strict=True)) if pairs else ""
    where = f"{study.row_label(row)}: {study.column_label(columns[0])} → {study.column_label(columns[-1])}"
    fall = fmean(a - b for a, b in pairs) if pairs else 0.0
    outcome = _majority(wins, losses, fall, claim.by, pairs)
    return Verdict(claim.text, where, claim.paper, ours, wins, len(pairs), outcome)


def _between(study: Study, claim: Claim, row: str, column: str, readings: Readings) -> Verdict:
    values = [v for v in readings.get((claim.measure, row, column), {}).values() if not math.isnan(v)]
    mean = fmean(values) if values else math.nan
    digits = MEASURES[claim.measure].digits
    paper = study.paper_number(claim.measure, row, column) or claim.paper
    where = f"{study.row_label(row)}, {study.column_label(column)}"
    return Verdict(
        claim.text,
        where,
        paper,
        f"{mean:.{digits}f}" if values else "",
        sum(claim.low <= value <= claim.high for value in values),
        len(values),
        "not run" if not values else "holds" if claim.low <= mean <= claim.high else "does not hold",
    )


def _outcome(holds: bool, pairs: Sequence[object]) -> str:
    """One seed decides nothing, so it is told and not judged."""
    if len(pairs) == 1:
        return f"one seed {'for' if holds else 'against'} it"
    return "not run" if not pairs else "holds" if holds else "does not hold"


def _difference(a: float, b: float, measure: Measure) -> float:
    """How much better a is than b; two that never got there are equal."""
    if a == b:
        return 0.0
    return a - b if measure.higher_is_better else b - a


def _count(pairs: list[tuple[float, float]], measure: Measure) -> tuple[int, int]:
    differences = [_difference(a, b, measure) for a, b in pairs]
    return sum(d > 0 for d in differences), sum(d < 0 for d in differences)


def _gain(pairs: list[tuple[float, float]], measure: Measure) -> str:
    """The mean gain over pairs in which both numbers are known; in words where a side never got there."""
    pairs = [(a, b) for a, b in pairs if not math.isnan(a) and not math.isnan(b)]
    known = [_difference(a, b, measure) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
    text = [_signed(fmean(known), measure)] if known else []
    if any(math.isinf(b) and math.isfinite(a) for a, b in pairs):
        text.append("only it arrives" if not known else f"only it arrives in {_seeds(pairs, 1)}")
    if any(math.isinf(a) and math.isfinite(b) for a, b in pairs):
        text.append("only the other arrives" if not known else f"only the other in {_seeds(pairs, 0)}")
    if not text and pairs:
        text.append("neither arrives")
    return "; ".join(text)


def _seeds(pairs: list[tuple[float, float]], never: int) -> str:
    count = sum(math.isinf(pair[never]) and math.isfinite(pair[1 - never]) for pair in pairs)
    return f"{count} seed" + "s" * (count > 1)


def _signed(gain: float, measure: Measure) -> str:
    if measure.higher_is_better:
        return f"{gain:+.{measure.digits}f} {measure.unit}".strip()
    size = f"{abs(gain):.{measure.digits}f} {measure.unit}".strip()
    return f"{size} {'less' if gain >= 0 else 'more'}"


def _where(study: Study, claim: Claim, row: str, column: str) -> str:
    """The column, and the row where the claim is about several; a study of one column is named by its rows."""
    rows = f"{study.row_label(row)} against {study.row_label(claim.than or '')}"
    if len(study.columns) == 1:
        return rows
    place = study.column_label(column)
    return place if len(claim.rows) == 1 else f"{rows}, {place}"
