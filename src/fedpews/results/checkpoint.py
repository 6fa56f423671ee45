"""Checkpoints. Two are kept, so that the earlier one can be used if the newer one is damaged.

``round-N.json`` holds the digests of all files that the checkpoint of round N needs, and its own. It is written last.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import CheckpointError
from fedpews.outside import json_lines
from fedpews.results import layout
from fedpews.results.files import (
    digest,
    matching,
    read_bytes,
    read_nest,
    remove_file,
    sync,
    write_atomically,
    write_nest,
)
from fedpews.results.memories import Version, file_name

if TYPE_CHECKING:
    from fedpews.trees import Nest, Tree

_BEST = "best"
"""The key of the best models in the file of states, beside the seeds."""

_NAMES = re.compile(r"round-(\d{1,9})\.json|state-(\d{1,9})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to continue as if it had not stopped; ``round-N.json`` has all but the tensors."""

    round: int
    state: str
    """The digest of the file of states."""
    growing: dict[str, str]
    """The digests of rounds.jsonl and neurons.jsonl up to this round."""
    memories: dict[str, Version]
    """By "seed-client"."""
    about: dict[str, Any]
    states: dict[int, Nest] = field(default_factory=dict)
    best: dict[int, Tree] = field(default_factory=dict)
    """The best model of each seed so far, if the run keeps it."""

    @property
    def memory_files(self) -> dict[str, str]:
        """The digests of the files of clients' memories, by name; none if the memories are at sites."""
        return {file_name(key, v.number): v.digest for key, v in self.memories.items() if v.digest}


def save(run: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Write a checkpoint beside the others; a kill at any moment leaves all of it or nothing.

    The memories must be on disk already. Returned without its tensors, and with the digest of their file.
    """
    folder = run / layout.CHECKPOINT
    folder.mkdir(exist_ok=True)
    nest: Nest = {str(seed): state for seed, state in checkpoint.states.items()}
    if checkpoint.best:
        nest[_BEST] = {str(seed): tree for seed, tree in checkpoint.best.items()}
    state = write_nest(folder / layout.STATE.format(checkpoint.round), nest, {"round": checkpoint.round})
    saved = replace(checkpoint, state=state, states={}, best={})
    text = json.dumps({key: value for key, value in vars(saved).items() if key not in ("states", "best")})
    whole = f'{{"digest": "{digest(text.encode())}", "checkpoint": {text}}}\n'
    write_atomically(folder / layout.CONTENTS.format(checkpoint.round), whole.encode())
    return saved


def remove_others(run: Path, kept: Collection[int]) -> None:
    """Delete the checkpoints of all rounds but these."""
    folder = run / layout.CHECKPOINT
    if not folder.is_dir():
        return
    # the file that names others is deleted before them
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix != ".json"):
        match = _NAMES.fullmatch(path.name)
        if match is not None and int(match[1] or match[2]) not in kept:
            remove_file(path)
    sync(folder)


def newest(run: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if the run has none; logs which ones are damaged."""
    damaged: list[str] = []
    for round in rounds(run):
        try:
            checkpoint = _read(run, read_contents(run, round))
        except CheckpointError as error:
            damaged.append(str(error))
            continue
        if damaged:
            logging.getLogger("fedpews").warning(
                "%s; going on from the checkpoint of round %d, which is whole", "; ".join(damaged), round
            )
        return checkpoint
    if damaged:
        raise CheckpointError(
            f"no checkpoint is whole: {'; '.join(damaged)}. Start again in another folder (--out)."
        )
    return None


def rounds(run: Path) -> list[int]:
    """The rounds that have a checkpoint, the newest first."""
    folder = run / layout.CHECKPOINT
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise CheckpointError(f"{folder} is not a folder. Start again in another folder (--out).")
        return []
    matches = (_NAMES.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match is not None and match[1]), reverse=True)


def read_contents(run: Path, round: int) -> Checkpoint:
    """A checkpoint without its tensors; a damaged ``round-N.json`` is a CheckpointError."""
    path = run / layout.CHECKPOINT / layout.CONTENTS.format(round)
    try:
        whole = json.loads(read_bytes(path))
        body = whole["checkpoint"]
        if digest(json.dumps(body).encode()) != whole["digest"] or body["round"] != round:
            raise CheckpointError(f"{path} is damaged: it does not match its digest")
        memories = {key: Version(*version) for key, version in body["memories"].items()}
        return Checkpoint(**body | {"memories": memories})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error


def _read(run: Path, checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint with its tensors; every file it needs is verified."""
    folder = run / layout.CHECKPOINT
    _check_rounds(checkpoint, read_growing(run, layout.ROUNDS, checkpoint), run / layout.ROUNDS)
    read_growing(run, layout.NEURONS, checkpoint)
    for name, expected in checkpoint.memory_files.items():
        path = folder / layout.MEMORIES / name
        if digest(read_bytes(path)) != expected:
            raise CheckpointError(f"{path} is damaged: it does not match its digest")
    path = folder / layout.STATE.format(checkpoint.round)
    nest, _ = read_nest(path, expected=checkpoint.state)
    try:
        best = {int(seed): tree for seed, tree in nest.pop(_BEST, {}).items()}
        states = {int(seed): state for seed, state in nest.items()}
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error
    return replace(checkpoint, states=states, best=best)


def read_growing(run: Path, name: str, checkpoint: Checkpoint | None) -> bytes:
    """The lines of a growing file that a checkpoint knows; nothing without a checkpoint."""
    if checkpoint is None:
        return b""
    data = matching(read_bytes(run / name), checkpoint.growing[name], name)
    if data is None:
        raise CheckpointError(f"{run / name} is not what its checkpoint says: it was changed")
    return data


def _check_rounds(checkpoint: Checkpoint, lines: bytes, path: Path) -> None:
    """The records must end with the checkpoint's round."""
    records = [record for _, record in json_lines(lines.decode(), str(path))]
    last = max((int(record["round"]) for record in records), default=0)
    if last != checkpoint.round:
        raise CheckpointError(
            f"{path} ends with round {last}, and the checkpoint is that of round {checkpoint.round}"
        )
