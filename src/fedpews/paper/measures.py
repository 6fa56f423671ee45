"""The numbers that are read from a finished run of one seed; the paper gives the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from fedpews.results.records import Record, evaluated, rounds_to_target, value_of
from fedpews.tasks.names import Goal, higher_is_better, is_share

Read = Callable[[Sequence[Record], Goal], float]
"""From the records of a seed and the goal; infinite for a target that was never reached."""


@dataclass(frozen=True)
class Measure:
    """How to read a number from the records of one seed, and which direction is better."""

    label: str
    read: Read
    higher_is_better: bool = True
    digits: int = 2
    unit: str = ""
    """Of a difference."""
    never: Callable[[Sequence[Record]], float] | None = None
    """What a target that was never reached counts as: all rounds of the run, so that slow seeds are not excluded."""

    def restricted(self, records: Sequence[Record], goal: Goal) -> float:
        """The number for statistics: finite also where the target was never reached."""
        value = self.read(records, goal)
        return self.never(records) if math.isinf(value) and self.never is not None else value


class _Measures(dict[str, Measure]):
    """Measures by name; ``final:auroc``, ``validation:auroc`` and ``best:auroc`` exist for any metric."""

    def __missing__(self, name: str) -> Measure:
        kind, _, metric = name.partition(":")
        labels = {
            "final": f"final {metric}",
            "validation": f"{metric} on validation data after the last round",
            "best": f"test {metric} of the round that is best on validation data",
        }
        if not metric or kind not in labels:
            raise KeyError(name)
        percent = is_share(metric)
        return Measure(
            labels[kind] + " %" * percent,
            _reader(kind, metric),
            higher_is_better(metric),
            digits=2 if percent else 4,
            unit="points" if percent else "",
        )


def _reader(kind: str, metric: str) -> Read:
    """How to read a metric in the last round, or in the one that is best on validation data."""

    def on_validation(record: Record) -> float | None:
        value: float | None = record.get("validation", {}).get(metric)
        return value

    def read(records: Sequence[Record], goal: Goal) -> float:
        record = records[-1]
        if kind == "best":
            pick = max if higher_is_better(metric) else min
            known = [record for record in records if on_validation(record) is not None]
            if not known:
                return math.nan
            record = pick(known, key=lambda record: on_validation(record) or 0.0)
        value = on_validation(record) if kind == "validation" else value_of(record, metric)
        return math.nan if value is None else float(value) * (100 if is_share(metric) else 1)

    return read


MEASURES: dict[str, Measure] = _Measures()


def _measure(label: str, **properties: Any) -> Callable[[Read], Read]:
    """Add a function to the measures, under its name."""

    def add(read: Read) -> Read:
        MEASURES[read.__name__] = Measure(label, read, **properties)
        return read

    return add


@_measure("final accuracy %", unit="points")
def final(records: Sequence[Record], goal: Goal) -> float:
    return 100 * float(evaluated(records)[-1]["accuracy"])


@_measure("mean accuracy of the last tenth of the rounds %", unit="points")
def late(records: Sequence[Record], goal: Goal) -> float:
    """The accuracy of a single round varies more than methods differ."""
    seen = evaluated(records)
    return 100 * fmean(float(record["accuracy"]) for record in seen[-max(1, len(seen) // 10) :])


@_measure("mean accuracy on validation data over the last tenth of the rounds %", unit="points")
def late_validation(records: Sequence[Record], goal: Goal) -> float:
    seen = [record["validation"]["accuracy"] for record in records if record.get("validation")]
    return 100 * fmean(seen[-max(1, len(seen) // 10) :]) if seen else math.nan


@_measure("the first client's part of the neurons owned %", unit="points")
def first_share(records: Sequence[Record], goal: Goal) -> float:
    """At the end of the warmup."""
    owned = [record["client_density"] for record in records if "client_density" in record]
    return 100 * owned[-1][0] / sum(owned[-1]) if owned else math.nan


@_measure(
    "rounds to the target",
    higher_is_better=False,
    digits=1,
    unit="rounds",
    never=lambda records: float(len(records)),
)
def rounds(records: Sequence[Record], goal: Goal) -> float:
    reached = rounds_to_target(records, goal)
    return math.inf if reached is None else float(reached)


@_measure(
    "seconds to the target",
    higher_is_better=False,
    digits=1,
    unit="s",
    never=lambda records: float(sum(record["seconds"] for record in records)),
)
def seconds(records: Sequence[Record], goal: Goal) -> float:
    reached = rounds_to_target(records, goal)
    if reached is None:
        return math.inf
    return float(sum(record["seconds"] for record in records if record["round"] <= reached))


@_measure("ω, a warmup round's time over a plain one's", higher_is_better=False)
def omega(records: Sequence[Record], goal: Goal) -> float:
    # the first round of each phase also prepares it
    warm, plain = _by_phase(records, "seconds")
    return median(warm[1:]) / median(plain[1:]) if warm[1:] and plain[1:] else math.nan


@_measure("rounds of the warmup", higher_is_better=False, digits=0)
def warmup_rounds(records: Sequence[Record], goal: Goal) -> float:
    return float(len(_by_phase(records, "round")[0]))


@_measure("part of the neurons a client trains", higher_is_better=False)
def density(records: Sequence[Record], goal: Goal) -> float:
    warm, _ = _by_phase(records, "density")
    return fmean(warm) if warm else math.nan


@_measure("part of the neurons that somebody trains")
def coverage(records: Sequence[Record], goal: Goal) -> float:
    warm, _ = _by_phase(records, "coverage")
    return fmean(warm) if warm else math.nan


@_measure("bytes up in a warmup round over a plain one's", higher_is_better=False)
def upload(records: Sequence[Record], goal: Goal) -> float:
    warm, plain = _by_phase(records, "bytes_up")
    return fmean(warm) / fmean(plain) if plain and warm else math.nan


@_measure("kB up and down in a round, all clients", higher_is_better=False, digits=1, unit="kB")
def kilobytes(records: Sequence[Record], goal: Goal) -> float:
    return fmean(record["bytes_up"] + record["bytes_down"] for record in records) / 1000


@_measure("activation that two clients have in common %", higher_is_better=False, unit="points")
def activation_overlap(records: Sequence[Record], goal: Goal) -> float:
    """In the last ten rounds."""
    values = [record["activation_overlap"] for record in records if "activation_overlap" in record]
    return 100 * fmean(values[-10:]) if values else math.nan


def _by_phase(records: Sequence[Record], key: str) -> tuple[list[float], list[float]]:
    """The values of a column in the warmup rounds, and in the others."""
    phases: tuple[list[float], list[float]] = [], []
    for record in records:
        if key in record:
            phases[record["phase"] != "warmup"].append(record[key])
    return phases


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation over seeds; seeds that never reached the target are counted, not averaged.

    >>> spread([1.0, 2.0, 3.0], 1), spread([100.0, math.inf], 0), spread([math.inf], 0)
    ('2.0 ± 1.0', '100 (1 of 2 seeds)', '×')
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "×" if any(math.isinf(value) for value in values) else "–"
    deviation = f" ± {stdev(known):.{digits}f}" if len(known) > 1 else ""
    count = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return f"{fmean(known):.{digits}f}{deviation}{count}"


def printed(text: str) -> tuple[float, float]:
    """Mean and deviation of a number as the paper prints it; × is infinite, what is not given is NaN.

    >>> printed("71.23 ± 0.71"), printed("×")
    ((71.23, 0.71), (inf, nan))
    """

    def number(text: str) -> float:
        try:
            return math.inf if text == "×" else float(text)
        except ValueError:
            return math.nan

    mean, _, deviation = text.partition("±")
    return number(mean.strip()), number(deviation.strip())
