"""SHA256SUMS: the digests of a run's finished files, in the form that ``sha256sum --check`` takes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedpews.errors import CheckpointError
from fedpews.results import layout
from fedpews.results.files import read_bytes, write_atomically

_LINE = re.compile(r"([0-9a-f]{64})  ([\w.+-]+)")


def read_sums(folder: Path) -> dict[str, str]:
    """The digests by name; none in a folder of an earlier version."""
    path = folder / layout.SUMS
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        lines = read_bytes(path).decode().splitlines()
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    found = [_LINE.fullmatch(line) for line in lines]
    if not lines or not all(found):
        raise CheckpointError(f"{path} is damaged: not every line is a digest and a name")
    return {match[2]: match[1] for match in found if match is not None}


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    text = "".join(f"{value}  {name}\n" for name, value in sorted(sums.items()))
    write_atomically(folder / layout.SUMS, text.encode())


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_checked(folder: Path, name: str) -> bytes:
    """A file of a run's folder, if it is what the folder's digests say; one that is not listed passes."""
    for attempt in (1, 2):
        expected = read_sums(folder).get(name)
        data = read_bytes(folder / name)
        if expected is None or sum_of(data) == expected:
            return data
        if attempt == 2:
            break
        # a run that goes on right now may have replaced both between the two readings
    raise CheckpointError(
        f"{folder / name} is damaged: it does not give its digest in {layout.SUMS}; "
        "bring back a copy, or go on with the run (--resume), which writes it again where it can"
    )


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Raise a CheckpointError unless every one of these that is listed is there and as it was written."""
    listed = read_sums(folder)
    for name in names:
        if name in listed:
            read_checked(folder, name)
