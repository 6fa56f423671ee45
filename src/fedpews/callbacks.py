"""Functions that are called while a run goes on, and a progress bar as one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fedpews.experiment import Experiment
from fedpews.results.records import Record
from fedpews.trees import Tree


@dataclass(frozen=True)
class Callback:
    """Functions to call while a run goes on.

    >>> enough = Callback(round=lambda records: min(record["accuracy"] for record in records) > 0.9)
    """

    begin: Callable[[Experiment, int, str], None] = lambda experiment, done, engine: None
    """Called once, with the number of rounds that a resumed run has already, and a description of the engine."""
    round: Callable[[Sequence[Record]], bool | None] = lambda records: None
    """Called after each round, with a record for each seed. If it returns True the run ends after this round. It is
    saved and summarised like any other, and ``resume=True`` continues it."""
    models: Callable[[int, Mapping[int, Tree]], None] | None = None
    """Called after each round, with its number and the global model of each seed."""
    stopping: Callable[[], None] = lambda: None
    """Called when Ctrl-C is pressed; the round is finished first."""


@contextmanager
def progress_bar(label: str) -> Iterator[Callback]:
    """A callback that shows a progress bar on stderr."""
    from rich.console import Console

    from fedpews.report.progress import ProgressBar

    with ProgressBar(label, Console(stderr=True), quiet=False) as bar:
        yield Callback(
            begin=lambda experiment, done, engine: bar.begin(experiment.rounds, done), round=bar.round
        )
