"""Checkpoints. Two are kept, so that the earlier one can be used if the newer one is damaged.

``round-N.json`` holds the digests of all files that the checkpoint of round N needs, and its own. It is written last.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import CheckpointError
from fedpews.outside import json_lines
from fedpews.results import layout
from fedpews.results.files import digest, matching, read_bytes, remove_file, sync_folder, write_atomically
from fedpews.results.memories import Store, Version, file_name
from fedpews.results.tensors import read_nest, write_nest

if TYPE_CHECKING:
    from fedpews.trees import Nest, Tree

_BEST = "best"
"""The key of the best models in the file of states, beside the seeds."""

_NAMES = re.compile(r"round-(\d{1,9})\.json|state-(\d{1,9})\.safetensors")


@dataclass(frozen=True)
class Contents:
    """What ``round-N.json`` says."""

    round: int
    state: str
    """The digest of the file of states."""
    growing: dict[str, str]
    """The digests of rounds.jsonl and neurons.jsonl up to this round."""
    memories: dict[str, Version]
    """By "seed-client"."""
    about: dict[str, Any]

    @property
    def memory_files(self) -> dict[str, str]:
        """The digests of the files of clients' memories, by name; none if the memories are at sites."""
        return {file_name(key, v.number): v.digest for key, v in self.memories.items() if v.digest}


@dataclass(frozen=True)
class Checkpoint(Contents):
    """Everything a run needs to continue as if it had not stopped."""

    states: dict[int, Nest]
    best: dict[int, Tree] = field(default_factory=dict)
    """The best model of each seed so far, if the run keeps it."""


def save(
    run: Path,
    round: int,
    states: Mapping[int, Nest],
    best: Mapping[int, Tree],
    memories: Store,
    growing: Mapping[str, str],
    about: Mapping[str, Any],
) -> Contents:
    """Write a checkpoint beside the others; a kill at any moment leaves all of it or nothing."""
    folder = run / layout.CHECKPOINT
    folder.mkdir(exist_ok=True)
    # the memories must be on disk before the file that names them
    versions = memories.commit()
    nest: Nest = {str(seed): state for seed, state in states.items()}
    if best:
        nest[_BEST] = {str(seed): tree for seed, tree in best.items()}
    state = write_nest(folder / layout.STATE.format(round), nest, {"round": round})
    contents = Contents(round, state, dict(growing), versions, dict(about))
    text = json.dumps(vars(contents))
    whole = f'{{"digest": "{digest(text.encode())}", "checkpoint": {text}}}\n'
    write_atomically(folder / layout.CONTENTS.format(round), whole.encode())
    return contents


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
    sync_folder(folder)


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


def before(run: Path, round: int) -> list[Contents]:
    """The contents of the checkpoint before a round's, if there is one and it can be read."""
    earlier = [other for other in rounds(run) if other < round]
    try:
        return [read_contents(run, other) for other in earlier[:1]]
    except CheckpointError:
        return []


def rounds(run: Path) -> list[int]:
    """The rounds that have a checkpoint, the newest first."""
    folder = run / layout.CHECKPOINT
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise CheckpointError(f"{folder} is not a folder. Start again in another folder (--out).")
        return []
    matches = (_NAMES.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in matches if match is not None and match[1]), reverse=True)


def read_contents(run: Path, round: int) -> Contents:
    """What ``round-N.json`` says; a damaged file is a CheckpointError."""
    path = run / layout.CHECKPOINT / layout.CONTENTS.format(round)
    try:
        whole = json.loads(read_bytes(path))
        body = whole["checkpoint"]
        if digest(json.dumps(body).encode()) != whole["digest"] or body["round"] != round:
            raise CheckpointError(f"{path} is damaged: it does not match its digest")
        memories = {key: Version(*version) for key, version in body["memories"].items()}
        return Contents(**body | {"memories": memories})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error


def _read(run: Path, contents: Contents) -> Checkpoint:
    """A checkpoint with its states; every file it needs is verified."""
    folder = run / layout.CHECKPOINT
    _check_rounds(contents, read_growing(run, layout.ROUNDS, contents), run / layout.ROUNDS)
    read_growing(run, layout.NEURONS, contents)
    for name, expected in contents.memory_files.items():
        path = folder / layout.MEMORIES / name
        if digest(read_bytes(path)) != expected:
            raise CheckpointError(f"{path} is damaged: it does not match its digest")
    path = folder / layout.STATE.format(contents.round)
    nest, header = read_nest(path, expected=contents.state)
    if header.get("round") != contents.round:
        raise CheckpointError(f"{path} is that of round {header.get('round')}")
    best = nest.pop(_BEST, {})
    try:
        return Checkpoint(
            **vars(contents),
            states={int(seed): state for seed, state in nest.items()},
            best={int(seed): tree for seed, tree in best.items()},
        )
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error


def read_growing(run: Path, name: str, contents: Contents | None) -> bytes:
    """The lines of a growing file that a checkpoint knows; nothing without a checkpoint."""
    if contents is None:
        return b""
    data = matching(read_bytes(run / name), contents.growing[name], name)
    if data is None:
        raise CheckpointError(f"{run / name} is not what its checkpoint says: it was changed")
    return data


def _check_rounds(contents: Contents, lines: bytes, path: Path) -> None:
    """The records must end with the checkpoint's round."""
    records = [record for _, record in json_lines(lines.decode(), str(path))]
    last = max((int(record["round"]) for record in records), default=0)
    # across sites, the last round's record waits for its evaluation
    waiting = max((int(record["round"]) for record in contents.about.get("pending", [])), default=0)
    if max(last, waiting) != contents.round:
        raise CheckpointError(
            f"{path} ends with round {last}, and the checkpoint is that of round {contents.round}"
        )
