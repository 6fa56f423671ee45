"""The numbers that are read from a finished run of one seed; the paper gives the same ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from fedpews.results.records import Record, evaluated, rounds_to_target, value_of
from fedpews.tasks.names import Goal, higher_is_better, is_share

Run = Sequence[Record]


@dataclass(frozen=True)
class Measure:
    """How to read a number from the records of one seed, and which direction is better."""

    label: str
    read: Callable[[Run, Goal], float]
    """Infinite for a target that was never reached, NaN for what was not measured."""
    higher_is_better: bool = True
    digits: int = 2
    unit: str = ""
    """Of a difference."""
    never: Callable[[Run], float] | None = None
    """What a target that was never reached counts as: all rounds of the run, so that slow seeds are not excluded."""

    def restricted(self, records: Run, goal: Goal) -> float:
        """The number for statistics: finite also where the target was never reached."""
        value = self.read(records, goal)
        return self.never(records) if math.isinf(value) and self.never is not None else value


class _Measures(dict[str, Measure]):
    """Measures by name; ``final:auroc`` and ``validation:auroc`` exist for any metric."""

    def __missing__(self, name: str) -> Measure:
        kind, _, metric = name.partition(":")
        labels = {
            "final": f"final {metric}",
            "validation": f"{metric} on validation data after the last round",
        }
        if not metric or kind not in labels:
            raise KeyError(name)
        percent = is_share(metric)

        def read(records: Run, goal: Goal) -> float:
            last = records[-1]
            value = value_of(last, metric) if kind == "final" else last.get("validation", {}).get(metric)
            return math.nan if value is None else float(value) * (100 if percent else 1)

        return Measure(
            labels[kind] + " %" * percent,
            read,
            higher_is_better(metric),
            digits=2 if percent else 4,
            unit="points" if percent else "",
        )


def late(records: Run, goal: Goal) -> float:
    """The accuracy of a single round varies more than methods differ."""
    return _late([record["accuracy"] for record in evaluated(records)])


def late_validation(records: Run, goal: Goal) -> float:
    return _late([record["validation"]["accuracy"] for record in records if record.get("validation")])


def _late(accuracies: Sequence[float]) -> float:
    return 100 * mean(accuracies[-max(1, len(accuracies) // 10) :])


def rounds(records: Run, goal: Goal) -> float:
    reached = rounds_to_target(records, goal)
    return math.inf if reached is None else float(reached)


def seconds(records: Run, goal: Goal) -> float:
    last = rounds(records, goal)
    return math.inf if math.isinf(last) else _seconds([r for r in records if r["round"] <= last])


def _seconds(records: Run) -> float:
    return float(sum(record["seconds"] for record in records))


def omega(records: Run, goal: Goal) -> float:
    # the first round of each phase also prepares it
    warm, plain = (_values(records, "seconds", is_warmup)[1:] for is_warmup in (True, False))
    return median(warm) / median(plain) if warm and plain else math.nan


def upload(records: Run, goal: Goal) -> float:
    warm, plain = (_values(records, "bytes_up", is_warmup) for is_warmup in (True, False))
    return fmean(warm) / fmean(plain) if warm and plain else math.nan


def activation_overlap(records: Run, goal: Goal) -> float:
    """In the last ten rounds."""
    return 100 * mean([r["activation_overlap"] for r in records if "activation_overlap" in r][-10:])


def _values(records: Run, key: str, is_warmup: bool = True) -> list[float]:
    """The values of a column in the warmup rounds, or in the others."""
    return [r[key] for r in records if key in r and (r["phase"] == "warmup") == is_warmup]


def mean(values: Sequence[float]) -> float:
    """NaN without values."""
    return fmean(values) if values else math.nan


MEASURES: dict[str, Measure] = _Measures(
    final=Measure(
        "final accuracy %", lambda run, goal: 100 * float(evaluated(run)[-1]["accuracy"]), unit="points"
    ),
    late=Measure("mean accuracy of the last tenth of the rounds %", late, unit="points"),
    late_validation=Measure(
        "mean accuracy on validation data over the last tenth of the rounds %", late_validation, unit="points"
    ),
    rounds=Measure("rounds to the target", rounds, False, 1, "rounds", never=lambda run: float(len(run))),
    seconds=Measure("seconds to the target", seconds, False, 1, "s", never=_seconds),
    omega=Measure("time of a warmup round over a plain round's, ω", omega, False),
    warmup_rounds=Measure(
        "rounds of the warmup", lambda run, goal: float(len(_values(run, "round"))), False, digits=0
    ),
    density=Measure(
        "fraction of the neurons that a client trains",
        lambda run, goal: mean(_values(run, "density")),
        False,
    ),
    coverage=Measure(
        "fraction of the neurons that any client trains", lambda run, goal: mean(_values(run, "coverage"))
    ),
    upload=Measure("bytes up in a warmup round over a plain one's", upload, False),
    kilobytes=Measure(
        "kB up and down in a round, all clients",
        lambda run, goal: fmean(record["bytes_up"] + record["bytes_down"] for record in run) / 1000,
        False,
        1,
        "kB",
    ),
    activation_overlap=Measure(
        "activation that two clients have in common %", activation_overlap, False, unit="points"
    ),
)


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

    average, _, deviation = text.partition("±")
    return number(average.strip()), number(deviation.strip())
