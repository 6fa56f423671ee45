"""A run on disk: its configuration, a line per seed and round, a summary, models, and checkpoints to resume from.

Nothing here is ever half written: files appear whole (written aside, then renamed), and ``rounds.jsonl`` and
``neurons.jsonl`` are cut back to the last checkpoint when a killed run goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from filelock import BaseFileLock, FileLock, Timeout

from fedpews.errors import CheckpointError, FolderInUse
from fedpews.results import layout
from fedpews.results.links import refuse_links
from fedpews.results.memories import MemoryStore, Store
from fedpews.results.nests import read_nest, write_atomically, write_nest
from fedpews.results.neurons import Ownership
from fedpews.results.records import Record, read_rounds

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedpews.trees import Nest, Tree


_BEST = "best"
"""In the checkpoint, beside the seeds' states."""


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if nothing had happened."""

    round: int
    states: dict[int, Nest]
    memories: dict[str, int]
    """"seed-client" -> the number of its file."""
    rounds_bytes: int
    neurons_bytes: int
    about: dict[str, Any]
    best: dict[int, Tree] = field(default_factory=dict)
    """Each seed's best model so far, of a run that keeps it."""


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        refuse_links(path)
        self._lock = _lock(path)
        self._rounds: IO[bytes] | None = None
        self._neurons: IO[bytes] | None = None

    def close(self) -> None:
        for file in (self._rounds, self._neurons):
            if file is not None:
                file.close()
        self._lock.release()

    @property
    def has_run(self) -> bool:
        return layout.is_begun(self.path)

    @property
    def config(self) -> Path:
        return self.path / layout.CONFIG

    def write_config(self, toml: str) -> None:
        """Write the configuration; a summary already there is that of a shorter run, and goes."""
        (self.path / layout.SUMMARY).unlink(missing_ok=True)
        write_atomically(self.config, toml.encode())

    def finish(
        self,
        summary: Mapping[str, Any],
        params: Mapping[int, Tree],
        neurons: Mapping[int, Mapping[int, Tensor]],
        best: Mapping[int, Tree] | None = None,
        finetuned: Mapping[int, Mapping[int, Tree]] | None = None,
    ) -> None:
        """Write what a finished run leaves: each seed's models and masks, and last the summary."""
        from torch import uint8

        for seed, tree in (best or {}).items():
            self._write_tensors(layout.best_file(seed), tree)
        for seed, clients in (finetuned or {}).items():
            named = {f"client-{i}/{name}": v for i, tree in clients.items() for name, v in tree.items()}
            self._write_tensors(layout.finetuned_file(seed), named)

        for seed, tree in params.items():
            self._write_tensors(layout.model_file(seed), tree)
            if neurons[seed]:
                masks = {f"client-{client}": mask.to(uint8) for client, mask in neurons[seed].items()}
                self._write_tensors(layout.masks_file(seed), masks)
        # last: a folder with a summary is a finished run, so everything else must be there
        write_atomically(self.path / layout.SUMMARY, (json.dumps(summary, indent=2) + "\n").encode())

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        write_atomically(
            self.path / name, save({key: value.contiguous().cpu() for key, value in tensors.items()})
        )

    def start_rounds(self, checkpoint: Checkpoint | None) -> list[Record]:
        """Open rounds.jsonl and neurons.jsonl, cut back to what the checkpoint knows of; the records that are left."""
        self._rounds = self._cut(layout.ROUNDS, 0 if checkpoint is None else checkpoint.rounds_bytes)
        self._neurons = self._cut(layout.NEURONS, 0 if checkpoint is None else checkpoint.neurons_bytes)
        return read_rounds(self.path)

    def _cut(self, name: str, keep: int) -> IO[bytes]:
        # appending: the position is the file's length, and no later write can overwrite a round
        file = (self.path / name).open("ab")
        if file.tell() < keep:
            file.close()
            raise CheckpointError(
                f"{self.path}/{name} is shorter than its checkpoint says; it was changed by hand. "
                "Start again in another folder (--out)."
            )
        file.truncate(keep)
        return file

    def describe(self, federation: Callable[[], Mapping[str, Any]]) -> None:
        """Write who takes part, once: a resumed run that has no masks any more would know less of the layers."""
        if not (self.path / layout.FEDERATION).exists():
            write_atomically(self.path / layout.FEDERATION, (json.dumps(federation()) + "\n").encode())

    def append(self, records: Sequence[Record], observed: Sequence[Ownership] = ()) -> None:
        assert self._rounds is not None
        assert self._neurons is not None
        # neurons first: a page that reads along never finds a round whose masks are missing
        _write(self._neurons, "".join(one.line() + "\n" for one in observed))
        _write(self._rounds, "".join(json.dumps(record, allow_nan=False) + "\n" for record in records))

    def save_checkpoint(
        self,
        round: int,
        states: Mapping[int, Nest],
        memories: Store,
        about: Mapping[str, Any],
        best: Mapping[int, Tree] | None = None,
    ) -> None:
        """Write where the run stands; a kill at any moment leaves this checkpoint or the one before it."""
        assert self._rounds is not None
        assert self._neurons is not None
        folder = self.path / layout.CHECKPOINT
        folder.mkdir(exist_ok=True)
        # The records must be on disk before a checkpoint that counts their bytes, and the memories before
        # the state that names their files; only then may older files go.
        os.fsync(self._rounds.fileno())
        os.fsync(self._neurons.fileno())
        versions = memories.commit(round)
        header = {
            "round": round,
            "rounds_bytes": self._rounds.seek(0, os.SEEK_END),
            "neurons_bytes": self._neurons.seek(0, os.SEEK_END),
            "memories": versions,
            "about": dict(about),
        }
        nest: Nest = {str(seed): state for seed, state in states.items()}
        if best:
            nest[_BEST] = {str(seed): tree for seed, tree in best.items()}
        write_nest(folder / layout.STATE, nest, header)
        memories.forget_old()

    def load_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None if the run was stopped before its first."""
        path = self.path / layout.CHECKPOINT / layout.STATE
        if not path.exists():
            return None
        states, header = read_nest(path)
        best = states.pop(_BEST, {})
        try:
            return Checkpoint(
                round=int(header["round"]),
                states={int(seed): state for seed, state in states.items()},
                memories=dict(header["memories"]),
                rounds_bytes=int(header["rounds_bytes"]),
                # checkpoints of the first versions have none
                neurons_bytes=int(header.get("neurons_bytes", 0)),
                about=dict(header["about"]),
                best={int(seed): tree for seed, tree in best.items()},
            )
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}). Start again in another folder (--out)."
            ) from error

    def memory_store(self, device: torch.device | str = "cpu") -> MemoryStore:
        return MemoryStore(self.path / layout.CHECKPOINT / layout.MEMORIES, device)


def _write(file: IO[bytes], text: str) -> None:
    file.write(text.encode())
    file.flush()


def _lock(path: Path) -> BaseFileLock:
    """Hold the folder for this process. The system lets go of it even after kill -9."""
    # whoever closes the folder may be another thread than the one that opened it
    lock = FileLock(path / layout.LOCK, thread_local=False)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise FolderInUse(
            f"{path} is in use by another run; wait for it or give another folder (--out)"
        ) from error
    return lock
