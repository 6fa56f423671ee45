"""A run on disk: its configuration, a line per seed and round, a summary, models, and the way back in.

Nothing here is ever half written: files appear whole (written aside, then renamed), and ``rounds.jsonl`` is cut
back to the last checkpoint when a killed run goes on.
"""

from __future__ import annotations

import fcntl
import json
import os
import statistics
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import IO, TYPE_CHECKING, Any, Protocol
from urllib.parse import quote, unquote
from weakref import finalize

from fedpews.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor

Record = dict[str, Any]
Nest = dict[str, Any]

HELD_BYTES = 64 * 2**20
"""Clients' memories held in RAM; the others are on disk."""


class Rounds(Sequence[Record]):
    """The records of a run, a table with one row per seed and round.

    >>> Rounds([{"seed": 0, "round": 1, "accuracy": 0.5}]).column("accuracy")
    [0.5]
    """

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        return self._records[index]

    def __repr__(self) -> str:
        last = f", last {self._records[-1]}" if self._records else ""
        return f"<{len(self)} rounds of seeds {self.seeds}{last}>"

    @property
    def seeds(self) -> list[int]:
        return sorted({record["seed"] for record in self._records})

    def of_seed(self, seed: int) -> list[Record]:
        return [record for record in self._records if record["seed"] == seed]

    def column(self, name: str) -> list[Any]:
        return [record[name] for record in self._records]

    def to_pandas(self) -> pd.DataFrame:
        """The same as a DataFrame; needs pandas (``pip install fedpews[pandas]``)."""
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("to_pandas() needs pandas: pip install 'fedpews[pandas]'") from error
        return pd.DataFrame(self._records)


def rounds_to_target(records: Sequence[Record], target: float) -> int | None:
    """The first round whose accuracy reaches the target, or None."""
    return next((record["round"] for record in records if record["accuracy"] >= target), None)


def summarize(records: Sequence[Record], method: str, target: float) -> dict[str, Any]:
    """A run in a few numbers: final accuracy, rounds to the target, totals."""
    rounds = Rounds(records)
    runs = [rounds.of_seed(seed) for seed in rounds.seeds]
    finals = [run[-1]["accuracy"] for run in runs]
    reached = [rounds_to_target(run, target) for run in runs]
    known = [value for value in reached if value is not None]
    everybody = len(known) == len(runs)
    return {
        "method": method,
        "seeds": rounds.seeds,
        "rounds": max((record["round"] for record in records), default=0),
        "target_accuracy": target,
        "final_accuracy": {"mean": _mean(finals), "std": _std(finals), "by_seed": finals},
        "best_accuracy": _mean([max(record["accuracy"] for record in run) for run in runs]),
        # a mean over only those seeds that got there would flatter, so it is null unless all did
        "rounds_to_target": {
            "mean": _mean(known) if everybody else None,
            "std": _std(known) if everybody else None,
            "by_seed": reached,
            "reached": len(known),
        },
        "totals": {
            "bytes_up": sum(record["bytes_up"] for record in records),
            "bytes_down": sum(record["bytes_down"] for record in records),
            "seconds": sum(record["seconds"] for record in records),
        },
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    """Over the runs seen, as papers report it: with n − 1, and 0 for a single run."""
    return None if not values else statistics.stdev(values) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class Checkpoint:
    """Everything a run needs to go on as if nothing had happened."""

    round: int
    states: dict[int, Nest]
    memories: dict[str, int]  # "seed-client" -> the number of its file
    rounds_bytes: int
    about: dict[str, Any]


class Store(Protocol):
    """Clients' memories by seed and client, saved with every checkpoint."""

    def restore(self, versions: Mapping[str, int]) -> None: ...

    def get(self, seed: int, client: int) -> Nest | None: ...

    def put(self, seed: int, client: int, memory: Nest) -> None: ...

    def commit(self, round: int) -> dict[str, int]: ...

    def forget_old(self) -> None: ...


class RunFolder:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(path)
        self._rounds: IO[bytes] | None = None

    def close(self) -> None:
        if self._rounds is not None:
            self._rounds.close()
        self._lock.close()

    @property
    def has_run(self) -> bool:
        return (self.path / "config.toml").exists()

    def write_text(self, name: str, text: str) -> None:
        write_atomically(self.path / name, text.encode())

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save

        write_atomically(
            self.path / name, save({key: value.contiguous().cpu() for key, value in tensors.items()})
        )

    def start_rounds(self, keep: int = 0) -> None:
        """Open rounds.jsonl and cut it back to its first ``keep`` bytes."""
        file = (self.path / "rounds.jsonl").open("ab")
        if file.tell() < keep:
            file.close()
            raise CheckpointError(
                f"{self.path}/rounds.jsonl is shorter than its checkpoint says; it was changed by hand. "
                "Start again in another folder (--out)."
            )
        file.truncate(keep)
        self._rounds = file

    def append(self, records: Sequence[Record]) -> None:
        assert self._rounds is not None
        text = "".join(json.dumps(record, allow_nan=False) + "\n" for record in records)
        self._rounds.write(text.encode())
        self._rounds.flush()

    def read_rounds(self) -> list[Record]:
        return read_rounds(self.path)

    def save_checkpoint(
        self, round: int, states: Mapping[int, Nest], memories: Store, about: Mapping[str, Any]
    ) -> None:
        """Write where the run stands; a kill at any moment leaves this checkpoint or the one before it."""
        assert self._rounds is not None
        folder = self.path / "checkpoint"
        folder.mkdir(exist_ok=True)
        os.fsync(self._rounds.fileno())
        versions = memories.commit(round)
        header = {
            "round": round,
            "rounds_bytes": self._rounds.seek(0, os.SEEK_END),
            "memories": versions,
            "about": dict(about),
        }
        write_nest(folder / "state.safetensors", {str(seed): state for seed, state in states.items()}, header)
        memories.forget_old()

    def load_checkpoint(self) -> Checkpoint | None:
        """The last checkpoint, or None when the run had not come so far."""
        path = self.path / "checkpoint" / "state.safetensors"
        if not path.exists():
            return None
        states, header = read_nest(path)
        try:
            return Checkpoint(
                round=int(header["round"]),
                states={int(seed): state for seed, state in states.items()},
                memories=dict(header["memories"]),
                rounds_bytes=int(header["rounds_bytes"]),
                about=dict(header["about"]),
            )
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged ({error}). Start again in another folder (--out)."
            ) from error

    def memory_store(self) -> MemoryStore:
        return MemoryStore(self.path / "checkpoint" / "clients")


