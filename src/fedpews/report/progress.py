"""What a person sees while a run goes on."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedpews.results.records import Record, evaluated, value_of
from fedpews.tasks.names import show


class ProgressBar:
    """Round, phase, accuracy and time left. Silent where there is no terminal to draw on."""

    def __init__(self, label: str, console: Console, quiet: bool) -> None:
        self._label = label
        self._shown = ""  # of the last round that was evaluated
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            disable=quiet or not (console.is_terminal or console.is_jupyter),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, rounds: int, done: int) -> None:
        self._task = self._bar.add_task(self._label, total=rounds, completed=done, status="")

    def round(self, records: Sequence[Record]) -> None:
        self._shown = metric_in_words(records) or self._shown
        status = f"{records[0]['phase']:6} {self._shown}"
        self._bar.update(self._task, completed=records[0]["round"], status=status)


def metric_in_words(records: Sequence[Record]) -> str:
    """The first metric of a round, over its seeds; empty if the round was not evaluated.

    >>> metric_in_words([{"accuracy": 0.5}, {"accuracy": 0.7}])
    'accuracy  60.0 %'
    """
    seen = evaluated(records)
    if not seen:
        return ""
    metric = next(iter(seen[0].get("metrics", {"accuracy": None})))
    known = [value for record in seen if (value := value_of(record, metric)) is not None]
    return f"{metric} {show(metric, sum(known) / len(known) if known else None):>7}"
