"""What a worker is asked to do, and what it answers: plain dicts of text, numbers and bytes."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedpews
from fedpews.errors import Interrupted
from fedpews.experiment import Experiment
from fedpews.report.progress import metric_in_words
from fedpews.results.records import Record
from fedpews.paper.cells import Found, MakeWatcher, run_cell
from fedpews.paper.cluster.parcels import pack
from fedpews.paper.study import Cell
from fedpews.paper.validation import Values

if TYPE_CHECKING:
    from fedpews.running import Watcher

Order = dict[str, Any]
Answer = dict[str, Any]

TELL_EVERY = 0.3
"""Seconds between two words about how far a cell is."""
ASK_EVERY = 1.0
"""Seconds between two questions whether to stop."""
WAITS_WHEN_BUSY = (1.0, 2.0, 4.0, 8.0)
"""Seconds. A worker that is given up may hold a folder until its process has ended."""

_ONE_AT_A_TIME = threading.Lock()
"""A cell uses all of the process's cores, so a worker with several threads runs one after the other."""


def write_order(
    cell: Cell, *, key: str, topic: str, root: Path, marker: str, data_dir: Path | None, cores: int | None
) -> Order:
    """A cell for a worker.

    Args:
        key: names it in what the worker tells, and the event that stops it.
        topic: where the worker tells how far it is.
        marker: a file in ``root`` that only those see who share the folder.
        cores: how many the worker may use; None for all it has.
    """
    values = cell.experiment.to_dict()
    if cores is not None and cell.experiment.runtime.workers is None:
        values["runtime"] = values["runtime"] | {"workers": cores}
    return {
        "version": fedpews.__version__,
        "key": key,
        "topic": topic,
        "row": cell.row,
        "column": cell.column,
        "experiment": values,
        "probe": cell.probe,
        "draws": cell.draws,
        "root": str(root.resolve()),
        "marker": marker,
        "data_dir": None if data_dir is None else str(data_dir.resolve()),
    }


def carry_out(order: Order) -> Answer:
    """Run at a worker: the whole cell, in the shared folder or in one of the worker's own that is then sent back."""
    from distributed import get_worker

    if order["version"] != fedpews.__version__:
        return _answer("failed", f"the worker has fedpews {fedpews.__version__}, not {order['version']}")
    experiment = Experiment(**order["experiment"])
    cell = Cell(order["row"], order["column"], experiment, order["probe"], order["draws"])
    data_dir = None if order["data_dir"] is None else Path(order["data_dir"])
    with _ONE_AT_A_TIME:
        if (Path(order["root"]) / order["marker"]).is_file():
            found = _run_patiently(Path(order["root"]), cell, data_dir, _telling(order))
            return _answer(found.status, found.message, found.error)
        with tempfile.TemporaryDirectory(dir=get_worker().local_directory) as own:
            found = _run_patiently(Path(own), cell, data_dir, _telling(order))
            return _answer(found.status, found.message, found.error) | {
                "parcel": pack(Path(own) / "runs" / cell.name)
            }


def _answer(status: str, message: str, error: str = "") -> Answer:
    return {"status": status, "message": message, "error": error}


def _run_patiently(root: Path, cell: Cell, data_dir: Path | None, watch: MakeWatcher) -> Found:
    try:
        found = run_cell(root, cell, data_dir, watch)
        for seconds in WAITS_WHEN_BUSY:
            if found.status != "busy":
                break
            time.sleep(seconds)
            found = run_cell(root, cell, data_dir, watch)
    except Interrupted as error:
        return Found(cell, status="stopped", message=str(error))
    return found


def _telling(order: Mapping[str, Any]) -> MakeWatcher:
    """A watcher that tells whoever gave the order how far its cell is, and hears when it is to stop."""
    from distributed import Event, get_worker

    from fedpews.running import Watcher

    worker, stop = get_worker(), Event(order["key"])

    def tell(**what: Any) -> None:
        worker.log_event(order["topic"], {"key": order["key"], "worker": worker.address, **what})

    @contextmanager
    def watch(experiment: Experiment) -> Iterator[Watcher]:
        values = Values(experiment.goal.metric, experiment.seeds)
        waiting: list[tuple[int, float]] = []
        told = asked = 0.0

        def begin(_: Experiment, done: int, engine: str) -> None:
            tell(state="running", round=done, rounds=experiment.rounds, begun=True)

        def round(records: Sequence[Record]) -> None:
            nonlocal told, asked
            waiting.extend(values.add(records))
            now, last = time.monotonic(), records[0]["round"] == experiment.rounds
            if last or now - told >= TELL_EVERY:
                told = now
                tell(
                    state="running",
                    round=records[0]["round"],
                    rounds=experiment.rounds,
                    phase=records[0]["phase"],
                    shown=metric_in_words(records),
                    values=[list(pair) for pair in waiting],
                )
                waiting.clear()
            if not last and now - asked >= ASK_EVERY:
                asked = now
                if stop.is_set():
                    raise Interrupted(f"stopped in round {records[0]['round']}")

        yield Watcher(begin=begin, round=round)

    return watch
