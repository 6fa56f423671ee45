"""A file that only grows, a line at a time, and the digest of all that is in it."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from fedpews.errors import CheckpointError
from fedpews.results.files import AS_IT_IS, digest, read_bytes, write_all


@dataclass(frozen=True)
class Mark:
    """How much of a growing file a checkpoint knows of: so many bytes, with this digest."""

    size: int = 0
    digest: str | None = None
    """None in checkpoints of earlier versions."""

    def check(self, path: Path) -> None:
        """Raise a CheckpointError unless the file begins with what is meant."""
        if not self.size:
            return
        data = read_bytes(path)
        if len(data) < self.size:
            raise CheckpointError(f"{path} is shorter than its checkpoint says")
        if self.digest is not None and digest(data[: self.size]) != self.digest:
            raise CheckpointError(f"{path} is not what its checkpoint says: it was changed")


class Appended:
    """A growing file, opened by the one process that writes to it."""

    def __init__(self, path: Path, keep: Mark) -> None:
        keep.check(path)
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | AS_IT_IS, 0o666)
            # what a killed run wrote after its checkpoint is written again
            os.ftruncate(self._file, keep.size)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error
        self._hasher = hashlib.sha256(read_bytes(path) if keep.size else b"")
        self._path, self._size = path, keep.size

    @property
    def mark(self) -> Mark:
        # as ``digest`` of all of it would give
        return Mark(self._size, self._hasher.hexdigest()[:32])

    def add(self, text: str) -> None:
        data = text.encode()
        if not data:
            return
        try:
            write_all(self._file, data)
        except OSError as error:
            raise CheckpointError(f"{self._path} cannot be written: {error.strerror or error}") from error
        self._hasher.update(data)
        self._size += len(data)

    def sync(self) -> None:
        """Wait until all of it is on disk."""
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
