"""Run what is missing of a cell, and read back what is there. A cell's runs are ordinary run folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedpews.errors import ConfigError, DataMissing, FedpewsError, Interrupted
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.results.records import Record, Rounds, read_rounds
from fedpews.studies.study import Cell, with_seeds

if TYPE_CHECKING:
    from fedpews.running import Watcher

MakeWatcher = Callable[[Experiment], AbstractContextManager["Watcher"]]
"""Who looks on while an experiment runs, for as long as it does."""


@dataclass(frozen=True)
class Found:
    """What is on disk of a cell."""

    cell: Cell
    runs: dict[int, list[Record]] = field(default_factory=dict)  # finished seeds
    status: str = "not run"  # done, part done, data missing, failed, not run
    message: str = ""
    folders: tuple[Path, ...] = ()

    @property
    def missing(self) -> list[int]:
        return [seed for seed in self.cell.experiment.seeds if seed not in self.runs]

    @property
    def seconds(self) -> float:
        return float(sum(record["seconds"] for run in self.runs.values() for record in run))


def read_cell(root: Path, cell: Cell, status: str = "", message: str = "") -> Found:
    """The finished seeds of a cell, of those that are asked for."""
    runs: dict[int, list[Record]] = {}
    folders = []
    for folder in _folders(root, cell):
        if not layout.is_finished(folder):
            continue
        records = Rounds(_with_activations(folder, read_rounds(folder)))
        wanted = [seed for seed in records.seeds if seed in cell.experiment.seeds and seed not in runs]
        runs |= {seed: records.of_seed(seed) for seed in wanted}
        folders += [folder] if wanted else []
    if not status:
        complete = set(runs) >= set(cell.experiment.seeds)
        status = "done" if complete else "part done" if runs else "not run"
    return Found(cell, dict(sorted(runs.items())), status, message, tuple(folders))


def run_cell(root: Path, cell: Cell, data_dir: Path | None, watch: MakeWatcher | None = None) -> Found:
    """Finish a cell: go on with runs that were stopped, then start the seeds that nobody has begun.

    What cannot be run is said in the result, so that the other cells still run; only an interruption ends it all.
    """
    found = read_cell(root, cell)
    try:
        for folder in _folders(root, cell):
            begun = Experiment.load(folder / layout.CONFIG).seeds
            if set(begun) & set(found.missing):
                _run(folder, with_seeds(cell, begun), data_dir, watch)
                found = read_cell(root, cell)
        if found.missing:
            name = "seeds-" + "-".join(map(str, found.missing))
            _run(root / "runs" / cell.name / name, with_seeds(cell, found.missing), data_dir, watch)
    except Interrupted:
        raise
    except DataMissing as error:
        return read_cell(root, cell, "data missing", str(error))
    except FedpewsError as error:
        return read_cell(root, cell, "failed", str(error))
    except Exception as error:  # noqa: BLE001 - days of other cells may wait behind this one
        return read_cell(root, cell, "failed", f"{type(error).__name__}: {error}")
    return read_cell(root, cell)


def _run(folder: Path, cell: Cell, data_dir: Path | None, watch: MakeWatcher | None) -> None:
    from fedpews.running import Watcher, run

    with watch(cell.experiment) if watch else nullcontext(Watcher()) as watcher:
        if cell.probe == "activations":
            from fedpews.studies.activations import watch_activations

            watcher = watch_activations(watcher, cell.experiment, folder, data_dir)
        elif cell.probe is not None:
            raise ConfigError(f"there is no probe {cell.probe!r}; there is activations")
        run(cell.experiment, out=folder, resume=True, data_dir=data_dir, watcher=watcher)


def _folders(root: Path, cell: Cell) -> list[Path]:
    """The run folders of a cell; what else lies at its place is left alone."""
    places = sorted(path.parent for path in (root / "runs" / cell.name).glob(f"*/{layout.CONFIG}"))
    return [place for place in places if _is_run_of(place, cell)]


def _is_run_of(folder: Path, cell: Cell) -> bool:
    try:
        return cell.is_run_by(Experiment.load(folder / layout.CONFIG))
    except ConfigError:  # of another version
        return False


def _with_activations(folder: Path, records: list[Record]) -> list[Record]:
    file = folder / layout.ACTIVATIONS
    if not file.exists():
        return records
    lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
    extra = {(line["seed"], line["round"]): line for line in lines}  # a resumed round is there twice, equally
    return [record | extra.get((record["seed"], record["round"]), {}) for record in records]
