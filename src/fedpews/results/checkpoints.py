"""Checkpoints: two at a time, every file of them digested, so that damage is found and the earlier one steps in.

``round-N.json`` names the files of round N's checkpoint with their digests, and carries its own; it is written last.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import CheckpointError
from fedpews.results import layout
from fedpews.results.appended import Mark
from fedpews.results.files import digest, read_bytes, sync_folder, unsealed, write_atomically
from fedpews.results.memories import Store, file_name
from fedpews.results.nests import read_nest, write_nest

if TYPE_CHECKING:
    from fedpews.trees import Nest, Tree

_BEST = "best"
"""In the file of states, beside the seeds'."""

_NAMES = re.compile(r"round-(\d{1,9})\.json|state-(\d{1,9})\.safetensors|state\.safetensors")


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says of itself, before any of its tensors is read."""

    round: int
    state: str | None
    """The digest of the file of states; None in checkpoints of earlier versions."""
    memories: dict[str, int]
    """"seed-client" -> the number of its file."""
    digests: dict[str, str]
    """"seed-client" -> the digest of its file; empty where the memories are not here."""
    rounds: Mark
    neurons: Mark
    about: dict[str, Any]

    @property
    def memory_files(self) -> set[str]:
        return {file_name(key, number) for key, number in self.memories.items()}


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if nothing had happened."""

    contents: Contents
    states: dict[int, Nest]
    best: dict[int, Tree] = field(default_factory=dict)
    """Each seed's best model so far, of a run that keeps it."""
    wrong: tuple[str, ...] = ()
    """What was found damaged before this one, an earlier one, turned out to be whole."""

    @property
    def round(self) -> int:
        return self.contents.round

    @property
    def about(self) -> dict[str, Any]:
        return self.contents.about


def save(
    run: Path,
    round: int,
    states: Mapping[int, Nest],
    best: Mapping[int, Tree],
    memories: Store,
    rounds: Mark,
    neurons: Mark,
    about: Mapping[str, Any],
) -> Contents:
    """Write a checkpoint beside those that are there; a kill at any moment leaves it whole or not at all."""
    folder = run / layout.CHECKPOINT
    folder.mkdir(exist_ok=True)
    # the memories must be on disk before the file that names them
    versions, digests = memories.commit(round)
    nest: Nest = {str(seed): state for seed, state in states.items()}
    if best:
        nest[_BEST] = {str(seed): tree for seed, tree in best.items()}
    found = write_nest(folder / layout.state_file(round), nest, {"round": round})
    body = {
        "round": round,
        "state": found,
        "rounds": [rounds.size, rounds.digest],
        "neurons": [neurons.size, neurons.digest],
        "memories": versions,
        "digests": digests,
        "about": dict(about),
    }
    text = json.dumps(body)
    whole = f'{{"digest": "{digest(text.encode())}", "checkpoint": {text}}}\n'
    write_atomically(folder / layout.contents_file(round), whole.encode())
    return _contents(body)


def remove_others(run: Path, kept: set[int]) -> None:
    """Delete the checkpoints of all rounds but these, and nothing that is not a checkpoint's."""
    folder = run / layout.CHECKPOINT
    if not folder.is_dir():
        return
    # what names files goes before the files
    for path in sorted(folder.iterdir(), key=lambda path: path.suffix != ".json"):
        match = _NAMES.fullmatch(path.name)
        if match is not None and (match[1] or match[2] or "") not in map(str, kept):
            if path.is_dir() and not path.is_symlink():
                # not ours, whatever its name
                continue
            path.unlink(missing_ok=True)
    sync_folder(folder)


