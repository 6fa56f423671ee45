"""Who took part in each round, who did not, and why."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from fedpews.flower.notices import one_line


@dataclass
class Answer:
    """What came of asking one site."""

    outcome: str = "no answer"  # accepted, refused, failed, absent or no answer
    why: str = ""
    seconds: float = 0.0
    bytes_down: int = 0  # on the wire, as Flower's objects
    bytes_up: int = 0


@dataclass
class Attempt:
    """One attempt at a round."""

    round: int
    attempt: int
    phase: str
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    sites: dict[int, Answer] = field(default_factory=dict)

    def describe(self) -> str:
        """The attempt in one line.

        >>> Attempt(3, 1, "warmup", sites={0: Answer("accepted"), 1: Answer("failed", "it raised")}).describe()
        'round 3 (warmup): 0 answered; 1 failed: it raised'
        """
        good = [str(site) for site, answer in sorted(self.sites.items()) if answer.outcome == "accepted"]
        bad = [
            f"{site} {answer.outcome}: {answer.why}".removesuffix(": ")
            for site, answer in sorted(self.sites.items())
            if answer.outcome != "accepted"
        ]
        again = f", attempt {self.attempt}" if self.attempt > 1 else ""
        head = f"round {self.round} ({self.phase}){again}: {', '.join(good) or 'nobody'} answered"
        return "; ".join([head, *bad])


class SiteLog:
    """Who took part in each round, who did not, and why: a line per attempt in ``sites.jsonl``.

    Args:
        say: told of every failure; a round in which all answered is only logged.
    """

    def __init__(self, path: Path | None, say: Callable[[str], None]) -> None:
        self._path, self.say = path, say
        self.refused: dict[int, int] = {}

    def add(self, attempt: Attempt) -> None:
        for site, answer in attempt.sites.items():
            if answer.outcome == "refused":
                self.refused[site] = self.refused.get(site, 0) + 1
        failed = any(answer.outcome != "accepted" for answer in attempt.sites.values())
        (self.say if failed else log_line)(attempt.describe())
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({**asdict(attempt), "refused_so_far": self.refused}) + "\n")


def log_line(text: str) -> None:
    """A line in Flower's log, which ``flwr run --stream`` shows."""
    logging.getLogger("flwr").info(one_line(text))
