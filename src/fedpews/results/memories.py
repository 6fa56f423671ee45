"""Clients' memories between their rounds."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Protocol
from weakref import finalize

from fedpews.results.files import sync, sync_folder
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

    def restore(
        self, versions: Mapping[str, int], digests: Mapping[str, str], kept: Collection[str] = ()
    ) -> None: ...

    def get(self, seed: int, client: int) -> Nest | None: ...

    def put(self, seed: int, client: int, memory: Nest) -> None: ...

    def commit(self, round: int) -> tuple[dict[str, int], dict[str, str]]: ...

    def forget_old(self) -> None: ...


def file_name(key: str, number: int) -> str:
    """The file of a memory; every write of a key makes one with a higher number."""
    return f"{key}-{number}.safetensors"


class MemoryStore:
    """Clients' memories by seed and client: the recent ones in RAM, the others on disk.

    RAM holds ``HELD_BYTES`` at most, so it does not grow with the number of clients. Every write makes a new
    file; those of the last two checkpoints stay until the next one is complete. Without a folder, what is too much
    for RAM goes to a temporary one.
    """

    def __init__(self, folder: Path | None, device: torch.device | str = "cpu") -> None:
        self._folder, self._device = folder, device
        self._held: OrderedDict[str, Nest] = OrderedDict()  # the least recent first
        self._sizes: dict[str, int] = {}  # of those held, in bytes
        self._bytes = 0
        self._unsaved: dict[str, None] = {}  # keys held whose file is missing or out of date; an ordered set
        self._versions: dict[str, int] = {}  # key -> the number of its file
        self._digests: dict[str, str] = {}  # key -> the digest of its file
        self._unsynced: set[Path] = set()  # files that may not be on disk yet
        self._last = 0  # the highest of these numbers so far
        self._needed: list[frozenset[str]] = []  # the files of the last checkpoints, the oldest first

    def restore(
        self, versions: Mapping[str, int], digests: Mapping[str, str], kept: Collection[str] = ()
    ) -> None:
        """Go on from a checkpoint; files that neither it needs nor the one before it (``kept``) are deleted."""
        self._versions, self._digests = dict(versions), dict(digests)
        mine = frozenset(file_name(key, number) for key, number in versions.items())
        self._needed = [frozenset(kept), mine]
        known = mine.union(kept)
        # numbers only rise, so a new file never takes the name of one that a checkpoint needs
        self._last = max((int(name.rpartition("-")[2].partition(".")[0]) for name in known), default=0)
        if self._folder is not None and self._folder.is_dir() and not self._folder.is_symlink():
            for path in self._folder.iterdir():
                # a killed run leaves files of after the checkpoint, or of one that is gone
                if path.name not in known and _NAME.fullmatch(path.name):
                    _remove(path)

    def get(self, seed: int, client: int) -> Nest | None:
        key = f"{seed}-{client}"
        if key in self._held:
            # used again, so the last to be dropped
            self._held.move_to_end(key)
            return self._held[key]
        if key not in self._versions:
            return None
        memory, _ = read_nest(self._path(key, self._versions[key]), self._device, self._digests.get(key))
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

    def commit(self, round: int) -> tuple[dict[str, int], dict[str, str]]:
        """Write what is not on disk yet; the versions that make up the store now, and their digests."""
        for key in list(self._unsaved):
            self._write(key)
        if self._unsynced and self._folder is not None:
            sync(sorted(self._unsynced))
            sync_folder(self._folder)
            self._unsynced.clear()
        return dict(self._versions), dict(self._digests)

    def forget_old(self) -> None:
        """The checkpoint with what was committed is complete: delete what neither it nor the one before it needs."""
        mine = frozenset(file_name(key, number) for key, number in self._versions.items())
        gone = self._needed[:-1]
        self._needed = [*self._needed[-1:], mine]
        still = frozenset[str]().union(*self._needed)
        for name in sorted(frozenset[str]().union(*gone) - still):
            if self._folder is not None:
                _remove(self._folder / name)

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
        # what leaves RAM need not be on disk before a checkpoint names it
        self._digests[key] = write_nest(path, self._held[key], {}, durable=False)
        self._unsynced.add(path)
        self._versions[key] = self._last
        del self._unsaved[key]

    def _discard_file(self, key: str) -> None:
        number = self._versions.pop(key)
        self._digests.pop(key, None)
        path = self._path(key, number)
        # a kill before the next checkpoint goes back to this file, so it must outlive its successor
        if not any(path.name in needed for needed in self._needed):
            self._unsynced.discard(path)
            _remove(path)

    def _path(self, key: str, number: int) -> Path:
        if self._folder is None:
            # made only when something has to leave RAM; removed with the store
            self._folder = Path(mkdtemp(prefix="fedpews-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        return self._folder / file_name(key, number)


def _remove(path: Path) -> None:
    # a folder of this name is not ours
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
