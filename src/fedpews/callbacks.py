"""What a run calls while it goes on, a progress bar, and signals (Ctrl-C) that end it after a round."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from fedpews.experiment import Experiment
from fedpews.results.records import Record
from fedpews.trees import Tree


@dataclass(frozen=True)
class Callback:
    """Functions that are called during a run.

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


@contextmanager
def stop_signal(callbacks: Sequence[Callable[[], None]] = ()) -> Iterator[threading.Event]:
    """Set by the first Ctrl-C (or SIGTERM, or SIGHUP), so that the round is finished and saved; a second stops at once.

    A signal that is ignored stays ignored: that is how nohup keeps a run going when its terminal is closed.

    Args:
        callbacks: called on the first signal.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        for callback in callbacks:
            callback()

    signals = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.getsignal(number) for number in signals}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
