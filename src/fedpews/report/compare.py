"""Runs side by side: who ends higher, who reaches the target first, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpews.report.runs import Run, scale
from fedpews.results.records import evaluated, rounds_to_target, value_of
from fedpews.results.statistics import (
    Difference,
    corrected,
    paired_difference,
    paired_gains,
    restricted_rounds,
)
from fedpews.tasks.names import Goal, is_share


def columns(runs: Sequence[Run]) -> tuple[str, ...]:
    """The headers of a table of these runs."""
    metric = runs[0].goal.metric
    final = "final" if metric == "accuracy" else f"final {metric}"
    return ("method", final + " %" * is_share(metric), "rounds", "seeds", "MB up", "MB down", "min")


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """One row of text per run, in the order of ``columns``."""
    rows: list[tuple[str, ...]] = []
    for run in runs:
        reach, totals = run.summary["rounds_to_target"], run.summary["totals"]
        rows.append(
            (
                run.label if run.finished else f"{run.label} (round {run.rounds} of {run.planned})",
                spread(run.final, 2 if is_share(run.goal.metric) else 4),
                spread(reach, 1) or ("not all" if reach["reached"] else "none"),
                f"{reach['reached']}/{len(run.summary['seeds'])}",
                f"{totals['bytes_up'] / 1e6:.1f}",
                f"{totals['bytes_down'] / 1e6:.1f}",
                f"{totals['seconds'] / 60:.1f}",
            )
        )
    return rows


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first row is its header."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + " --- |" * len(rows[0]), *lines[1:]])


def goal_text(goal: Goal) -> str:
    """What is to be reached, in words."""
    if goal.metric == "accuracy" and goal.value is not None:
        return f"{100 * goal.value:g} %"
    return str(goal)


def spread(value: dict[str, Any], digits: int) -> str:
    """Mean ± standard deviation; a single seed has no deviation.

    >>> spread({"mean": 50.0, "std": None}, 1)
    '50.0'
    """
    if value["mean"] is None:
        return ""
    mean = f"{value['mean']:.{digits}f}"
    return mean if value["std"] is None else f"{mean} ± {value['std']:.{digits}f}"


@dataclass(frozen=True)
class Comparison:
    """One run against another, paired by seed, at the last round that both have."""

    other: Run
    base: Run
    round: int
    final: Difference  # in points of the metric that counts, positive where it is better
    ends: tuple[float, float]  # the means of the other and of the base behind it
    gains: dict[int, float]  # of every seed, in points
    reach: Difference  # in rounds saved until the target; a seed that never arrives counts as all rounds
    arrived: tuple[int, int]  # seeds of the other and of the base that reach the target
    obstacle: str = ""  # why they cannot be compared; then the numbers say nothing

    @property
    def sentences(self) -> list[str]:
        """What the numbers say: first the metric that counts, then rounds to the target."""
        other, base = self.other.label, self.base.label
        if self.obstacle:
            return [f"{other} and {base} are not compared: {self.obstacle}."]
        return [f"{self._headline()}.", *self._arrivals()]

    def _headline(self) -> str:
        other, base, final = self.other.label, self.base.label, self.final
        early = (
            ""
            if self.round == self.other.planned == self.base.planned
            else f" at round {self.round}, the last both have"
        )
        metric = self.base.goal.metric
        words, unit = ("points", " %") if is_share(metric) else (metric.replace("_", " "), "")
        # of what is to be lowered, a gain is a difference below zero
        ends = (final.low, final.high) if self.base.goal.higher_is_better else (-final.high, -final.low)
        apart = f"{short_number(self.ends[0] - self.ends[1], '+')} {words}"
        seeds = f"{final.seeds} seed{'' if final.seeds == 1 else 's'}"
        if final.outcome in ("better", "worse"):
            digits = decimals(self.ends[0] - self.ends[1])
            mine, its = (f"{end:.{digits}f}{unit}" for end in self.ends)
            low, high = map(short_number, ends)
            return f"{other}: {mine} vs {its} ({base}){early}, {apart} [{low}, {high}], {seeds}"
        too_few = f"{'is' if final.seeds == 1 else 'are'} too few to tell"
        why = too_few if final.outcome == "not enough runs" else "do not decide"
        text = f"{seeds} {why}: {other} {apart} against {base}{early}"
        if final.seeds > 1:
            text += f", between {short_number(ends[0], '+')} and {short_number(ends[1], '+')}"
        # the interval alone would decide
        is_corrected = final.outcome == "undecided" and not final.low <= 0 <= final.high
        return text + (f"; p = {final.p:.2g} (Holm)" if is_corrected else "")

    def _arrivals(self) -> list[str]:
        target, seeds = goal_text(self.other.goal), len(self.gains)
        if self.other.goal.value is None:
            return []
        if self.other.goal != self.base.goal:
            return ["Their targets differ, so rounds to the target are not compared."]
        mine, its = self.arrived
        if not mine and not its:
            return [f"Neither reaches {target} within {self.round} rounds."]
        text = f"{self.other.label} reaches {target} in {mine} of {seeds} seeds, {self.base.label} in {its} of {seeds}"
        saved = self.reach
        if saved.outcome in ("better", "worse"):
            by = saved.describe(0, " rounds").partition(" by ")[2]
            by = "1 round" if by == "1 rounds" else by
            text += f"; it is {'sooner' if saved.outcome == 'better' else 'later'} by {by}"
            if min(mine, its) < seeds:
                text += f", a seed that never arrives counted as {self.round}"
        return [f"{text}."]


def short_number(value: float, sign: str = "") -> str:
    """Two digits that count, and a real minus.

    >>> short_number(-8.62), short_number(33.4, "+"), short_number(0.0521), short_number(-120.0), short_number(0.0, "+")
    ('−8.6', '+33', '0.052', '−120', '0')
    """
    # subtraction leaves 1e-17 where there is no difference
    if abs(value) < 1e-9:
        return "0"
    return f"{value:{sign}.{decimals(value)}f}".replace("-", "−")


def decimals(value: float) -> int:
    """How many decimals leave two digits that count."""
    # by the text, so that 9.99 counts as the 10 that it is shown as
    return max(0, 1 - int(f"{value:.1e}".partition("e")[2]))


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Every later run against the first, each measure's p corrected for all of them."""
    every = [_compare(other, runs[0]) for other in runs[1:]]
    fair = [each for each in every if not each.obstacle]
    finals, reaches = (iter(corrected([getattr(each, name) for each in fair])) for name in ("final", "reach"))
    return [
        each if each.obstacle else replace(each, final=next(finals), reach=next(reaches)) for each in every
    ]


