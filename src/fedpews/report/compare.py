"""Runs side by side: who ends higher, who reaches the target first, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpews.report.runs import Run, find_runs
from fedpews.results.records import evaluated, rounds_to_target
from fedpews.results.statistics import (
    ENOUGH_SEEDS,
    Difference,
    holm,
    paired_difference,
    paired_gains,
    restricted_rounds,
)

__all__ = ["COLUMNS", "Comparison", "Run", "compare", "find_runs", "remarks", "table", "verdicts"]

COLUMNS = ("method", "final %", "rounds", "seeds", "MB up", "MB down", "min")


def table(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """One row of text per run, in the order of ``COLUMNS``."""
    return [
        (
            run.label if run.finished else f"{run.label} (round {run.rounds} of {run.planned})",
            spread(run.summary["final_accuracy"], 100, 2),
            spread(run.summary["rounds_to_target"], 1, 1) or "not all",
            f"{run.summary['rounds_to_target']['reached']}/{len(run.summary['seeds'])}",
            f"{run.summary['totals']['bytes_up'] / 1e6:.1f}",
            f"{run.summary['totals']['bytes_down'] / 1e6:.1f}",
            f"{run.summary['totals']['seconds'] / 60:.1f}",
        )
        for run in runs
    ]


def spread(value: dict[str, Any], scale: float, digits: int) -> str:
    """Mean ± standard deviation; a single seed has no deviation.

    >>> spread({"mean": 0.5, "std": None, "by_seed": [0.5]}, 100, 1)
    '50.0'
    """
    if value["mean"] is None:
        return ""
    mean = f"{scale * value['mean']:.{digits}f}"
    # runs of older versions wrote 0 where there was one seed
    alone = value["std"] is None or len(value["by_seed"]) < 2
    return mean if alone else f"{mean} ± {scale * value['std']:.{digits}f}"


@dataclass(frozen=True)
class Comparison:
    """One run against another, paired by seed, at the last round that both have."""

    other: Run
    base: Run
    round: int
    final: Difference  # in points of accuracy
    gains: dict[int, float]  # of every seed, in points
    reach: Difference  # in rounds saved until the target; a seed that never arrives counts as all rounds
    arrived: tuple[int, int]  # seeds of the other and of the base that reach the target
    adjusted: float  # p of the final accuracy, corrected for the number of comparisons (Holm)
    obstacle: str = ""  # why they cannot be compared; then the numbers say nothing

    @property
    def sentences(self) -> list[str]:
        """What the numbers say, in words that follow from the intervals."""
        other, base = self.other.label, self.base.label
        if self.obstacle:
            return [f"{other} and {base} are not compared: {self.obstacle}."]
        early = (
            ""
            if self.round == self.other.planned == self.base.planned
            else f" at round {self.round}, the last both have"
        )
        final, seeds = self.final, f"over {self.final.seeds} paired seeds"
        if final.outcome == "not enough runs":
            only = "one seed" if final.seeds == 1 else f"{final.seeds} seeds"
            way = "higher" if final.mean > 0 else "lower"
            moved = (
                "the same accuracy" if final.mean == 0 else f"{abs(final.mean):.2f} points {way} than {base}"
            )
            told = [
                f"Not enough runs to say which is better: with {only}, {other} ends at {moved}{early}; "
                f"{ENOUGH_SEEDS} seeds are needed."
            ]
            return told + self._arrivals()
        if final.outcome == "no difference":
            words = final.describe(2, " points")
            return [
                f"{other} and {base} cannot be told apart{early}: {words} (95 % interval {seeds}).",
                *self._arrivals(),
            ]
        by = final.describe(2, " points").partition(" by ")[2]
        told = [
            f"{other} ends {final.outcome} than {base} by {by} of accuracy{early} (95 % interval {seeds})."
        ]
        return told + self._arrivals()

    def _arrivals(self) -> list[str]:
        target, seeds = f"{100 * self.other.target:g} %", self.final.seeds
        if self.other.target != self.base.target:
            return ["Their targets differ, so rounds to the target are not compared."]
        mine, its = self.arrived
        if not mine and not its:
            return [f"Neither reaches {target} within {self.round} rounds."]
        told = f"{self.other.label} reaches {target} in {mine} of {seeds} seeds, {self.base.label} in {its}"
        saved = self.reach
        if saved.outcome in ("better", "worse"):
            by = saved.describe(0, " rounds").partition(" by ")[2]
            by = "1 round" if by == "1 rounds" else by
            told += f"; it is {'sooner' if saved.outcome == 'better' else 'later'} by {by}"
            if min(mine, its) < seeds:
                told += f", a seed that never arrives counted as {self.round}"
        elif saved.outcome == "no difference":
            told += f"; there is {saved.describe(0, ' rounds')}"
        return [told + "."]


def compare(runs: Sequence[Run]) -> list[Comparison]:
    """Every later run against the first."""
    found = [_compare(other, runs[0]) for other in runs[1:]]
    adjusted = iter(holm([one.final.p for one in found if not one.obstacle]))
    return [one if one.obstacle else replace(one, adjusted=next(adjusted)) for one in found]


def _compare(other: Run, base: Run) -> Comparison:
    last = min(other.rounds, base.rounds)
    finals, reached = [], []
    for run in (other, base):
        seen = {seed: evaluated(rows[:last]) for seed, rows in run.by_seed.items()}
        finals.append({seed: 100 * rows[-1]["accuracy"] for seed, rows in seen.items() if rows})
        reached.append(
            {seed: rounds_to_target(rows[:last], run.target) for seed, rows in run.by_seed.items()}
        )
    seeds = sorted(finals[0].keys() & finals[1].keys())
    mine, its = (restricted_rounds({seed: found[seed] for seed in seeds}, last) for found in reached)
    return Comparison(
        other,
        base,
        last,
        paired_difference(finals[0], finals[1]),
        dict(zip(seeds, paired_gains(finals[0], finals[1]), strict=True)),
        paired_difference(mine, its, higher_is_better=False),
        (
            sum(reached[0][seed] is not None for seed in seeds),
            sum(reached[1][seed] is not None for seed in seeds),
        ),
        1.0,
        _obstacle(other, base, seeds),
    )


def _obstacle(other: Run, base: Run, seeds: Sequence[int]) -> str:
    if not other.same_data(base):
        names = [run.config["data"].get("name", "") for run in (other, base)]
        return "they were trained on different data" + (
            f" ({' and '.join(names)})" if len(set(names)) > 1 else ""
        )
    return "" if seeds else "they have no seed in common"


def remarks(runs: Sequence[Run]) -> list[str]:
    """What somebody who reads the table has to know first: unfinished runs, other data, other targets."""
    told = [
        f"{run.label} is not finished: round {run.rounds} of {run.planned}."
        for run in runs
        if not run.finished
    ]
    if not all(run.same_data(runs[0]) for run in runs):
        told.append("These runs were trained on different data; their numbers do not measure the same thing.")
    if len({run.target for run in runs}) > 1:
        told.append("Targets differ: each run's rounds are those to its own.")
    return told


def verdicts(runs: Sequence[Run]) -> list[str]:
    """A sentence or two for each later run against the first, paired by seed: seeds differ far more than methods."""
    return [" ".join(one.sentences) for one in compare(runs)]
