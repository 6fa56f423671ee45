"""What a person sees while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
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

SECONDS = 30
"""After so long a line is due, where there is no terminal to draw a bar on; after a tenth of the rounds, too."""


class ProgressBar:
    """Round, phase, accuracy and time left: a bar in a terminal, elsewhere a line of text every so often."""

    def __init__(
        self, label: str, console: Console, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label, self._console, self._clock = label, console, clock
        # in a notebook a bar is a widget
        draws = console.is_terminal or (console.is_jupyter and find_spec("ipywidgets") is not None)
        self._writes = not quiet and not draws
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
            disable=quiet or not draws,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, rounds: int, done: int) -> None:
        self._rounds = rounds
        self._began = self._written = (self._clock(), done)
        self._task = self._bar.add_task(self._label, total=rounds, completed=done, status="")

    def round(self, records: Sequence[Record]) -> None:
        self._shown = metric_in_words(records) or self._shown
        status = f"{records[0]['phase']:6} {self._shown}"
        self._bar.update(self._task, completed=records[0]["round"], status=status)
        if self._writes:
            self._write(records[0]["round"], records[0]["phase"])

    def _write(self, round: int, phase: str) -> None:
        now, (then, last) = self._clock(), self._written
        if now - then < SECONDS and round - last < self._rounds / 10 and round < self._rounds:
            return
        self._written = (now, round)
        left = (now - self._began[0]) / max(1, round - self._began[1]) * (self._rounds - round)
        rest = f"{left:.0f} s left" if left < 90 else f"{left / 60:.0f} min left"
        parts = [f"round {round} of {self._rounds}", phase, " ".join(self._shown.split())]
        text = ", ".join(filter(None, [*parts, rest if round < self._rounds else ""]))
        print(f"{self._label}: {text}", file=self._console.file, flush=True)


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
