"""Run what is missing of a cell, and read back what is there. A cell's runs are ordinary run folders."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fedpews.errors import (
    ClientDiverged,
    ConfigError,
    DataMissing,
    FedpewsError,
    FolderInUse,
    Interrupted,
    RunFailed,
    first_line,
)
from fedpews.experiment import Experiment
from fedpews.results import layout
from fedpews.results.records import Record, Rounds, read_rounds
from fedpews.results.schema import ActivationShape, read_lines, read_summary
from fedpews.paper.published import read_facts, read_published
from fedpews.paper.study import Cell, on_draw

if TYPE_CHECKING:
    from fedpews.running import Watcher

MakeWatcher = Callable[[Experiment], AbstractContextManager["Watcher"]]
"""Who looks on while an experiment runs, for as long as it does."""

Job = tuple[str, Cell]
"""A cell to run, and what a person calls it."""


@dataclass(frozen=True)
class Found:
    """What is on disk of a cell."""

    cell: Cell
    runs: dict[int, list[Record]] = field(default_factory=dict)  # finished seeds
    status: str = "not run"  # done, part done, diverged, data missing, busy, failed, not run
    message: str = ""
    error: str = ""
    """The kind of error that ended it, as its class is called."""
    folders: tuple[Path, ...] = ()
    machines: tuple[str, ...] = ()
    """What its runs were trained on; empty where that was not recorded."""

    @property
    def missing(self) -> list[int]:
        return [seed for seed in self.cell.experiment.seeds if seed not in self.runs]

    @property
    def seconds(self) -> float:
        return float(sum(record["seconds"] for run in self.runs.values() for record in run))


RunCells = Callable[[Sequence[Job]], Iterable[Found]]
"""Runs cells, here or elsewhere, and hands back each one as it ends, in any order."""


def read_cell(root: Path, cell: Cell, published: Path | None = None) -> Found:
    """The finished seeds of a cell, of those that are asked for: run folders, then what was published."""
    runs: dict[int, list[Record]] = {}
    folders = []
    # what broke down has no summary, so only its published file knows
    why, machines = read_facts(published, cell)
    for folder in _folders(root, cell):
        if not layout.is_finished(folder):
            continue
        records = Rounds(_with_activations(folder, read_rounds(folder)))
        # a folder counts only for seeds that belong to its draw of the data
        draw = Experiment.load(folder / layout.CONFIG).data.seed
        asked = [seed for seed in cell.experiment.seeds if cell.draw(seed) == draw]
        wanted = [seed for seed in records.seeds if seed in asked and seed not in runs]
        runs |= {seed: records.of_seed(seed) for seed in wanted}
        if wanted:
            folders.append(folder)
            machines += read_summary(folder / layout.SUMMARY).get("machines", [])
    # a run of this machine goes before one that was published
    runs = {**read_published(published, cell), **runs}
    complete = set(runs) >= set(cell.experiment.seeds)
    status = "done" if complete else "part done" if runs else "not run"
    why = "" if complete else why
    return Found(
        cell,
        dict(sorted(runs.items())),
        "diverged" if why else status,
        why,
        folders=tuple(folders),
        machines=tuple(dict.fromkeys(machines)),
    )


def run_cell(
    root: Path,
    cell: Cell,
    data_dir: Path | None,
    watch: MakeWatcher | None = None,
    published: Path | None = None,
) -> Found:
    """Finish a cell: go on with runs that were stopped, then start the seeds that were not begun.

    What cannot be run is said in the result, so that the other cells still run; only an interruption ends it all.
    """
    found = read_cell(root, cell, published)
    try:
        for folder in _folders(root, cell):
            begun = Experiment.load(folder / layout.CONFIG)
            wanted = {seed for seed in found.missing if cell.draw(seed) == begun.data.seed}
            if set(begun.seeds) & wanted:
                _run(folder, cell, on_draw(cell, begun.seeds, begun.data.seed), data_dir, watch)
                found = read_cell(root, cell, published)
        # seeds on the same draw of the data share a run, and with it the loading and compiling
        for draw in sorted({cell.draw(seed) for seed in found.missing}):
            seeds = [seed for seed in found.missing if cell.draw(seed) == draw]
            name = "-".join([f"draw-{draw}"] * (cell.draws > 1) + ["seeds", *map(str, seeds)])
            _run(root / "runs" / cell.name / name, cell, on_draw(cell, seeds, draw), data_dir, watch)
    except Interrupted:
        raise
    except DataMissing as error:
        return _ended(read_cell(root, cell, published), "data missing", str(error), error)
    except FolderInUse as error:
        now = read_cell(root, cell, published)
        # it may have come to its end in the meantime
        return _ended(now, "busy", "another process is at it", error) if now.missing else now
    except RunFailed as error:
        now = read_cell(root, cell, published)
        if isinstance(error.__cause__, ClientDiverged):
            # that is a result; the folder that its own message goes on to name is nobody else's
            return _ended(now, "diverged", str(error.__cause__), error)
        return _ended(now, "failed", str(error), error)
    except FedpewsError as error:
        return _ended(read_cell(root, cell, published), "failed", str(error), error)
    except Exception as error:  # noqa: BLE001 - days of other cells may wait behind this one
        return _ended(read_cell(root, cell, published), "failed", first_line(error), error)
    return read_cell(root, cell, published)


def _ended(found: Found, status: str, message: str, error: Exception) -> Found:
    return replace(found, status=status, message=message, error=type(error).__name__)


def _run(
    folder: Path, cell: Cell, experiment: Experiment, data_dir: Path | None, watch: MakeWatcher | None
) -> None:
    # imported late: reading results must not import torch
    from fedpews.running import Watcher, run

    with watch(experiment) if watch else nullcontext(Watcher()) as watcher:
        if cell.probe == "activations":
            from fedpews.paper.activations import watch_activations

            watcher = watch_activations(watcher, experiment, folder, data_dir)
        elif cell.probe is not None:
            raise ConfigError(f"there is no probe {cell.probe!r}; there is activations")
        run(experiment, out=folder, resume=True, data_dir=data_dir, watcher=watcher)


def _folders(root: Path, cell: Cell) -> list[Path]:
    """The run folders of a cell; anything else in its folder is left alone."""
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
    # what follows the last newline is a line that a kill left half written
    lines = read_lines(file, ActivationShape)
    # a resumed round is there twice, with the same numbers
    extra = {(line["seed"], line["round"]): line for line in lines}
    return [record | extra.get((record["seed"], record["round"]), {}) for record in records]
