"""Run what is missing of a cell, and read what is on disk. A cell's runs are ordinary run folders.

Finished runs are also published in compact form, one small file per cell, from which pages can be computed again: the
experiment with all its settings and, for every seed, the columns of its records, numbers to five digits, repeated
values as value and count. It is JSON, compressed with gzip.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, NotRequired
from zlib import error as ZlibError

from pydantic import Field
from typing_extensions import TypedDict

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
from fedpews.outside import MEGABYTE, parse_json, read_bytes, shaped
from fedpews.paper.study import Cell
from fedpews.results import layout
from fedpews.results.files import write_atomically
from fedpews.results.records import Record, Rounds, read_rounds
from fedpews.results.schema import ActivationShape, Machines, read_lines, read_summary

if TYPE_CHECKING:
    from fedpews.callbacks import Callback

NOT_RUN = "not run"
"""The status of a cell of which no seed has finished."""
DIGITS = 5
MOST_BYTES = 256 * MEGABYTE
"""Of a cell's runs when unpacked; 10 seeds of 500 rounds have one million."""
MOST_ROUNDS = 10**6
MOST_CHARACTERS = 1000
"""Characters of the message of a cell that diverged."""
CLIENTS = 10
"""Lists with a number per client are kept up to this many clients."""


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
        if published.status == "diverged":
            return replace(result, status="diverged", message=published.message)
        return replace(result, status="part done" if runs else NOT_RUN)

    def run(self, cell: Cell) -> CellResult:
        """Finish a cell: resume runs that were stopped, then start the other seeds.

        An error is part of the result, so that the other cells still run; only an interruption is raised.
        """
        missing, diverged = self.read(cell).missing, list[FedpewsError]()
        try:
            for folder in self._folders(cell):
                begun = Experiment.load(folder / layout.CONFIG)
                if any(seed in missing and cell.draw(seed) == begun.data.seed for seed in begun.seeds):
                    diverged += self._train(cell, begun.data.seed, begun.seeds, folder)
                    missing = self.read(cell).missing
            # seeds on the same data draw share a run, and with it loading and compiling
            for draw in sorted({cell.draw(seed) for seed in missing}):
                seeds = [seed for seed in missing if cell.draw(seed) == draw]
                diverged += self._train(cell, draw, seeds)
            if diverged:
                raise diverged[0]
        except Interrupted:
            raise
        except Exception as error:  # noqa: BLE001 - the other cells may be days of work
            result = self.read(cell)
            if not result.missing:  # another process has finished it
                return result
            status, message = describe(error)
            return replace(result, status=status, message=message)
        return self.read(cell)

    def _train(
        self, cell: Cell, draw: int, seeds: Sequence[int], folder: Path | None = None
    ) -> list[FedpewsError]:
        """Train seeds together. If one diverges, train each alone, so that the others finish; returns the errors."""
        name = "-".join([f"draw-{draw}"] * (cell.draws > 1) + ["seeds", *map(str, seeds)])
        try:
            _run(folder or self.root / "runs" / cell.name / name, cell, cell.on_draw(draw, list(seeds)), self)
        except FedpewsError as error:
            if not isinstance(error.__cause__, ClientDiverged):
                raise
            if len(seeds) == 1:
                return [error]
            return [failed for seed in seeds for failed in self._train(cell, draw, [seed])]
        return []

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


class CellShape(TypedDict):
    """What a published file holds."""

    row: str
    column: str
    draws: Any
    experiment: dict[str, Any]
    runs: dict[Annotated[str, Field(pattern=r"^\d{1,20}$")], dict[str, list[Any]]]
    diverged: NotRequired[Annotated[str, Field(max_length=MOST_CHARACTERS)]]
    machines: NotRequired[Machines]


def publish(result: CellResult, folder: Path) -> None:
    """Write a cell's finished seeds beside those that its file already has, and why others diverged."""
    cell = result.cell
    every = {**read_published(folder, cell).runs, **result.runs}
    content = {
        "row": cell.row,
        "column": cell.column,
        "draws": cell.draws,
        "experiment": cell.settings(),
        "runs": {str(seed): _pack(records) for seed, records in sorted(every.items())},
        **({"diverged": result.message[:MOST_CHARACTERS]} if result.status == "diverged" else {}),
        **({"machines": list(result.machines)} if result.machines else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # no time of day in the file: the same runs give the same bytes
    write_atomically(_path(folder, cell), gzip.compress(text.encode(), mtime=0))


def read_published(folder: Path | None, cell: Cell) -> CellResult:
    """What was published of a cell; nothing if there is no file of this experiment."""
    if folder is None or not (path := _path(folder, cell)).exists():
        return CellResult(cell)
    content = _read(path)
    if not _agrees(content["experiment"], cell.settings()) or content["draws"] != cell.draws:
        return CellResult(cell)
    try:
        runs = {int(seed): _unpack(columns) for seed, columns in content["runs"].items()}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    status = "diverged" if "diverged" in content else NOT_RUN
    machines = tuple(content.get("machines", ()))
    return CellResult(cell, runs, status, content.get("diverged", ""), machines=machines)


def _agrees(then: Any, now: Any) -> bool:
    """Whether the settings of a file are those of today. A default that has changed since makes its runs another
    experiment; a key that was added later does not."""
    if isinstance(then, dict) and isinstance(now, dict):
        return all(_agrees(value, now[key]) for key, value in then.items() if key in now)
    return bool(then == now)


def _read(path: Path) -> CellShape:
    """The content of a file, unpacked up to the size that a cell's runs can have."""
    try:
        with gzip.open(BytesIO(read_bytes(path, MOST_BYTES))) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes when unpacked")
        content: CellShape = shaped(CellShape, parse_json(text.decode(), str(path)), str(path))
    except (OSError, EOFError, ValueError, ZlibError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    return content


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.json.gz"


def _pack(records: Sequence[Record]) -> dict[str, Any]:
    """Records as columns, without long lists. Rounds without an evaluation lack some of the keys."""
    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        rows = [row for row, record in enumerate(records) if key in record]
        if not all(_is_kept(records[row][key]) for row in rows):
            continue
        column = _column([records[row][key] for row in rows])
        columns[key] = column if len(rows) == len(records) else ["at", rows, column]
    return columns


def _is_kept(value: Any) -> bool:
    return not isinstance(value, list) or (
        len(value) <= CLIENTS and not any(isinstance(v, list) for v in value)
    )


def _column(values: list[Any]) -> list[Any]:
    """[value, count] for each run of equal values where that is shorter, else the values."""
    short = [_short(value) for value in values]
    runs = [[value, len(list(same))] for value, same in groupby(short)]
    return ["runs", *runs] if 2 * len(runs) < len(short) else short


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _unpack(columns: Mapping[str, list[Any]]) -> list[Record]:
    whole = {key: _values(column) for key, column in columns.items() if column[:1] != ["at"]}
    records: list[Record] = [dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)]
    for key, column in columns.items():
        if column[:1] == ["at"]:
            _, rows, values = column
            for row, value in zip(rows, _values(values), strict=True):
                if not 0 <= row < len(records):
                    raise ValueError(f"{key} has no round {row}")
                records[row][key] = value
    return records


def _values(column: list[Any]) -> list[Any]:
    if column[:1] != ["runs"]:
        return column
    if sum(count for _, count in column[1:]) > MOST_ROUNDS:
        raise ValueError(f"more than {MOST_ROUNDS:,} rounds")
    return [value for value, count in column[1:] for _ in range(count)]
