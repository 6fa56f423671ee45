"""A run on disk: its configuration, a line per seed and round, a summary, models, and checkpoints to resume from.

Nothing here is ever half written: files appear whole (written aside, then renamed), and ``rounds.jsonl`` and
``neurons.jsonl`` are cut back to the last checkpoint when a killed run goes on. Nothing is read that was changed
behind the run's back: a checkpoint has the digests of its files, and SHA256SUMS those of the others.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import BaseFileLock, FileLock, Timeout

from fedpews.errors import CheckpointError, FolderInUse
from fedpews.results import checkpoints, layout
from fedpews.results.appended import Appended, Mark
from fedpews.results.checkpoints import Checkpoint, Contents
from fedpews.results.files import read_bytes, remove_asides, remove_file, sealed, write_atomically
from fedpews.results.links import refuse_links
from fedpews.results.memories import MemoryStore, Store
from fedpews.results.neurons import Ownership
from fedpews.results.records import Record, read_rounds
from fedpews.results.sums import read_sums, sum_of, write_sums

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedpews.trees import Nest, Tree


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        refuse_links(path)
        self._lock = _lock(path)
        for folder in (path, path / layout.CHECKPOINT):
            remove_asides(folder)
        self._rounds: Appended | None = None
        self._neurons: Appended | None = None
        self._before: Contents | None = None  # the last checkpoint, kept beside the next one

    def close(self) -> None:
        for file in (self._rounds, self._neurons):
            if file is not None:
                file.close()
        self._lock.release()

    @property
    def has_run(self) -> bool:
        """Whether there is anything of a run: one that lost its configuration must not be written over either."""
        return layout.is_begun(self.path)

    @property
    def config(self) -> Path:
        return self.path / layout.CONFIG

    def is_intact(self, name: str) -> bool:
        """Whether a file is there as it was written."""
        try:
            expected = read_sums(self.path).get(name)
            data = read_bytes(self.path / name)
        except CheckpointError:
            return False
        return expected is None or sum_of(data) == expected

    def write_config(self, toml: str) -> None:
        """Write the configuration; a summary already there is that of a shorter run, and goes."""
        self._unlist(layout.CONFIG)
        remove_file(self.path / layout.SUMMARY)
        self._write(layout.CONFIG, toml.encode())

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

        files: dict[str, bytes] = {}
        for seed, tree in (best or {}).items():
            files[layout.best_file(seed)] = _tensors(tree)
        for seed, clients in (finetuned or {}).items():
            named = {f"client-{i}/{name}": v for i, tree in clients.items() for name, v in tree.items()}
            files[layout.finetuned_file(seed)] = _tensors(named)
        for seed, tree in params.items():
            files[layout.model_file(seed)] = _tensors(tree)
            if neurons[seed]:
                masks = {f"client-{client}": mask.to(uint8) for client, mask in neurons[seed].items()}
                files[layout.masks_file(seed)] = _tensors(masks)
        # last: a folder with a summary is a finished run, so everything else must be there
        files[layout.SUMMARY] = (json.dumps(summary, indent=2) + "\n").encode()
        for name, data in files.items():
            write_atomically(self.path / name, data)
        listed = {name: sum_of(data) for name, data in files.items()}
        for name in (layout.CONFIG, layout.FEDERATION, layout.ROUNDS, layout.NEURONS):
            if (self.path / name).exists():
                listed[name] = sum_of(read_bytes(self.path / name))
        # what was listed before stays as it was read in: a file that changed since is not to pass
        write_sums(self.path, listed | self._listed())

    def start_rounds(self, checkpoint: Checkpoint | None) -> list[Record]:
        """Open rounds.jsonl and neurons.jsonl, cut back to what the checkpoint knows of; the records that are left."""
        contents = None if checkpoint is None else checkpoint.contents
        self._before = contents
        # before anything is cut: a checkpoint that knows more could not be gone back to any more
        kept = set() if contents is None else {contents.round, *self._earlier(contents)}
        if contents is None or contents.state is not None:
            checkpoints.remove_others(self.path, kept)
        # these grow now, or are written again at the end
        self._unlist(*(self._listed().keys() - {layout.CONFIG, layout.FEDERATION}))
        self._rounds = Appended(self.path / layout.ROUNDS, Mark() if contents is None else contents.rounds)
        self._neurons = Appended(self.path / layout.NEURONS, Mark() if contents is None else contents.neurons)
        return read_rounds(self.path)

    def describe(self, federation: Callable[[bool], Mapping[str, Any]]) -> None:
        """Write who takes part, once; ``federation`` is told whether clients owned neurons in an earlier round."""
        if not self.is_intact(layout.FEDERATION):
            assert self._neurons is not None
            self._unlist(layout.FEDERATION)
            told = federation(self._neurons.mark.size > 0)
            self._write(layout.FEDERATION, (json.dumps(told) + "\n").encode())

    def append(self, records: Sequence[Record], observed: Sequence[Ownership] = ()) -> None:
        assert self._rounds is not None
        assert self._neurons is not None
        # neurons first: a page that reads along never finds a round whose masks are missing
        self._neurons.add("".join(sealed(one.record()) for one in observed))
        self._rounds.add("".join(map(sealed, records)))

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
        # the records must be on disk before a checkpoint that counts their bytes
        self._rounds.sync()
        self._neurons.sync()
        marks = self._rounds.mark, self._neurons.mark
        contents = checkpoints.save(self.path, round, states, best or {}, memories, *marks, about)
        # only now, with two that are whole, may older files go
        kept = {round} | ({self._before.round} if self._before is not None else set())
        checkpoints.remove_others(self.path, kept)
        memories.forget_old()
        self._before = contents

    def load_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None if the run was stopped before its first; says what was not."""
        found = checkpoints.newest(self.path)
        if found is not None and found.wrong:
            logging.getLogger("fedpews").warning(
                "%s; going on from the checkpoint of round %d, which is whole",
                "; ".join(found.wrong),
                found.round,
            )
        return found

    def memory_store(self, device: torch.device | str = "cpu") -> MemoryStore:
        return MemoryStore(self.path / layout.CHECKPOINT / layout.MEMORIES, device)

    def memories_before(self, checkpoint: Checkpoint | None) -> set[str]:
        """The files of clients' memories that the checkpoint before this one needs."""
        if checkpoint is None:
            return set()
        earlier = self._earlier(checkpoint.contents).values()
        return {name for contents in earlier for name in contents.memory_files}

    def _earlier(self, contents: Contents) -> dict[int, Contents]:
        """The checkpoint before, as far as it says what it needs."""
        for round in checkpoints.rounds_of(self.path):
            if round < contents.round:
                try:
                    return {round: checkpoints.read_contents(self.path, round)}
                except CheckpointError:
                    return {}
        return {}

    def _listed(self) -> dict[str, str]:
        try:
            return read_sums(self.path)
        except CheckpointError:
            # whoever reads the files says so; here they are about to be written again
            return {}

    def _unlist(self, *names: str) -> None:
        """Before a file is written again: a kill in between must not make it look damaged."""
        listed = self._listed()
        left = {name: value for name, value in listed.items() if name not in names}
        if not left:
            remove_file(self.path / layout.SUMS)
        elif left != listed:
            write_sums(self.path, left)

    def _write(self, name: str, data: bytes) -> None:
        """Write a file that is not listed, and list it."""
        write_atomically(self.path / name, data)
        write_sums(self.path, self._listed() | {name: sum_of(data)})


def _tensors(tensors: Mapping[str, Tensor]) -> bytes:
    from safetensors.torch import save

    return bytes(save({key: value.contiguous().cpu() for key, value in tensors.items()}))


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
