"""Cells on other machines: each is a task of a Dask scheduler, and an ordinary run folder in the end.

Tasks and results travel over Dask's own connections, which pickle: a scheduler must be trusted, like any Dask
scheduler. A result is a dict of texts and the bytes of files. Nothing in it is unpickled here, and its file names are
checked before anything is written.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedpews
from fedpews.errors import ConfigError, Interrupted, first_line, need_extra
from fedpews.experiment import Experiment
from fedpews.paper.cells import CellResult, Runner, describe, report_validation
from fedpews.paper.study import Cell
from fedpews.results import layout
from fedpews.results.files import write_atomically
from fedpews.results.folder import RunFolder
from fedpews.results.records import Record

if TYPE_CHECKING:
    from distributed import Client, Future

    from fedpews.callbacks import Callback

ANSWER_WITHIN = 20
"""Seconds for a scheduler to answer."""
STOP_WITHIN = 15.0
"""Seconds for a cancelled cell to save and stop."""
POLL_EVERY = 0.2
"""Seconds between two looks at a trial."""

_ONE_AT_A_TIME = threading.Lock()
"""A cell uses all cores of its process, so a worker with several threads runs one cell after the other."""


def local_processes(address: str) -> int:
    """The number of processes in ``local:N``; 0 for the address of a scheduler.

    >>> local_processes("local:2"), local_processes("tcp://10.0.0.5:8786")
    (2, 0)
    """
    kind, _, count = address.partition(":")
    if kind == "local" and count.isdecimal() and int(count) > 0:
        return int(count)
    if "://" in address:
        return 0
    raise ConfigError(
        f"--on {address!r}: give the address of a Dask scheduler, such as tcp://10.0.0.5:8786, or local:2 for two "
        "processes on this machine"
    )


@contextmanager
def connect(address: str | None) -> Iterator[Cluster | None]:
    """The cluster at an address, or a local one for as long as the block runs; None without an address."""
    from fedpews.engines.hardware import available_cores

    if address is None:
        yield None
        return
    processes = local_processes(address)
    distributed = need_extra("cluster", "distributed", "--on")
    if processes:
        local = distributed.LocalCluster(
            n_workers=processes,
            threads_per_worker=1,
            dashboard_address=None,
            # Dask would end a worker at its share of the memory; a cell needs what it needs
            memory_limit=0,
            silence_logs=logging.CRITICAL + 1,
        )
        with local, distributed.Client(local, set_as_default=False) as client:
            client.run(_ignore_ctrl_c)
            yield Cluster(client, max(1, available_cores() // processes))
        return
    try:
        client = distributed.Client(address, timeout=ANSWER_WITHIN, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"no Dask scheduler answers at {address}: {first_line(error)}") from error
    with client:
        yield Cluster(client)


def _ignore_ctrl_c() -> None:
    """The terminal also sends Ctrl-C to local workers; it is the command that cancels their cells."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask scheduler."""

    client: Client
    cores: int | None = None
    """Cores that a worker may use; None for all of its machine."""

    @property
    def size(self) -> int:
        """The number of workers now."""
        return len(self.client.nthreads())

    def run_cells(
        self, runner: Runner, cells: Sequence[Cell], label: Callable[[Cell], str]
    ) -> Iterator[CellResult]:
        """Run cells on all workers; each result as its cell ends."""
        from distributed import as_completed

        waiting = "" if self.size else "; waiting for workers"
        runner.log(f"{len(cells)} cells, {self.size or 'no'} workers{waiting}")
        with self._submitted(runner, cells) as futures:
            for number, future in enumerate(as_completed(futures, loop=self.client.loop), 1):
                result = _collect(runner, futures[future], future)
                message = f": {result.message}" if result.message else ""
                runner.log(f"{number}/{len(cells)} {label(result.cell)}: {result.status}{message}")
                yield result

    def run(
        self, runner: Runner, cell: Cell, report: Callable[[int, float], None], stop: threading.Event
    ) -> CellResult:
        """Run a cell on a worker.

        Args:
            report: called with the validation metric after each round, soon after it; may raise to end the cell.
            stop: ends the cell with an Interrupted once it is set.
        """
        topic, seen = f"fedpews-{secrets.token_hex(8)}", 0
        with self._submitted(runner, [cell], topic) as futures:
            (future,) = futures
            while not future.done():
                if stop.wait(POLL_EVERY):
                    raise Interrupted("stopped")
                events = self.client.get_events(topic)
                for _, (round, value) in events[seen:]:
                    report(round, value)
                seen = len(events)
            return _collect(runner, cell, future)

    @contextmanager
    def _submitted(
        self, runner: Runner, cells: Sequence[Cell], topic: str | None = None
    ) -> Iterator[dict[Future, Cell]]:
        """The tasks of cells. Those that still run at the end of the block are cancelled: they save and stop."""
        there = Runner(runner.root.resolve(), data_dir=runner.data_dir and runner.data_dir.resolve())
        there.root.mkdir(parents=True, exist_ok=True)
        with _marker(there.root) as marker:
            futures = {}
            for cell in cells:
                task = (fedpews.__version__, there, marker.name, self._to_run(runner, cell), topic)
                futures[self.client.submit(run_at_worker, *task, pure=False)] = cell
            try:
                yield futures
            finally:
                keys = {future.key for future in futures if not future.done()}
                if keys:
                    processing = self.client.processing().items()
                    busy = [worker for worker, tasks in processing if keys.intersection(tasks)]
                    self.client.cancel(list(futures))
                    self.client.run(_wait_until_idle, workers=busy, on_error="ignore")

    def _to_run(self, runner: Runner, cell: Cell) -> Cell:
        """The cell with only its missing seeds, on the cores of a worker."""
        changes: dict[str, Any] = {"seeds": runner.read(cell).missing}
        runtime = cell.experiment.runtime
        if self.cores is not None and runtime.workers is None:
            changes["runtime"] = runtime.model_copy(update={"workers": self.cores})
        return replace(cell, experiment=cell.experiment.model_copy(update=changes))


