"""Who is told as a run goes on, and a progress bar as one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from fedpews.experiment import Experiment
from fedpews.results.records import Record
from fedpews.trees import Tree


@dataclass(frozen=True)
class Watcher:
    """What to call as a run goes on; a progress bar, for instance.

    >>> enough = Watcher(round=lambda records: min(record["accuracy"] for record in records) > 0.9)
    """

    begin: Callable[[Experiment, int, str], None] = lambda experiment, done, engine: None
    """Called once, with the rounds that are done already (of a resumed run) and the engine in words."""
    round: Callable[[Sequence[Record]], bool | None] = lambda records: None
    """Called after each round, with a record for each seed. If it returns True the run ends there: saved and
    summarised like any other, and ``resume=True`` goes on from there."""
    models: Callable[[int, Mapping[int, Tree]], None] | None = None
    """Called with the round and each seed's global model."""
    stopping: Callable[[], None] = lambda: None
    """Ctrl-C was heard; the round is being finished."""


@contextmanager
def with_bar(label: str, watcher: Watcher) -> Iterator[Watcher]:
    """The same watcher, with a progress bar beside it."""
    from rich.console import Console

    from fedpews.report.progress import ProgressBar

    with ProgressBar(label, Console(stderr=True), quiet=False) as bar:

        def begin(experiment: Experiment, done: int, engine: str) -> None:
            bar.begin(experiment.rounds, done)
            watcher.begin(experiment, done, engine)

        def round(records: Sequence[Record]) -> bool | None:
            bar.round(records)
            return watcher.round(records)

        yield replace(watcher, begin=begin, round=round)
