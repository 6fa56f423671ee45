"""What is read off a finished run of one seed: a number that the paper also gives or speaks of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from fedpews.results.records import Record, evaluated, rounds_to_target, value_of
from fedpews.tasks.names import Goal, higher_is_better, is_share


@dataclass(frozen=True)
class Measure:
    """How to read a number from the records of one seed, and which way is better."""

    label: str
    read: Callable[[Sequence[Record], Goal], float]
    """From the records of a seed and the goal; infinite for a target that was never reached."""
    higher_is_better: bool = True
    digits: int = 2
    unit: str = ""
    """Of a difference."""
    never: Callable[[Sequence[Record]], float] | None = None
    """What a target that was never reached counts as: all the rounds there were, so that no slow seed is left out."""

    def restricted(self, records: Sequence[Record], goal: Goal) -> float:
        """The number for statistics, finite also where the target was never reached."""
        value = self.read(records, goal)
        return self.never(records) if math.isinf(value) and self.never is not None else value


def _final(records: Sequence[Record], goal: Goal) -> float:
    return 100 * float(evaluated(records)[-1]["accuracy"])


def _late(records: Sequence[Record], goal: Goal) -> float:
    """Over the last tenth of the rounds: one round's accuracy goes up and down by more than methods differ."""
    seen = evaluated(records)
    return 100 * fmean(float(record["accuracy"]) for record in seen[-max(1, len(seen) // 10) :])


def _first_share(records: Sequence[Record], goal: Goal) -> float:
    """Of all that clients own at the end of the warmup, how much is the first client's."""
    owned = [record["client_density"] for record in records if "client_density" in record]
    return 100 * owned[-1][0] / sum(owned[-1]) if owned else math.nan


def _rounds(records: Sequence[Record], goal: Goal) -> float:
    reached = rounds_to_target(records, goal)
    return math.inf if reached is None else float(reached)


def _seconds(records: Sequence[Record], goal: Goal) -> float:
    reached = rounds_to_target(records, goal)
    if reached is None:
        return math.inf
    return float(sum(record["seconds"] for record in records if record["round"] <= reached))


def _omega(records: Sequence[Record], goal: Goal) -> float:
    """ω: a warmup round's time over a plain one's; the first round of each phase also prepares, so it is left out."""
    times = {
        warm: [r["seconds"] for r in records if (r["phase"] == "warmup") == warm][1:]
        for warm in (True, False)
    }
    return median(times[True]) / median(times[False]) if times[True] and times[False] else math.nan


def _in_warmup(key: str) -> Callable[[Sequence[Record], Goal], float]:
    def read(records: Sequence[Record], goal: Goal) -> float:
        values = [float(record[key]) for record in records if record["phase"] == "warmup"]
        return fmean(values) if values else math.nan

    return read


def _warmup_rounds(records: Sequence[Record], goal: Goal) -> float:
    return float(sum(record["phase"] == "warmup" for record in records))


def _upload(records: Sequence[Record], goal: Goal) -> float:
    plain = [record["bytes_up"] for record in records if record["phase"] != "warmup"]
    warm = [record["bytes_up"] for record in records if record["phase"] == "warmup"]
    return fmean(warm) / fmean(plain) if plain and warm else math.nan


def _activation_overlap(records: Sequence[Record], goal: Goal) -> float:
    """In the last ten rounds: how far two clients' data fire the same neurons."""
    values = [record["activation_overlap"] for record in records if "activation_overlap" in record]
    return 100 * fmean(values[-10:]) if values else math.nan


def _last(metric: str) -> Callable[[Sequence[Record], Goal], float]:
    def read(records: Sequence[Record], goal: Goal) -> float:
        value = value_of(records[-1], metric)
        return math.nan if value is None else value * _factor(metric)

    return read


def _last_validation(metric: str) -> Callable[[Sequence[Record], Goal], float]:
    def read(records: Sequence[Record], goal: Goal) -> float:
        value = records[-1].get("validation", {}).get(metric)
        return math.nan if value is None else float(value) * _factor(metric)

    return read


def _best(metric: str) -> Callable[[Sequence[Record], Goal], float]:
    """The test value of the round that is best on validation data; NaN without any."""

    def read(records: Sequence[Record], goal: Goal) -> float:
        seen = [(record.get("validation", {}).get(metric), record) for record in records]
        known = [(value, record) for value, record in seen if value is not None]
        if not known:
            return math.nan
        pick = max if higher_is_better(metric) else min
        value = value_of(pick(known, key=lambda pair: pair[0])[1], metric)
        return math.nan if value is None else value * _factor(metric)

    return read


def _factor(metric: str) -> int:
    return 100 if is_share(metric) else 1


class _Measures(dict[str, Measure]):
    """Measures by name; ``final:auroc``, ``validation:auroc`` and ``best:auroc`` are made for any metric."""

    def __missing__(self, name: str) -> Measure:
        kind, _, metric = name.partition(":")
        reads = {"final": _last, "validation": _last_validation, "best": _best}
        if not metric or kind not in reads:
            raise KeyError(name)
        words = {
            "final": f"final {metric}",
            "validation": f"{metric} on validation data after the last round",
            "best": f"test {metric} of the round that is best on validation data",
        }
        percent = is_share(metric)
        return Measure(
            words[kind] + " %" * percent,
            reads[kind](metric),
            higher_is_better(metric),
            digits=2 if percent else 4,
            unit="points" if percent else "",
        )


MEASURES: dict[str, Measure] = _Measures(
    {
        "final": Measure("final accuracy %", _final, unit="points"),
        "late": Measure("mean accuracy of the last tenth of the rounds %", _late, unit="points"),
        "first_share": Measure("the first client's part of the neurons owned %", _first_share, unit="points"),
        "rounds": Measure(
            "rounds to the target",
            _rounds,
            higher_is_better=False,
            digits=1,
            unit="rounds",
            never=lambda records: float(len(records)),
        ),
        "seconds": Measure(
            "seconds to the target",
            _seconds,
            higher_is_better=False,
            digits=1,
            unit="s",
            never=lambda records: float(sum(record["seconds"] for record in records)),
        ),
        "omega": Measure("ω, a warmup round's time over a plain one's", _omega, higher_is_better=False),
        "warmup_rounds": Measure("rounds of the warmup", _warmup_rounds, higher_is_better=False, digits=0),
        "density": Measure(
            "part of the neurons a client trains", _in_warmup("density"), higher_is_better=False
        ),
        "coverage": Measure("part of the neurons that somebody trains", _in_warmup("coverage")),
        "upload": Measure("bytes up in a warmup round over a plain one's", _upload, higher_is_better=False),
        "activation_overlap": Measure(
            "activation that two clients have in common %",
            _activation_overlap,
            higher_is_better=False,
            unit="points",
        ),
    }
)


def spread(values: Sequence[float], digits: int) -> str:
    """Mean ± standard deviation over seeds; seeds that never got there are counted, not averaged.

    >>> spread([1.0, 2.0, 3.0], 1), spread([100.0, math.inf], 0), spread([math.inf], 0)
    ('2.0 ± 1.0', '100 (1 of 2 seeds)', '×')
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "×" if any(math.isinf(value) for value in values) else "–"
    deviation = f" ± {stdev(known):.{digits}f}" if len(known) > 1 else ""
    part = f" ({len(known)} of {len(values)} seeds)" if len(known) < len(values) else ""
    return f"{fmean(known):.{digits}f}{deviation}{part}"


def printed(text: str) -> float:
    """The mean in a number as the paper prints it; × is never, nothing is unknown.

    >>> printed("71.23 ± 0.71"), printed("×"), printed("199 ± NA")
    (71.23, inf, 199.0)
    """
    head = halves(text)[0]
    if head == "×":
        return math.inf
    try:
        return float(head)
    except ValueError:
        return math.nan


def halves(text: str) -> tuple[str, str]:
    """Mean and deviation of a number as the paper prints it.

    >>> halves("71.23 ± 0.71"), halves("×")
    (('71.23', '0.71'), ('×', ''))
    """
    mean, _, deviation = text.partition("±")
    return mean.strip(), deviation.strip()