def _marker(root: Path) -> Any:
    """A file in the runner's folder; a machine that sees it shares the folder."""
    return tempfile.NamedTemporaryFile(dir=root, prefix=".cluster-")


async def _wait_until_idle() -> None:
    """On a worker: wait until its cell has stopped."""
    if await asyncio.to_thread(_ONE_AT_A_TIME.acquire, timeout=STOP_WITHIN):
        _ONE_AT_A_TIME.release()


def run_at_worker(version: str, runner: Runner, marker: str, cell: Cell, topic: str | None) -> dict[str, Any]:
    """Run a cell in the shared folder, or in a temporary one whose files become part of the result.

    Args:
        version: of the command's fedpews, which the worker must have too.
        topic: the Dask topic for the validation metric after each round.
    """
    from distributed import get_worker

    if version != fedpews.__version__:
        raise ConfigError(f"the worker has fedpews {fedpews.__version__}, not {version}")
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory(dir=get_worker().local_directory) as folder:
        is_shared = Path(marker).is_file()
        root = runner.root if is_shared else Path(folder)
        result = replace(runner, root=root, callbacks=_callbacks(cell.experiment, topic)).run(cell)
        files = {} if is_shared else pack(root / "runs" / cell.name)
        return {"status": result.status, "message": result.message, "files": files}


def _callbacks(experiment: Experiment, topic: str | None) -> list[Callback]:
    """Callbacks that end the run once its task is cancelled, and send the validation metric to a topic."""
    from distributed import get_worker

    from fedpews.callbacks import Callback

    worker = get_worker()
    key = worker.get_current_task()

    def round(records: Sequence[Record]) -> None:
        task = worker.state.tasks.get(key)
        # also after the command or the scheduler has died
        if task is None or task.state != "executing":
            raise Interrupted(f"cancelled in round {records[0]['round']}")

    callbacks = [Callback(round=round)]
    if topic is not None:
        callbacks.append(report_validation(experiment, lambda *pair: worker.log_event(topic, pair)))
    return callbacks


def _collect(runner: Runner, cell: Cell, future: Future) -> CellResult:
    """What is on disk now; the worker's status and message where seeds are missing."""
    try:
        answer = future.result()
        unpack(answer["files"], runner.root / "runs" / cell.name)
    except Exception as error:  # noqa: BLE001 - after any error of a worker or the network the other cells go on
        status, message = describe(error)
        answer = {"status": status, "message": message}
    result = runner.read(cell)
    if not result.missing:
        return result
    if answer["status"] == "done":
        answer |= {"status": "failed", "message": "the worker finished it, but its run is not here"}
    return replace(result, status=answer["status"], message=answer["message"])


def pack(folder: Path) -> dict[str, bytes]:
    """Every file below a folder except locks, by its relative path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != layout.LOCK)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def unpack(files: Mapping[str, bytes], folder: Path) -> None:
    """Write run folders from another machine into a folder; runs that are finished here stay as they are."""
    runs: dict[str, dict[str, bytes]] = {}
    for name, content in files.items():
        parts = name.split("/")
        # a backslash or a drive leaves the folder on Windows
        outside = any(part in ("", ".", "..") or re.search(r"[\\:\0]", part) for part in parts)
        if outside or len(parts) < 2 or not isinstance(content, bytes):
            raise ConfigError(f"a worker sent back {name!r}, which is no file of a run folder")
        runs.setdefault(parts[0], {})["/".join(parts[1:])] = content
    for run, contents in runs.items():
        target = folder / run
        if layout.is_finished(target):
            continue
        with closing(RunFolder(target)):
            for path in [path for path in target.rglob("*") if path.is_file() and path.name != layout.LOCK]:
                path.unlink()
            # the summary last, as every run writes it
            for name in sorted(contents, key=lambda name: name == layout.SUMMARY):
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target / name, contents[name])
