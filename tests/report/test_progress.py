"""What a person sees while a run goes on, without a terminal to draw on."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from fedpews.report.progress import ProgressBar


def lines_of(rounds: int, seconds: float, console: Console, quiet: bool = False, done: int = 0) -> list[str]:
    """What is written of a run whose rounds take so long."""
    passed = iter([0.0, *(seconds * number for number in range(1, rounds - done + 1))])
    with ProgressBar("fedavg", console, quiet, clock=lambda: next(passed)) as bar:
        bar.begin(rounds, done)
        for number in range(done + 1, rounds + 1):
            bar.round([{"round": number, "phase": "train", "accuracy": 0.5}])
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_without_a_terminal_every_tenth_of_the_rounds_has_a_line() -> None:
    lines = lines_of(20, 0.5, Console(file=io.StringIO()))
    assert lines[0] == "fedavg: round 2 of 20, train, accuracy 50.0 %, 9 s left"
    assert len(lines) == 10
    assert lines[-1] == "fedavg: round 20 of 20, train, accuracy 50.0 %"


def test_without_a_terminal_half_a_minute_has_a_line() -> None:
    lines = lines_of(1000, 10.0, Console(file=io.StringIO()), done=990)
    assert [line.split(",")[0] for line in lines] == [
        f"fedavg: round {number} of 1000" for number in (993, 996, 999, 1000)
    ]
    assert lines[0].endswith("70 s left")


def test_a_quiet_command_writes_no_progress() -> None:
    assert lines_of(20, 60.0, Console(file=io.StringIO()), quiet=True) == []


def test_a_notebook_without_ipywidgets_has_lines_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert len(lines_of(20, 0.5, Console(file=io.StringIO(), force_jupyter=True))) == 10
