"""Files that are never half written, and that tell when they were changed: digests, and a sum at each line's end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from fedpews.errors import CheckpointError
from fedpews.outside import parse_json

ASIDE = re.compile(r"\..+\.[0-9a-f]{8}\.new")
"""The name of a file that was being written when its process was killed."""

AS_IT_IS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""How a file is opened: never through a link, and on Windows without another end of lines."""

# a line's own sum stands at its end, as one more key
SUM = re.compile(r', "sum": "([0-9a-f]{8})"\}$')


def digest(data: bytes) -> str:
    """What stands in a checkpoint for a file's content: half of its SHA-256, which processors have instructions for.

    >>> digest(b"")
    'e3b0c44298fc1c149afbf4c8996fb924'
    """
    return hashlib.sha256(data).hexdigest()[:32]


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """A file appears whole or not at all, also when the machine goes down.

    Args:
        durable: whether it must be on disk when this returns; if not, whoever needs it there calls ``sync``.
    """
    # a name that nobody can guess, and never through a link that somebody put there
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | AS_IT_IS, 0o666)
        try:
            write_all(file, data)
            if durable:
                os.fsync(file)
        finally:
            os.close(file)
        os.replace(aside, path)
        if durable:
            sync_folder(path.parent)
    except BaseException as error:
        aside.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        raise


def write_all(file: int, data: bytes) -> None:
    """All of the data: the system may take less at a time."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def sync(paths: Iterable[Path]) -> None:
    """Wait until files are on disk."""
    for path in paths:
        # Windows waits only for a file that may be written to
        _sync(path, os.O_RDWR)


def sync_folder(folder: Path) -> None:
    """Wait until a folder's names are on disk; Windows does that by itself."""
    if os.name != "nt":
        _sync(folder, os.O_RDONLY)


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_bytes(path: Path) -> bytes:
    """A file's content; one that is missing, a folder or otherwise not readable is a CheckpointError."""
    try:
        # neither a pipe nor a device: to read one may never end
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link; a run's folder must not reach outside itself")
        if not path.is_file():
            raise CheckpointError(f"{path} is {'not a file' if path.exists() else 'missing'}")
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def remove_file(path: Path) -> None:
    """Delete a file that may be there."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be deleted: {error.strerror or error}") from error


def sealed(record: Mapping[str, Any]) -> str:
    """A record as a line that carries its own sum.

    >>> sealed({"round": 1})
    '{"round": 1, "sum": "d9f40321"}\\n'
    """
    text = json.dumps(record, allow_nan=False)
    return f'{text[:-1]}, "sum": "{zlib.crc32(text.encode()):08x}"}}\n'


def unsealed(data: bytes, path: Path) -> list[dict[str, Any]]:
    """The records of lines, each checked against its sum; a last line cut off by a kill is left out.

    Lines of earlier versions have no sum, and a run that they began goes on in the same file: such lines come first.
    """
    try:
        # what follows the last line's end is not a whole line
        lines = data.decode().split("\n")[:-1]
        sums = [SUM.search(line) for line in lines]
        for number, (before, found) in enumerate(pairwise(sums), 2):
            if before is not None and found is None:
                raise CheckpointError(f"{path} is damaged: line {number} has no sum")
        for number, (line, found) in enumerate(zip(lines, sums, strict=True), 1):
            if found is not None and f"{zlib.crc32(_bare(line, found).encode()):08x}" != found[1]:
                raise CheckpointError(f"{path} is damaged: line {number} does not give its sum")
        records: Sequence[Any] = [
            parse_json(line if found is None else _bare(line, found), f"{path}, line {number}")
            for number, (line, found) in enumerate(zip(lines, sums, strict=True), 1)
        ]
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise CheckpointError(f"{path}, line {number} is damaged: it is not a record")
    return list(records)


def _bare(line: str, found: re.Match[str]) -> str:
    return line[: found.start()] + "}"


def remove_asides(folder: Path) -> None:
    """Delete what a killed process was writing; whoever calls this holds the folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            if ASIDE.fullmatch(path.name) and path.is_file():
                path.unlink(missing_ok=True)
