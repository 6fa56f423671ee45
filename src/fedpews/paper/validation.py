"""What a choice between settings may look at: the metric on validation data, round by round."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from fedpews.results.records import Record


class Values:
    """The mean over seeds of the validation metric, after each evaluated round behind the warmup.

    In a warmup the global model is made of parts and not meant to be used, so that its value says nothing about what
    the run will come to. A seed that ended early counts with its last value.

    >>> values = Values("accuracy", [0])
    >>> values.add([{"seed": 0, "round": 3, "phase": "train", "validation": {"accuracy": 0.5}}])
    [(3, 0.5)]
    """

    def __init__(self, metric: str, seeds: Sequence[int]) -> None:
        self._metric = metric
        self._last: dict[int, float | None] = dict.fromkeys(seeds)

    def add(self, records: Sequence[Record]) -> list[tuple[int, float]]:
        """The records of a round, one a seed; what it comes to, if it can be said: [(round, value)]."""
        seen = [r for r in records if r["phase"] != "warmup" and "validation" in r]
        for record in seen:
            value = record["validation"].get(self._metric)
            self._last[record["seed"]] = None if value is None else float(value)
        known = [value for value in self._last.values() if value is not None]
        complete = bool(seen) and len(known) == len(self._last)
        return [(int(seen[0]["round"]), fmean(known))] if complete else []
