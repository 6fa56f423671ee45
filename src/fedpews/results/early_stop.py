"""Early stopping: when a run ends, and which of its models is the best, both from its records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from fedpews.errors import ConfigError
from fedpews.results.records import Record, value_of
from fedpews.tasks.names import Goal

NO_VALIDATION = (
    "stopping early or keeping the best model needs validation data, and there are none; set stop.on to 'test' if the "
    "test data may choose (the metric on them is then no longer an honest estimate)"
)


@dataclass(frozen=True)
class StopRule:
    """A seed ends when ``patience`` rounds in a row were no better than the best before them by ``min_delta``.

    Rounds of a warmup do not count: their models are not meant to be used.

    >>> rule = StopRule(patience=2, on="test")
    >>> [rule.is_over([{"accuracy": a, "phase": "train"} for a in seen]) for seen in ([0.1, 0.3], [0.3, 0.2, 0.3])]
    [False, True]
    """

    patience: int | None = None
    min_delta: float = 0.0
    on: Literal["validation", "test"] = "validation"
    goal: Goal = field(default_factory=Goal)

    def check(self, records: Sequence[Record]) -> None:
        """Refuse a metric that is undefined on the samples, such as auroc on a single class."""
        for record in records:
            values = record.get("metrics" if self.on == "test" else "validation", {})
            if self.goal.metric in values and values[self.goal.metric] is None:
                raise ConfigError(
                    f"{self.goal.metric} is to choose the best round, but it is undefined on the {self.on} samples; "
                    "choose another metric first in task.metrics, or samples of every class"
                )

    def is_over(self, records: Sequence[Record]) -> bool:
        """Whether a seed with these records ends."""
        if self.patience is None or not records:
            return False
        since = records[self.best(records) + 1 :]
        return len([record for record in since if record["phase"] != "warmup"]) >= self.patience

    def best(self, records: Sequence[Record]) -> int:
        """The position of the last record that was better than the best before it."""
        values = [self._value(record) for record in records]
        best = 0
        for i, value in enumerate(values):
            if value > values[best] + self.min_delta:
                best = i
        return best

    def _value(self, record: Record) -> float:
        """The metric that chooses, its sign changed if lower is better; an undefined value is worse than any other."""
        metric = self.goal.metric
        value = value_of(record, metric) if self.on == "test" else record["validation"].get(metric)
        return -math.inf if value is None else float(value) * (1 if self.goal.higher_is_better else -1)
