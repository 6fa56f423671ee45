"""Text that a process leaves in files, for people and for the process that shows it.

Status lines of a server or a site, which sites answered in each round, and why a run failed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedpews.errors import ConfigError, FedpewsError, RunFailed, first_line
from fedpews.results import layout
from fedpews.results.files import write_atomically
from fedpews.results.records import Record, value_of
from fedpews.results.schema import SitesErrorShape, read_object
from fedpews.tasks.names import Goal, show


def one_line(text: str) -> str:
    """The text without control characters: text from the network starts no line and moves no cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text)


def log_line(text: str) -> None:
    """Add a line to Flower's log, which ``flwr run --stream`` shows."""
    logging.getLogger("flwr").info(one_line(text))


def without_traceback(record: logging.LogRecord) -> bool:
    """A filter of Flower's log: an error that says all in one line needs no traceback."""
    if record.exc_info and isinstance(record.exc_info[1], FedpewsError):
        record.exc_info = None
    return True


def append_line(path: Path, text: str) -> None:
    """Append one line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(one_line(text) + "\n")


class Follower:
    """Reads the lines that are appended to a file from now on; the file may not exist yet.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "status.log"
    ...     append_line(path, "before")
    ...     follower = Follower(path)
    ...     append_line(path, "site 0 is connected")
    ...     follower.new(), follower.new()
    (['site 0 is connected'], [])
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = path.stat().st_size if path.exists() else 0

    def new(self) -> list[str]:
        """Every whole line since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        return whole.decode(errors="replace").splitlines()


@dataclass
class Answer:
    """The result of asking one site."""

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
        head = f"round {self.round} ({self.phase}){again}: {', '.join(good) or 'no site'} answered"
        return "; ".join([head, *bad])


class SiteLog:
    """The server's log about its sites, in a run's folder: a line per attempt in ``sites.jsonl``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._refused: dict[int, int] = {}  # uploads by site

    def report(self, text: str) -> None:
        """Log a line and keep it in ``sites.log``, which `fedpews flower up` shows."""
        log_line(text)
        append_line(self._folder / layout.SITES_NOTICES, text)

    def add(self, attempt: Attempt) -> None:
        """Record an attempt. An attempt in which all sites answered is only logged."""
        for site, answer in attempt.sites.items():
            if answer.outcome == "refused":
                self._refused[site] = self._refused.get(site, 0) + 1
        failed = any(answer.outcome != "accepted" for answer in attempt.sites.values())
        (self.report if failed else log_line)(attempt.describe())
        with (self._folder / layout.SITES).open("a") as file:
            file.write(json.dumps({**asdict(attempt), "refused_so_far": self._refused}) + "\n")


def log_scores(goal: Goal, record: Record) -> None:
    """Log how good a round's model is, over all sites and at each."""
    value = value_of(record, goal.metric)
    if value is None:
        return
    by_site = "".join(
        f", {name} {show(goal.metric, scores.get(goal.metric))} of {scores['samples']}"
        for name, scores in record.get("sites", {}).items()
    )
    log_line(
        f"round {record['round']}, seed {record['seed']}: {goal.metric} {show(goal.metric, value)}, "
        f"loss {record['loss']:.4g}{by_site}"
    )


def save_failure(folder: Path, error: Exception, who: str = "the server") -> None:
    """Write why a run or a site failed, for the process that started it: Flower's exit codes do not say."""
    ours = error if isinstance(error, FedpewsError) else RunFailed(f"{who} failed: {first_line(error)}")
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"exit_code": ours.exit_code, "message": str(ours)})
    write_atomically(folder / layout.SITES_ERROR, text.encode())


def clear_failure(folder: Path) -> None:
    """Remove the failure of an earlier run."""
    (folder / layout.SITES_ERROR).unlink(missing_ok=True)


def read_failure(folder: Path) -> FedpewsError | None:
    """The failure that a folder has, with its exit code."""
    path = folder / layout.SITES_ERROR
    if not path.exists():
        return None
    failure = read_object(path, SitesErrorShape)
    error = FedpewsError(failure["message"])
    error.exit_code = failure["exit_code"]
    return error


def raise_failure(folder: Path) -> None:
    """Raise the failure that a folder has; nothing if there is none."""
    if failure := read_failure(folder):
        raise failure


def site_number(settings: Mapping[str, Any]) -> int:
    """The site's number, from ``--node-config "site=0"``."""
    site = settings.get("site")
    if not isinstance(site, int) or isinstance(site, bool) or site < 0:
        raise ConfigError(
            f"this SuperNode does not say which site it is: site is {site!r}; start it with "
            '--node-config "site=0", a different whole number for each site'
        )
    return site


def site_folder(settings: Mapping[str, Any]) -> Path:
    """A site's own folder in its ``state-dir``: its memory, its models and its status lines."""
    state = Path(str(settings.get("state-dir", "~/.fedpews/sites"))).expanduser()
    return state / f"site-{site_number(settings)}"
