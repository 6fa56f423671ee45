"""Clients' memories between their rounds."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Protocol
from weakref import finalize

from fedpews.results.nests import nest_bytes, read_nest, write_nest

if TYPE_CHECKING:
    import torch

    from fedpews.trees import Nest

HELD_BYTES = 64 * 2**20
"""Clients' memories held in RAM; the others are on disk."""


_NAME = re.compile(r"\d+-\d+-\d+\.safetensors|\..+\.new")
"""What a run puts beside each other; nothing else is deleted."""


class Store(Protocol):
    """Clients' memories by seed and client, saved with every checkpoint."""

    def restore(self, versions: Mapping[str, int]) -> None: ...

    def get(self, seed: int, client: int) -> Nest | None: ...

    def put(self, seed: int, client: int, memory: Nest) -> None: ...

    def commit(self, round: int) -> dict[str, int]: ...

    def forget_old(self) -> None: ...


class MemoryStore:
    """Clients' memories by seed and client: the recent ones in RAM, the others on disk.

    RAM holds ``HELD_BYTES`` at most, so it does not grow with the number of clients. Every write makes a new
    file; those of the last checkpoint stay until the next one is complete. Without a folder, what is too much
    for RAM goes to a temporary one.
    """

    def __init__(self, folder: Path | None, device: torch.device | str = "cpu") -> None:
        self._folder, self._device = folder, device
        self._held: OrderedDict[str, Nest] = OrderedDict()  # the least recent first
        self._sizes: dict[str, int] = {}  # of those held, in bytes
        self._bytes = 0
        self._unsaved: dict[str, None] = {}  # keys held whose file is missing or out of date; an ordered set
        self._versions: dict[str, int] = {}  # key -> the number of its file
        self._last = 0  # the highest of these numbers so far
        self._checkpoint: dict[str, int] = {}  # the versions that the last checkpoint needs
        self._old: list[Path] = []  # files to delete once the next checkpoint is there

    def restore(self, versions: Mapping[str, int]) -> None:
        """Go on from a checkpoint; files newer than it are deleted."""
        self._versions, self._checkpoint = dict(versions), dict(versions)
        # numbers only rise, so a new file never takes the name of one that the checkpoint needs
        self._last = max(versions.values(), default=0)
        if self._folder is not None and self._folder.exists():
            known = {self._path(key, number) for key, number in self._versions.items()}
            for path in self._folder.iterdir():
                # a killed run leaves files of after the checkpoint, or of the one before it
                if path not in known and _NAME.fullmatch(path.name) and not path.is_dir():
                    path.unlink()

    def get(self, seed: int, client: int) -> Nest | None:
        key = f"{seed}-{client}"
        if key in self._held:
            # used again, so the last to be dropped
            self._held.move_to_end(key)
            return self._held[key]
        if key not in self._versions:
            return None
        memory, _ = read_nest(self._path(key, self._versions[key]), self._device)
        self._hold(key, memory)
        return memory

    def put(self, seed: int, client: int, memory: Nest) -> None:
        """Keep a client's memory; one without a single tensor is the same as none."""
        key = f"{seed}-{client}"
        self._release(key)
        if key in self._versions:
            # what is on disk is out of date from now on, even if the new memory turns out to be empty
            self._discard_file(key)
        if self._hold(key, memory):
            self._unsaved[key] = None

    def commit(self, round: int) -> dict[str, int]:
        """Write what is not on disk yet; the versions that make up the store now."""
        for key in list(self._unsaved):
            self._write(key)
        return dict(self._versions)

    def forget_old(self) -> None:
        """The checkpoint with what was committed is complete: delete the files that only the one before needs."""
        self._checkpoint = dict(self._versions)
        for path in self._old:
            path.unlink(missing_ok=True)
        self._old = []

    def _hold(self, key: str, memory: Nest) -> bool:
        """Keep a memory in RAM, unless it holds nothing; the least recent ones make room for it."""
        size = nest_bytes(memory)
        if size is None:
            return False
        self._held[key], self._sizes[key] = memory, size
        self._bytes += size
        # the one just put stays, however large: it may be asked for next
        while self._bytes > HELD_BYTES and len(self._held) > 1:
            oldest = next(iter(self._held))
            # written only now, and not at all if it was read from disk and has not changed
            if oldest in self._unsaved:
                self._write(oldest)
            self._release(oldest)
        return True

    def _release(self, key: str) -> None:
        if self._held.pop(key, None) is not None:
            self._bytes -= self._sizes.pop(key)
        self._unsaved.pop(key, None)

    def _write(self, key: str) -> None:
        self._last += 1
        path = self._path(key, self._last)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_nest(path, self._held[key], {})
        self._versions[key] = self._last
        del self._unsaved[key]

    def _discard_file(self, key: str) -> None:
        number = self._versions.pop(key, None)
        if number is None:
            return
        # a kill before the next checkpoint goes back to this file, so it must outlive its successor
        if self._checkpoint.get(key) == number:
            self._old.append(self._path(key, number))
        else:
            self._path(key, number).unlink(missing_ok=True)

    def _path(self, key: str, number: int) -> Path:
        if self._folder is None:
            # made only when something has to leave RAM; removed with the store
            self._folder = Path(mkdtemp(prefix="fedpews-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{key}-{number}.safetensors"
