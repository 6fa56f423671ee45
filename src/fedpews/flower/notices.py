"""Lines that one process leaves in a file for another to show: who came to the server, what a site has done."""

from __future__ import annotations

import re
from pathlib import Path


def one_line(text: str) -> str:
    """What came from the network cannot begin another line, nor move a terminal's cursor."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text)


def add_notice(path: Path, text: str) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(one_line(text) + "\n")


class Follower:
    """The lines that are added to a file from now on; it need not be there yet.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "notices.log"
    ...     add_notice(path, "before")
    ...     follower = Follower(path)
    ...     add_notice(path, "site 0 is connected")
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
