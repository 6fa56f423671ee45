"""Clients' memories between their rounds."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import finalize

from fedpews.results.files import read_nest, remove_file, sync, write_nest

if TYPE_CHECKING:
    import torch

    from fedpews.trees import Nest

RAM_BYTES = 64 * 2**20
"""Clients' memories in RAM; the others are on disk."""

_NAME = re.compile(r"\d+-\d+-(\d+)\.safetensors|\..+\.new")
"""The files of a store; no other file is deleted."""


class Version(NamedTuple):
    """The version of a memory that a checkpoint needs."""

    number: int
    digest: str = ""
    """Of its file; empty if the memory is at a site."""


class Store(Protocol):
    """Clients' memories by seed and client, saved with every checkpoint."""

    def restore(self, saved: Mapping[str, Version]) -> None:
        """Continue with the memories of a checkpoint, by "seed-client"."""

    def get(self, seed: int, client: int) -> Nest | None: ...

    def put(self, seed: int, client: int, memory: Nest) -> None: ...

    def commit(self) -> dict[str, Version]:
        """Write all memories to disk; the current version of each."""

    def keep(self, files: Collection[str]) -> None:
        """Delete all files but these, which checkpoints need."""


def file_name(key: str, number: int) -> str:
    """The file of a memory; every write of a key makes one with a higher number."""
    return f"{key}-{number}.safetensors"


class MemoryStore:
    """Clients' memories by seed and client: the recent ones in RAM, the others on disk.

    RAM holds ``RAM_BYTES`` at most, so it does not grow with the number of clients. Every write makes a new file; those
    of the last two checkpoints stay until the next one is complete. Without a folder, what exceeds RAM goes to a
    temporary one.
    """

    def __init__(self, folder: Path | None, device: torch.device | str = "cpu") -> None:
        self._folder, self._device = folder, device
        # in RAM, each with its bytes, the least recent first
        self._recent: OrderedDict[str, tuple[Nest, int]] = OrderedDict()
        self._bytes = 0  # of those in RAM
        self._unsaved: dict[str, None] = {}  # keys in RAM whose file is missing or outdated; an ordered set
        self._versions: dict[str, Version] = {}  # of the files
        self._unsynced: set[Path] = set()  # files that may not be on disk yet
        self._last = 0  # the highest number of a file so far
        self._needed: frozenset[str] = frozenset()  # the files of the last checkpoints

    def restore(self, saved: Mapping[str, Version]) -> None:
        self._versions = dict(saved)
        self._last = max([self._last, *(version.number for version in saved.values())])

    def get(self, seed: int, client: int) -> Nest | None:
        key = f"{seed}-{client}"
        if key in self._recent:
            self._recent.move_to_end(key)
            return self._recent[key][0]
        if key not in self._versions:
            return None
        version = self._versions[key]
        memory, _ = read_nest(self._path(key, version.number), self._device, version.digest)
        self._add(key, memory)
        return memory

    def put(self, seed: int, client: int, memory: Nest) -> None:
        """Keep a client's memory; one without a single tensor is the same as none."""
        key = f"{seed}-{client}"
        # the file is outdated from now on, even if the new memory is empty
        outdated = self._versions.pop(key, None)
        path = None if outdated is None else self._path(key, outdated.number)
        # a run that is killed before the next checkpoint goes back to the files of the last one
        if path is not None and path.name not in self._needed:
            self._unsynced.discard(path)
            remove_file(path)
        self._unsaved.pop(key, None)
        self._add(key, memory)
        if key in self._recent:
            self._unsaved[key] = None

    def commit(self) -> dict[str, Version]:
        for key in list(self._unsaved):
            self._write(key)
        if self._unsynced and self._folder is not None:
            # the names of the files last
            for path in [*sorted(self._unsynced), self._folder]:
                sync(path)
            self._unsynced.clear()
        return dict(self._versions)

    def keep(self, files: Collection[str]) -> None:
        self._needed = frozenset(files)
        if self._folder is None or not self._folder.is_dir() or self._folder.is_symlink():
            return
        for path in self._folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            if path.name not in self._needed:
                # outdated, or left by a killed run
                remove_file(path)
            else:
                # numbers only rise, so a new file never gets the name of one that a checkpoint needs
                self._last = max(self._last, int(match[1]))

    def _add(self, key: str, memory: Nest) -> None:
        """Keep a memory in RAM, unless it has no tensor; the least recent ones go to disk."""
        # imported late: what reads results does not need torch
        from fedpews.trees import leaves

        _, outdated = self._recent.pop(key, (None, 0))
        self._bytes -= outdated
        sizes = [leaf.nbytes for _, leaf in leaves(memory)]
        if not sizes:
            return
        self._recent[key] = memory, sum(sizes)
        self._bytes += sum(sizes)
        # the one just added stays, however large: it may be needed next
        while self._bytes > RAM_BYTES and len(self._recent) > 1:
            oldest = next(iter(self._recent))
            # one that was read from disk and has not changed is not written
            if oldest in self._unsaved:
                self._write(oldest)
            self._bytes -= self._recent.pop(oldest)[1]

    def _write(self, key: str) -> None:
        self._last += 1
        path = self._path(key, self._last)
        path.parent.mkdir(parents=True, exist_ok=True)
        # synced by commit, before a checkpoint names it
        self._versions[key] = Version(self._last, write_nest(path, self._recent[key][0], {}, durable=False))
        self._unsynced.add(path)
        del self._unsaved[key]

    def _path(self, key: str, number: int) -> Path:
        if self._folder is None:
            # created only when a memory has to leave RAM; removed with the store
            self._folder = Path(mkdtemp(prefix="fedpews-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        return self._folder / file_name(key, number)