def newest(run: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if the run was stopped before its first."""
    wrong: list[str] = []
    for round in rounds_of(run):
        try:
            contents = read_contents(run, round)
            return _read(run, contents, (*wrong,))
        except CheckpointError as error:
            wrong.append(str(error))
    old = run / layout.CHECKPOINT / layout.STATE
    if old.exists():
        return _read_first_layout(run, old)
    if wrong:
        raise CheckpointError(
            f"no checkpoint is whole: {'; '.join(wrong)}. Start again in another folder (--out)."
        )
    return None


def rounds_of(run: Path) -> list[int]:
    """The rounds that have a checkpoint, the newest first."""
    folder = run / layout.CHECKPOINT
    if not folder.is_dir():
        if folder.exists() or folder.is_symlink():
            raise CheckpointError(f"{folder} is not a folder. Start again in another folder (--out).")
        return []
    found = (_NAMES.fullmatch(path.name) for path in folder.iterdir())
    return sorted((int(match[1]) for match in found if match is not None and match[1]), reverse=True)


def read_contents(run: Path, round: int) -> Contents:
    """What round's checkpoint says of itself; one that is damaged is a CheckpointError."""
    path = run / layout.CHECKPOINT / layout.contents_file(round)
    try:
        whole = json.loads(read_bytes(path))
        body = whole["checkpoint"]
        if digest(json.dumps(body).encode()) != whole["digest"] or body["round"] != round:
            raise CheckpointError(f"{path} is damaged: it does not give its digest")
        return _contents(body)
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged ({error})") from error


def known_marks(run: Path) -> tuple[Mark, Mark]:
    """How much of rounds.jsonl and neurons.jsonl the newest readable checkpoint vouches for."""
    try:
        found = rounds_of(run)
    except CheckpointError:
        found = []
    for round in found:
        try:
            contents = read_contents(run, round)
            return contents.rounds, contents.neurons
        except CheckpointError:
            # readers need no checkpoint; one that is damaged only vouches for nothing
            continue
    return Mark(), Mark()


def _contents(body: Mapping[str, Any]) -> Contents:
    return Contents(
        round=int(body["round"]),
        state=str(body["state"]),
        memories={str(key): int(number) for key, number in body["memories"].items()},
        digests=dict(body["digests"]),
        rounds=Mark(*body["rounds"]),
        neurons=Mark(*body["neurons"]),
        about=dict(body["about"]),
    )


def _read(run: Path, contents: Contents, wrong: tuple[str, ...] = ()) -> Checkpoint:
    """A checkpoint with everything it names, each file checked."""
    folder = run / layout.CHECKPOINT
    _check_records(run, contents)
    contents.neurons.check(run / layout.NEURONS)
    for key, expected in contents.digests.items():
        path = folder / layout.MEMORIES / file_name(key, contents.memories[key])
        if digest(read_bytes(path)) != expected:
            raise CheckpointError(f"{path} is damaged: it does not give its digest")
    path = folder / layout.state_file(contents.round)
    nest, header = read_nest(path, expected=contents.state)
    if header.get("round") != contents.round:
        raise CheckpointError(f"{path} is that of round {header.get('round')}")
    return _checkpoint(contents, nest, wrong)


def _check_records(run: Path, contents: Contents) -> None:
    """The records must be those that the checkpoint was made after."""
    path = run / layout.ROUNDS
    contents.rounds.check(path)
    records = unsealed(read_bytes(path)[: contents.rounds.size], path) if contents.rounds.size else []
    last = max((int(record.get("round", 0)) for record in records), default=0)
    # among sites, the last round's record waits for its evaluation
    waiting = max((int(record["round"]) for record in contents.about.get("pending", [])), default=0)
    if max(last, waiting) != contents.round:
        raise CheckpointError(
            f"{path} ends with round {last}, and the checkpoint is that of round {contents.round}"
        )


def _checkpoint(contents: Contents, nest: Nest, wrong: tuple[str, ...] = ()) -> Checkpoint:
    best = nest.pop(_BEST, {})
    try:
        return Checkpoint(
            contents,
            {int(seed): state for seed, state in nest.items()},
            {int(seed): tree for seed, tree in best.items()},
            wrong,
        )
    except ValueError as error:
        raise CheckpointError(f"the states are damaged ({error})") from error


def _read_first_layout(run: Path, path: Path) -> Checkpoint:
    """A checkpoint of the versions that kept a single one, without digests."""
    nest, header = read_nest(path)
    try:
        contents = Contents(
            round=int(header["round"]),
            state=None,
            memories={str(key): int(number) for key, number in header["memories"].items()},
            digests={},
            rounds=Mark(int(header["rounds_bytes"])),
            # those of the very first versions have none
            neurons=Mark(int(header.get("neurons_bytes", 0))),
            about=dict(header["about"]),
        )
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). Start again in another folder (--out)."
        ) from error
    _check_records(run, contents)
    contents.neurons.check(run / layout.NEURONS)
    return _checkpoint(contents, nest)