def _compare(other: Run, base: Run) -> Comparison:
    last, goal = min(other.rounds, base.rounds), base.goal
    finals, reached = [], []
    for run in (other, base):
        rows = {seed: evaluated(records[:last]) for seed, records in run.by_seed.items()}
        values = {seed: value_of(seen[-1], goal.metric) for seed, seen in rows.items() if seen}
        shown = {seed: scale(goal.metric, value) for seed, value in values.items()}
        finals.append({seed: value for seed, value in shown.items() if value is not None})
        reached.append({seed: rounds_to_target(seen, run.goal) for seed, seen in rows.items()})
    seeds = sorted(finals[0].keys() & finals[1].keys())
    rounds = [restricted_rounds({seed: each[seed] for seed in seeds}, last) for each in reached]
    mine, its = (sum(values[seed] for seed in seeds) / max(1, len(seeds)) for values in finals)
    gains = paired_gains(finals[0], finals[1], goal.higher_is_better)
    arrived = [sum(each[seed] is not None for seed in seeds) for each in reached]
    return Comparison(
        other,
        base,
        last,
        final=paired_difference(finals[0], finals[1], goal.higher_is_better),
        ends=(mine, its),
        gains=dict(zip(seeds, gains, strict=True)),
        reach=paired_difference(rounds[0], rounds[1], higher_is_better=False),
        arrived=(arrived[0], arrived[1]),
        obstacle=_obstacle(other, base, seeds),
    )


def _obstacle(other: Run, base: Run, seeds: Sequence[int]) -> str:
    if not other.same_data(base):
        names = [run.config["data"].get("name", "") for run in (other, base)]
        return "they were trained on different data" + (
            f" ({' and '.join(names)})" if len(set(names)) > 1 else ""
        )
    if other.goal.metric != base.goal.metric:
        return f"one counts {other.goal.metric}, the other {base.goal.metric}"
    if not other.by_seed.keys() & base.by_seed.keys():
        return "they have no seed in common"
    return "" if seeds else f"the {base.goal.metric} is undefined in every seed they have in common"


def remarks(runs: Sequence[Run]) -> list[str]:
    """What a reader of the table has to know first: unfinished runs, other data, other targets."""
    sentences = [
        f"{run.label} is not finished: round {run.rounds} of {run.planned}."
        for run in runs
        if not run.finished
    ]
    sentences += [
        f"{run.label} was resumed with a change: {'; '.join(run.summary['went_on'])}."
        for run in runs
        if run.summary.get("went_on")
    ]
    if not all(run.same_data(runs[0]) for run in runs):
        sentences.append("These runs were trained on different data, so their numbers are not comparable.")
    models = {run.label: model for run in runs if (model := run.federation.get("model"))}
    if len({model["fingerprint"] for model in models.values()}) > 1:
        weights = ", ".join(f"{label} {model['weights']:,}" for label, model in models.items())
        sentences.append(f"The models differ, not only the methods; weights: {weights}.")
    if len({run.goal for run in runs}) > 1:
        sentences.append("Targets differ: rounds are counted to each run's own target.")
    return sentences


def verdicts(runs: Sequence[Run]) -> list[str]:
    """A sentence or two for each later run against the first, paired by seed: seeds differ far more than methods."""
    return [" ".join(comparison.sentences) for comparison in compare(runs)]
