"""A run on disk: its configuration, a line per seed and round, a summary, models, and checkpoints to resume from.

No file is ever half written: files are written aside and renamed, and ``rounds.jsonl`` and ``neurons.jsonl`` are cut
back to the last checkpoint when a killed run is resumed. Every file is verified by its digest when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from fedpews.errors import CheckpointError, ConfigError, FolderInUse
from fedpews.results import checkpoint, layout
from fedpews.results.checkpoint import Checkpoint
from fedpews.results.files import (
    ASIDE,
    GrowingFile,
    digest,
    read_bytes,
    read_sums,
    remove_file,
    write_atomically,
    write_sums,
)
from fedpews.results.masks import Ownership
from fedpews.results.memories import Store
from fedpews.results.records import Record, read_rounds

if TYPE_CHECKING:
    from torch import Tensor

    from fedpews.trees import Nest, Tree


class RunFolder:
    """The folder of a run, locked by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        layout.refuse_links(path)
        # the system releases it even after kill -9; another thread than this one may close the folder
        self._lock = FileLock(path / layout.LOCK, thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise FolderInUse(
                f"{path} is in use by another run; wait for it or give another folder (--out)"
            ) from error
        # files that a killed process was writing
        for file in [*path.iterdir(), *(path / layout.CHECKPOINT).glob(".*.new")]:
            if ASIDE.fullmatch(file.name):
                remove_file(file)
        try:
            self.sums = read_sums(path)  # the digests of its files by name
        except CheckpointError:
            # written again as the run goes on
            self.sums = {}
        self._growing: dict[str, GrowingFile] = {}
        self._checkpoints: list[Checkpoint] = []  # the last two, the older one first

    def close(self) -> None:
        for file in self._growing.values():
            file.close()
        self._lock.release()

    @property
    def has_run(self) -> bool:
        return layout.is_begun(self.path)

    @property
    def config(self) -> Path:
        return self.path / layout.CONFIG

    def is_intact(self, name: str) -> bool:
        """Whether a file is listed, and as it was written."""
        try:
            return digest(read_bytes(self.path / name)) == self.sums.get(name)
        except CheckpointError:
            return False

    def write_config(self, toml: str) -> None:
        """Write the configuration and delete the summary, which is that of a shorter run."""
        self._unlist(layout.SUMMARY)
        remove_file(self.path / layout.SUMMARY)
        self._write({layout.CONFIG: toml.encode()})

    def start(self, resumed: Checkpoint | None, memories: Store) -> list[Record]:
        """Continue from a checkpoint, or from the start; the records until there."""
        if resumed is not None:
            earlier = [round for round in checkpoint.rounds(self.path) if round < resumed.round]
            with suppress(CheckpointError):
                self._checkpoints = [checkpoint.read_contents(self.path, round) for round in earlier[:1]]
            self._checkpoints.append(resumed)
        self._remove_old(memories)
        memories.restore({} if resumed is None else resumed.memories)
        kept = {name: checkpoint.read_growing(self.path, name, resumed) for name in layout.GROWING}
        # before anything is cut; all other files are written again at the end
        sums = {name: self.sums[name] for name in (layout.CONFIG, layout.FEDERATION) if name in self.sums}
        self.sums = sums | {name: digest(lines) for name, lines in kept.items()}
        write_sums(self.path, self.sums)
        self._growing = {name: GrowingFile(self.path / name, lines) for name, lines in kept.items()}
        return read_rounds(self.path)

    def describe(self, federation: Callable[[bool], Mapping[str, Any]]) -> None:
        """Write ``federation(masked)``, once; ``masked``: whether clients owned neurons in an earlier round."""
        if not self.is_intact(layout.FEDERATION):
            described = federation(not self._growing[layout.NEURONS].is_empty)
            self._write({layout.FEDERATION: (json.dumps(described) + "\n").encode()})

    def append(self, records: Sequence[Record], observed: Sequence[Ownership] = ()) -> None:
        """Append the records of a round, and which neurons each client owned in it."""
        # neurons first: a page that is read meanwhile never has a round without its masks
        self._append(layout.NEURONS, [ownership.record() for ownership in observed])
        self._append(layout.ROUNDS, records)
        write_sums(self.path, self.sums, durable=False)

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        file = self._growing[name]
        file.append("".join(json.dumps(record, allow_nan=False) + "\n" for record in records))
        self.sums[name] = file.digest

    def save_checkpoint(
        self,
        round: int,
        states: Mapping[int, Nest],
        best: Mapping[int, Tree],
        memories: Store,
        about: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint; a kill at any moment leaves this one or the one before it."""
        # the records and memories must be on disk before a checkpoint that has their digests
        for file in self._growing.values():
            file.sync()
        growing = {name: file.digest for name, file in self._growing.items()}
        saved = checkpoint.save(
            self.path,
            Checkpoint(round, "", growing, memories.commit(), dict(about), dict(states), dict(best)),
        )
        self._checkpoints = [*self._checkpoints[-1:], saved]
        self._remove_old(memories)

    def _remove_old(self, memories: Store) -> None:
        """Delete everything that neither of the last two checkpoints needs."""
        checkpoint.remove_others(self.path, [kept.round for kept in self._checkpoints])
        memories.keep({name for kept in self._checkpoints for name in kept.memory_files})

    def finish(self, summary: Mapping[str, Any], tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the files of a finished run: tensors by the name of their file, and last the summary."""
        from safetensors.torch import save

        for file in self._growing.values():
            file.sync()
        files = {
            name: bytes(save({key: value.contiguous().cpu() for key, value in tree.items()}))
            for name, tree in tensors.items()
        }
        # last: a folder with a summary is a finished run, so everything else must be there
        files[layout.SUMMARY] = (json.dumps(summary, indent=2) + "\n").encode()
        self._write(files)

    def _unlist(self, *names: str) -> None:
        """Remove files from the list before they change: a kill in between must not make them look damaged."""
        listed = [name for name in names if self.sums.pop(name, None) is not None]
        if listed:
            write_sums(self.path, self.sums)

    def _write(self, files: Mapping[str, bytes]) -> None:
        """Write files in their order, and list them."""
        self._unlist(*files)
        for name, data in files.items():
            write_atomically(self.path / name, data)
            self.sums[name] = digest(data)
        write_sums(self.path, self.sums)


def go_back(path: Path, before: int) -> None:
    """Delete the checkpoints of a round and all later ones, so that a resume starts earlier."""
    with closing(RunFolder(path)):
        rounds = checkpoint.rounds(path)
        kept = [round for round in rounds if round < before]
        if before > 1 and not kept:
            raise ConfigError(
                f"{path} has no checkpoint from before round {before}; it has those of rounds {rounds or 'none'}"
            )
        checkpoint.remove_others(path, kept)
