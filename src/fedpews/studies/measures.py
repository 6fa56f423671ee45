"""What is read off a finished run of one seed: a number that the paper also gives or speaks of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from fedpews.results.records import Record, evaluated, rounds_to_target


@dataclass(frozen=True)
class Measure:
    """How to read a number from the records of one seed, and which way is better."""

    label: str
    read: Callable[[Sequence[Record], float], float]
    """From the records of a seed and the target; infinite for a target that was never reached."""
    higher_is_better: bool = True
    digits: int = 2
    unit: str = ""
    """Of a difference."""
    never: Callable[[Sequence[Record]], float] | None = None
    """What a target that was never reached counts as: all the rounds there were, so that no slow seed is left out."""

    def restricted(self, records: Sequence[Record], target: float) -> float:
        """The number for statistics, finite also where the target was never reached."""
        value = self.read(records, target)
        return self.never(records) if math.isinf(value) and self.never is not None else value


def _final(records: Sequence[Record], target: float) -> float:
    return 100 * float(evaluated(records)[-1]["accuracy"])


def _best(records: Sequence[Record], target: float) -> float:
    return 100 * max(float(record["accuracy"]) for record in evaluated(records))


def _late(records: Sequence[Record], target: float) -> float:
    """Over the last tenth of the rounds: one round's accuracy goes up and down by more than methods differ."""
    seen = evaluated(records)
    return 100 * fmean(float(record["accuracy"]) for record in seen[-max(1, len(seen) // 10) :])


def _first_share(records: Sequence[Record], target: float) -> float:
    """Of all that clients own at the end of the warmup, how much is the first client's."""
    owned = [record["client_density"] for record in records if "client_density" in record]
    return 100 * owned[-1][0] / sum(owned[-1]) if owned else math.nan


def _rounds(records: Sequence[Record], target: float) -> float:
    reached = rounds_to_target(records, target)
    return math.inf if reached is None else float(reached)


def _seconds(records: Sequence[Record], target: float) -> float:
    reached = rounds_to_target(records, target)
    if reached is None:
        return math.inf
    return float(sum(record["seconds"] for record in records if record["round"] <= reached))


def _omega(records: Sequence[Record], target: float) -> float:
    """ω: a warmup round's time over a plain one's; the first round of each phase also prepares, so it is left out."""
    times = {
        warm: [r["seconds"] for r in records if (r["phase"] == "warmup") == warm][1:]
        for warm in (True, False)
    }
    return median(times[True]) / median(times[False]) if times[True] and times[False] else math.nan


def _in_warmup(key: str) -> Callable[[Sequence[Record], float], float]:
    def read(records: Sequence[Record], target: float) -> float:
        values = [float(record[key]) for record in records if record["phase"] == "warmup"]
        return fmean(values) if values else math.nan

    return read


def _upload(records: Sequence[Record], target: float) -> float:
    plain = [record["bytes_up"] for record in records if record["phase"] != "warmup"]
    warm = [record["bytes_up"] for record in records if record["phase"] == "warmup"]
    return fmean(warm) / fmean(plain) if plain and warm else math.nan


def _own_share(records: Sequence[Record], target: float) -> float:
    """In the last ten rounds: how much of a client's activation is in its own part of the layers."""
    values = [record["own_share"] for record in records if "own_share" in record]
    return 100 * fmean(values[-10:]) if values else math.nan


MEASURES: dict[str, Measure] = {
    "final": Measure("final accuracy %", _final, unit="points"),
    "best": Measure("best accuracy %", _best, unit="points"),
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
    "density": Measure("part of the neurons a client trains", _in_warmup("density"), higher_is_better=False),
    "coverage": Measure("part of the neurons that somebody trains", _in_warmup("coverage")),
    "upload": Measure("bytes up in a warmup round over a plain one's", _upload, higher_is_better=False),
    "own_share": Measure("activation in a client's own part of each layer %", _own_share, unit="points"),
}


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
    head = text.partition("±")[0].strip()
    if head == "×":
        return math.inf
    try:
        return float(head)
    except ValueError:
        return math.nan