class MemoryStore:
    """Clients' memories by seed and client: the recent ones in RAM, the others on disk.

    RAM holds ``HELD_BYTES`` at most, so it does not grow with the number of clients. Every write makes a new
    file; those of the last checkpoint stay until the next one is complete. Without a folder, what is too much
    for RAM goes to a temporary one.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._held: OrderedDict[str, Nest] = OrderedDict()  # the least recent first
        self._sizes: dict[str, int] = {}  # of those held, in bytes
        self._bytes = 0
        self._unsaved: dict[str, None] = {}  # keys held whose file is missing or out of date; an ordered set
        self._versions: dict[str, int] = {}  # key -> the number of its file
        self._last = 0  # the highest of these numbers so far
        self._checkpoint: dict[str, int] = {}  # the versions that the last checkpoint needs
        self._old: list[Path] = []  # files to delete once the next checkpoint is there

    def restore(self, versions: Mapping[str, int]) -> None:
        """Go on from a checkpoint: files newer than it never happened."""
        self._versions, self._checkpoint = dict(versions), dict(versions)
        self._last = max(versions.values(), default=0)
        if self._folder is not None and self._folder.exists():
            known = {self._path(key, number) for key, number in self._versions.items()}
            for path in self._folder.iterdir():
                if path not in known:
                    path.unlink()

    def get(self, seed: int, client: int) -> Nest | None:
        key = f"{seed}-{client}"
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if key not in self._versions:
            return None
        memory, _ = read_nest(self._path(key, self._versions[key]))
        self._hold(key, memory)
        return memory

    def put(self, seed: int, client: int, memory: Nest) -> None:
        """Keep a client's memory; one without a single tensor is the same as none."""
        key = f"{seed}-{client}"
        self._release(key)
        self._discard_file(key)
        if any(True for _ in leaves(memory)):
            self._unsaved[key] = None
            self._hold(key, memory)

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

    def _hold(self, key: str, memory: Nest) -> None:
        size = sum(leaf.numel() * leaf.element_size() for _, leaf in leaves(memory))
        self._held[key], self._sizes[key] = memory, size
        self._bytes += size
        while self._bytes > HELD_BYTES and len(self._held) > 1:
            oldest = next(iter(self._held))
            if oldest in self._unsaved:
                self._write(oldest)
            self._release(oldest)

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
        if self._checkpoint.get(key) == number:
            self._old.append(self._path(key, number))
        else:
            self._path(key, number).unlink(missing_ok=True)

    def _path(self, key: str, number: int) -> Path:
        if self._folder is None:
            self._folder = Path(mkdtemp(prefix="fedpews-"))
            finalize(self, rmtree, self._folder, ignore_errors=True)
        return self._folder / f"{key}-{number}.safetensors"


def leaves(nest: Nest, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested dict with its path."""
    for key, value in nest.items():
        path = f"{prefix}{quote(str(key), safe='')}"
        if isinstance(value, dict):
            yield from leaves(value, f"{path}/")
        else:
            yield path, value


def _empties(nest: Nest, prefix: str = "") -> Iterator[str]:
    for key, value in nest.items():
        path = f"{prefix}{quote(str(key), safe='')}"
        if value == {}:
            yield path
        elif isinstance(value, dict):
            yield from _empties(value, f"{path}/")


def write_nest(path: Path, nest: Nest, header: Mapping[str, Any]) -> None:
    """A nested dict of tensors as one safetensors file."""
    from safetensors.torch import save

    tensors = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in leaves(nest)}
    about = json.dumps({"header": dict(header), "empty": list(_empties(nest))})
    write_atomically(path, save(tensors, {"about": about}))


def read_nest(path: Path) -> tuple[Nest, dict[str, Any]]:
    """The inverse of ``write_nest``; a file that is not whole is a CheckpointError."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        nest: Nest = {}
        for name, value in [*tensors.items(), *((name, {}) for name in about["empty"])]:
            *parents, last = map(unquote, name.split("/"))
            place = nest
            for parent in parents:
                place = place.setdefault(parent, {})
            place[last] = value
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is missing or damaged ({error}). Start again in another folder (--out)."
        ) from error
    return nest, about["header"]


def write_atomically(path: Path, data: bytes) -> None:
    """A file appears whole or not at all, also when the machine goes down."""
    aside = path.with_name(f".{path.name}.new")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def read_rounds(path: Path) -> list[Record]:
    """The records of a run's folder; a last line cut off by a kill is left out."""
    file = path / "rounds.jsonl"
    if not file.exists():
        raise ConfigError(f"{path} holds no run: there is no rounds.jsonl in it")
    lines = file.read_text().split("\n")[:-1]  # what follows the last line's end is not a whole line
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is damaged: {error}") from error


def _lock(path: Path) -> IO[str]:
    """Hold the folder for this process. The system lets go of it even after kill -9."""
    file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ConfigError(
            f"{path} is in use by another run; wait for it or give another folder (--out)"
        ) from error
    return file
