"""The lines of a run's growing files, read by whoever does not write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedpews.outside import shaped
from fedpews.results import layout
from fedpews.results.checkpoints import known_marks
from fedpews.results.files import unsealed
from fedpews.results.sums import read_checked, read_sums


def read_lines(folder: Path, name: str, schema: Any) -> list[dict[str, Any]]:
    """The records of rounds.jsonl or neurons.jsonl, each checked, and all of them against what vouches for them.

    Of a finished run that is SHA256SUMS; before, the newest checkpoint vouches for the lines that it has seen. A file
    that is not there, and that nothing vouches for, has no lines.
    """
    path, is_listed = folder / name, name in read_sums(folder)
    if not is_listed:
        rounds, neurons = known_marks(folder)
        (rounds if name == layout.ROUNDS else neurons).check(path)
        if not path.exists():
            return []
    lines = unsealed(read_checked(folder, name), path)
    return [shaped(schema, line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]
