"""Many cells at once, each a line of one table that a person can watch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table

ORDER = ("running", "failed", "busy", "waiting")
"""What is shown first where not everything fits; whatever else has ended."""


@dataclass(frozen=True)
class Line:
    """How a cell is getting on."""

    state: str = "waiting"
    round: int = 0
    rounds: int = 0
    shown: str = ""
    where: str = ""


class Board:
    """A live table in a terminal; elsewhere a line of text whenever a cell begins, moves or ends.

    >>> board = Board(Console(quiet=True))
    >>> board.update("fedavg, A", state="running", round=3, rounds=10, where="tcp://10.0.0.6:40123")
    >>> board.lines["fedavg, A"].round
    3
    """

    def __init__(self, console: Console, quiet: bool = False) -> None:
        self.lines: dict[str, Line] = {}
        self._console = console
        self._quiet = quiet
        self._live: Live | None = None
        if console.is_terminal and not quiet:
            self._live = Live(
                console=console, refresh_per_second=4, get_renderable=self.table, transient=True
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, label: str, **changes: Any) -> None:
        """Change a cell's line, or add it."""
        self.lines[label] = replace(self.lines.get(label, Line()), **changes)

    def say(self, text: str) -> None:
        """Something that happened once."""
        if not self._quiet:
            self._console.print(escape(text), soft_wrap=True)

    def table(self) -> Table:
        counts = Counter(line.state for line in self.lines.values())
        title = ", ".join(f"{count} {state}" for state, count in counts.items())
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
        for head in ("cell", "state", "round", "", "worker"):
            table.add_column(head, no_wrap=True)
        ranked = sorted(
            self.lines.items(),
            key=lambda item: ORDER.index(item[1].state) if item[1].state in ORDER else len(ORDER),
        )
        room = max(3, self._console.height - 6)
        for label, line in ranked[:room]:
            round = f"{line.round}/{line.rounds}" if line.rounds else ""
            table.add_row(*map(escape, (label, line.state, round, line.shown, line.where)))
        if len(ranked) > room:
            table.add_row(f"and {len(ranked) - room} more")
        return table
