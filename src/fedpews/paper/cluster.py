"""Cells on other machines: each is a task of a Dask scheduler, and an ordinary run folder in the end.

Tasks and results travel over Dask's own connections, which pickle: a scheduler must be trusted, like any Dask
scheduler. A result itself is a dict of texts, numbers and the bytes of files. Nothing in it is unpickled here, and its
file names are checked before anything is written.
"""

from __future__ import annotations

import logging
import re
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedpews
from fedpews.errors import ConfigError, Interrupted, first_line, need_extra
from fedpews.experiment import Experiment
from fedpews.paper.cells import CellResult, MakeCallbacks, Runner, describe, reporting
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
"""Seconds for running cells to save and stop."""
ASK_EVERY = 1.0
"""Seconds after which a running cell asks again whether to stop."""
POLL_EVERY = 0.2
"""Seconds between two looks at a trial."""
BUSY_WAITS = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Seconds. A worker that Dask gave up may lock a run folder until its process has ended."""

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
def connect(address: str) -> Iterator[Cluster]:
    """The cluster at an address, or a local one for as long as the block runs."""
    from fedpews.engines.hardware import available_cores

    processes = local_processes(address)
    distributed = need_extra("cluster", "distributed", "--on")
    if processes:
        with _ignoring_ctrl_c():
            local = distributed.LocalCluster(
                n_workers=processes,
                threads_per_worker=1,
                dashboard_address=None,
                # Dask would end a worker at its share of the memory; a cell needs what it needs
                memory_limit=0,
                silence_logs=logging.CRITICAL + 1,
            )
        with local, distributed.Client(local, set_as_default=False) as client:
            yield Cluster(client, max(1, available_cores() // processes))
        return
    try:
        client = distributed.Client(address, timeout=ANSWER_WITHIN, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConfigError(f"no Dask scheduler answers at {address}: {first_line(error)}") from error
    with client:
        yield Cluster(client)


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Processes started in this block ignore the terminal's Ctrl-C: the command tells their cells to stop."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Cluster:
    """The workers of a Dask scheduler."""

    client: Client
    cores: int | None = None
    """Cores that a worker may use; None for all of its machine."""

    @property
    def size(self) -> int:
        """The number of workers now."""
        return len(self.client.scheduler_info(n_workers=-1)["workers"])

    def run_cells(self, runner: Runner, labels: Sequence[str], cells: Sequence[Cell]) -> Iterator[CellResult]:
        """Run cells on all workers; each result as its cell ends."""
        from distributed import as_completed

        # rows of a study can be the same experiment, which is run once
        same: dict[str, list[tuple[str, Cell]]] = {}
        for label, cell in zip(labels, cells, strict=True):
            same.setdefault(cell.name, []).append((label, cell))
        runner.log(
            f"{len(same)} cells, {self.size or 'no'} workers" + "; waiting for workers" * (not self.size)
        )
        with self._tasks(runner) as submit:
            futures = {submit(pairs[0][1]): pairs for pairs in same.values()}
            for number, future in enumerate(as_completed(futures, loop=self.client.loop), 1):
                label, cell = futures[future][0]
                result = _collect(runner, cell, future)
                message = f": {result.message}" if result.message else ""
                runner.log(f"{number}/{len(futures)} {label}: {result.status}{message}")
                yield result
                yield from (runner.read(other) for _, other in futures[future][1:])

    def run(
        self, runner: Runner, cell: Cell, report: Callable[[int, float], None], stop: threading.Event
    ) -> CellResult:
        """Run a cell on a worker.

        Args:
            report: called with the validation metric after each round, soon after it; may raise to end the cell.
            stop: ends the cell with an Interrupted once it is set.
        """
        with self._tasks(runner) as submit:
            topic = f"fedpews-{secrets.token_hex(8)}"
            future, seen = submit(cell, topic), 0
            while not future.done():
                if stop.wait(POLL_EVERY):
                    raise Interrupted("stopped")
                events = self.client.get_events(topic)
                for _, (round, value) in events[seen:]:
                    report(round, value)
                seen = len(events)
            return _collect(runner, cell, future)

    @contextmanager
    def _tasks(self, runner: Runner) -> Iterator[Callable[..., Future]]:
        """A function that submits a cell; cells that still run at the end of the block save and stop."""
        from distributed import Event, wait

        futures: list[Future] = []
        data_dir = None if runner.data_dir is None else runner.data_dir.resolve()
        there = Runner(runner.root.resolve(), data_dir=data_dir)
        stop = f"stop-{secrets.token_hex(8)}"
        with _marked(runner.root) as marker:

            def submit(cell: Cell, topic: str | None = None) -> Future:
                changes: dict[str, Any] = {"seeds": runner.read(cell).missing}
                runtime = cell.experiment.runtime
                if self.cores is not None and runtime.workers is None:
                    changes["runtime"] = runtime.model_copy(update={"workers": self.cores})
                cell = replace(cell, experiment=cell.experiment.model_copy(update=changes))
                task = (fedpews.__version__, there, marker, cell, stop, topic)
                futures.append(self.client.submit(run_at_worker, *task, pure=False))
                return futures[-1]

            try:
                yield submit
            finally:
                if not all(future.done() for future in futures):
                    Event(stop, client=self.client).set()
                    begun = {key for keys in self.client.processing().values() for key in keys}
                    self.client.cancel([future for future in futures if future.key not in begun])
                    with self.client.as_current(), suppress(TimeoutError):
                        wait([future for future in futures if future.key in begun], timeout=STOP_WITHIN)
                    self.client.cancel(futures)


@contextmanager
def _marked(root: Path) -> Iterator[str]:
    name = f".cluster-{secrets.token_hex(8)}"
    root.mkdir(parents=True, exist_ok=True)
    (root / name).write_text("workers that see this file share the folder\n")
    try:
        yield name
    finally:
        (root / name).unlink(missing_ok=True)


def run_at_worker(
    version: str, runner: Runner, marker: str, cell: Cell, stop: str, topic: str | None
) -> dict[str, Any]:
    """Run a cell in the shared folder, or in a temporary one whose files become part of the result.

    Args:
        version: of fedpews, which must be the worker's own.
        marker: a file in the runner's folder; a machine that sees it shares the folder.
        stop: the Dask event that ends the cell.
        topic: the Dask topic for the validation metric after each round.
    """
    from distributed import get_worker

    if version != fedpews.__version__:
        message = f"the worker has fedpews {fedpews.__version__}, not {version}"
        return {"status": "failed", "message": message, "error": "ConfigError", "files": {}}
    with _ONE_AT_A_TIME, tempfile.TemporaryDirectory(dir=get_worker().local_directory) as folder:
        is_shared = (runner.root / marker).is_file()
        root = runner.root if is_shared else Path(folder)
        try:
            for seconds in BUSY_WAITS:
                time.sleep(seconds)
                result = replace(runner, root=root, callbacks=_callbacks(stop, topic)).run(cell)
                if result.status != "busy":
                    break
        except Interrupted as error:
            result = CellResult(cell, status="stopped", message=str(error))
        files = {} if is_shared else pack(root / "runs" / cell.name)
        return {"status": result.status, "message": result.message, "error": result.error, "files": files}


def _callbacks(stop: str, topic: str | None) -> MakeCallbacks:
    """A callback that ends the run once an event is set, and sends the validation metric to a topic."""
    from distributed import Event, get_worker

    from fedpews.callbacks import Callback

    worker, event = get_worker(), Event(stop)

    @contextmanager
    def callbacks(experiment: Experiment) -> Iterator[Sequence[Callback]]:
        asked = 0.0

        def round(records: Sequence[Record]) -> None:
            nonlocal asked
            if records[0]["round"] < experiment.rounds and time.monotonic() - asked >= ASK_EVERY:
                asked = time.monotonic()
                if event.is_set():
                    raise Interrupted(f"stopped in round {records[0]['round']}")

        yield [Callback(round=round)]

    return callbacks if topic is None else reporting(callbacks, lambda *pair: worker.log_event(topic, pair))


def _collect(runner: Runner, cell: Cell, future: Future) -> CellResult:
    """What is on disk now; the worker's status and message where seeds are missing."""
    try:
        answer = future.result()
        unpack(answer["files"], runner.root / "runs" / cell.name)
    except Exception as error:  # noqa: BLE001 - after any error of a worker or the network the other cells go on
        status, message = describe(error)
        answer = {"status": status, "message": message, "error": type(error).__name__}
    result = runner.read(cell)
    if not result.missing:
        return result
    if answer["status"] == "done":
        answer |= {"status": "failed", "message": "the worker finished it, but its run is not here"}
    return replace(result, status=answer["status"], message=answer["message"], error=answer["error"])


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
