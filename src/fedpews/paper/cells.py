"""Run what is missing of a cell, and read what is on disk. A cell's runs are ordinary run folders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from fedpews.errors import (
    ClientDiverged,
    ConfigError,
    DataMissing,
    FedpewsError,
    FolderInUse,
    Interrupted,
    first_line,
)
from fedpews.experiment import Experiment
from fedpews.paper.published import read_published
from fedpews.paper.study import Cell
from fedpews.results import layout
from fedpews.results.records import Record, Rounds, read_rounds
from fedpews.results.schema import ActivationShape, read_lines, read_summary

if TYPE_CHECKING:
    from fedpews.callbacks import Callback

NOT_RUN = "not run"
"""The status of a cell of which no seed has finished."""


@dataclass(frozen=True)
class CellResult:
    """The finished runs of a cell, and how it ended."""

    cell: Cell
    runs: dict[int, list[Record]] = field(default_factory=dict)  # finished seeds
    status: str = NOT_RUN  # done, part done, diverged, data missing, busy, stopped, failed, not run
    message: str = ""
    folders: tuple[Path, ...] = ()
    machines: tuple[str, ...] = ()
    """The machines of its runs, where they were recorded."""

    @property
    def missing(self) -> list[int]:
        return [seed for seed in self.cell.experiment.seeds if seed not in self.runs]

    @property
    def records(self) -> list[Record]:
        return [record for run in self.runs.values() for record in run]


@dataclass(frozen=True)
class Runner:
    """Runs cells in this process, and reads them.

    Args:
        root: the folder whose ``runs`` holds the run folders.
        published: a folder with runs in compact form, read where there is no run folder.
    """

    root: Path
    published: Path | None = None
    data_dir: Path | None = None
    callbacks: Sequence[Callback] = ()
    progress: Callable[[Experiment], AbstractContextManager[Callback | None]] = lambda _: nullcontext()
    """The callback of a progress bar, which is shown for as long as a run goes on."""
    log: Callable[[str], None] = lambda text: None

    def read(self, cell: Cell) -> CellResult:
        """The finished seeds of a cell, of those it asks for; a run folder goes before a published run."""
        published = read_published(self.published, cell)
        wanted = cell.experiment.seeds
        runs: dict[int, list[Record]] = {}
        folders, machines = [], list(published.machines)
        for folder in self._folders(cell):
            if not layout.is_finished(folder):
                continue
            records = Rounds(_with_activations(folder, read_rounds(folder)))
            # a folder counts only for the seeds of its data draw
            draw = Experiment.load(folder / layout.CONFIG).data.seed
            new = [s for s in records.seeds if s in wanted and cell.draw(s) == draw and s not in runs]
            runs |= {seed: records.of_seed(seed) for seed in new}
            if new:
                folders.append(folder)
                machines += read_summary(folder / layout.SUMMARY).get("machines", [])
        runs = {s: run for s, run in sorted((published.runs | runs).items()) if s in wanted}
        result = CellResult(cell, runs, folders=tuple(folders), machines=tuple(dict.fromkeys(machines)))
        if not result.missing:
            return replace(result, status="done")
        # a run that diverged has no summary, so only the published file knows
        if published.diverged:
            return replace(result, status="diverged", message=published.diverged)
        return replace(result, status="part done" if runs else NOT_RUN)

    def run(self, cell: Cell) -> CellResult:
        """Finish a cell: resume runs that were stopped, then start the other seeds.

        An error is part of the result, so that the other cells still run; only an interruption is raised.
        """
        missing = self.read(cell).missing
        try:
            for folder in self._folders(cell):
                begun = Experiment.load(folder / layout.CONFIG)
                if any(seed in missing and cell.draw(seed) == begun.data.seed for seed in begun.seeds):
                    _run(folder, cell, cell.on_draw(begun.data.seed, begun.seeds), self)
                    missing = self.read(cell).missing
            # seeds on the same data draw share a run, and with it loading and compiling
            for draw in sorted({cell.draw(seed) for seed in missing}):
                seeds = [seed for seed in missing if cell.draw(seed) == draw]
                name = "-".join([f"draw-{draw}"] * (cell.draws > 1) + ["seeds", *map(str, seeds)])
                _run(self.root / "runs" / cell.name / name, cell, cell.on_draw(draw, seeds), self)
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - the other cells may be days of work
            result = self.read(cell)
            if not result.missing:  # another process has finished it
                return result
            status, message = describe(error)
            return replace(result, status=status, message=message)
        return self.read(cell)

    def _folders(self, cell: Cell) -> list[Path]:
        """The run folders of a cell; others in its folder are ignored."""
        folders = sorted(path.parent for path in (self.root / "runs" / cell.name).glob(f"*/{layout.CONFIG}"))
        return [folder for folder in folders if _is_run_of(folder, cell)]


def describe(error: Exception) -> tuple[str, str]:
    """The status and the message of a cell that an error ended."""
    if isinstance(error, DataMissing):
        return "data missing", str(error)
    if isinstance(error, FolderInUse):
        return "busy", "another process is running it"
    if isinstance(error.__cause__, ClientDiverged):
        # a result; its own message, since the outer one names a folder of this machine
        return "diverged", str(error.__cause__)
    return "failed", str(error) if isinstance(error, FedpewsError) else first_line(error)


def _run(folder: Path, cell: Cell, experiment: Experiment, runner: Runner) -> None:
    from fedpews.running import run

    with runner.progress(experiment) as bar:
        callbacks = [*runner.callbacks, *([bar] if bar else [])]
        if cell.probe == "activations":
            from fedpews.paper.activations import record_activations

            callbacks.append(record_activations(experiment, folder, runner.data_dir))
        run(experiment, out=folder, resume=True, data_dir=runner.data_dir, callbacks=callbacks)


def report_validation(experiment: Experiment, report: Callable[[int, float], None]) -> Callback:
    """A callback that reports the validation metric, mean over seeds, after each evaluated round after the warmup.

    In the warmup clients train different neurons, so the value of the global model says nothing about the end of the
    run. A seed that ended early counts with its last value.
    """
    from fedpews.callbacks import Callback

    last: dict[int, float | None] = dict.fromkeys(experiment.seeds)

    def round(records: Sequence[Record]) -> None:
        seen = [r for r in records if r["phase"] != "warmup" and "validation" in r]
        last.update({record["seed"]: record["validation"].get(experiment.goal.metric) for record in seen})
        known = [value for value in last.values() if value is not None]
        if seen and len(known) == len(last):
            report(seen[0]["round"], fmean(known))

    return Callback(round=round)


def _is_run_of(folder: Path, cell: Cell) -> bool:
    try:
        return cell.matches(Experiment.load(folder / layout.CONFIG))
    except ConfigError:  # of another version
        return False


def _with_activations(folder: Path, records: list[Record]) -> list[Record]:
    file = folder / layout.ACTIVATIONS
    if not file.exists():
        return records
    # a resumed round is there twice, with the same numbers
    extra = {(line["seed"], line["round"]): line for line in read_lines(file, ActivationShape)}
    return [record | extra.get((record["seed"], record["round"]), {}) for record in records]
