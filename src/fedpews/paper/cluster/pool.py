"""The workers of a scheduler as seen from the command: orders go out, news and finished cells come in."""

from __future__ import annotations

import itertools
import queue
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews.errors import FolderInUse, first_line
from fedpews.report.board import Board
from fedpews.results.files import write_atomically
from fedpews.paper.cells import Found, Job, read_cell
from fedpews.paper.cluster.orders import Answer, carry_out, write_order
from fedpews.paper.cluster.parcels import unpack
from fedpews.paper.study import Cell, with_seeds

if TYPE_CHECKING:
    from distributed import Client, Future

LETS_FINISH = 15.0
"""Seconds that running cells have to save where they are, once the command is stopped."""


@dataclass(frozen=True)
class News:
    """How far a cell is: what its worker said last."""

    label: str
    told: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    label: str
    found: Found


class Pool:
    """Sends cells to workers and hears of them. Used by one thread; see `open_pool`."""

    def __init__(
        self,
        client: Client,
        board: Board,
        root: Path,
        published: Path | None,
        data_dir: Path | None,
        cores: int | None,
    ) -> None:
        self._client, self._board = client, board
        self._root, self._published, self._data_dir, self._cores = root, published, data_dir, cores
        name = secrets.token_hex(8)
        self._topic = f"fedpews-{name}"
        self._marker = f".cluster-{name}"
        self._heard: queue.SimpleQueue[dict[str, Any] | Future] = queue.SimpleQueue()
        self._jobs: dict[str, tuple[Job, Future]] = {}
        self._at: dict[str, str] = {}
        self._numbers = itertools.count()

    def open(self) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        write_atomically(self._root / self._marker, b"workers that see this file share the folder\n")
        self._client.subscribe_topic(self._topic, lambda event: self._heard.put(event[1]))
        if not self.size:
            self._board.say("waiting for workers")

    def close(self) -> None:
        """Ask what still runs to save and stop, and give it a moment."""
        from distributed import Event

        left = {key: future for key, (_, future) in self._jobs.items() if not future.done()}
        if left:
            for key in left:
                Event(key, client=self._client).set()
            self._client.cancel([future for key, future in left.items() if key not in self._at])
            until = time.monotonic() + LETS_FINISH
            while time.monotonic() < until and not all(left[key].done() for key in self._at if key in left):
                time.sleep(0.2)
            self._client.cancel(list(left.values()))
        self._client.unsubscribe_topic(self._topic)
        (self._root / self._marker).unlink(missing_ok=True)

    @property
    def size(self) -> int:
        """How many workers there are now."""
        return len(self._client.scheduler_info(n_workers=-1)["workers"])

    def send(self, label: str, cell: Cell) -> None:
        key = f"{self._topic}-{next(self._numbers)}-{cell.name}"
        missing = read_cell(self._root, cell, self._published).missing
        order = write_order(
            with_seeds(cell, missing),
            key=key,
            topic=self._topic,
            root=self._root,
            marker=self._marker,
            data_dir=self._data_dir,
            cores=self._cores,
        )
        future = self._client.submit(carry_out, order, key=key, pure=False)
        self._jobs[key] = (label, cell), future
        self._board.update(label, rounds=cell.experiment.rounds)
        future.add_done_callback(self._heard.put)

    def stop(self, label: str) -> None:
        """Ask a cell's worker to save and stop."""
        from distributed import Event

        for key, ((name, _), _) in self._jobs.items():
            if name == label:
                Event(key, client=self._client).set()

    def hear(self) -> News | Ended:
        """Wait for the next thing that happens."""
        while True:
            heard = self._next()
            if not isinstance(heard, dict):
                return self._end(heard)
            if heard["key"] in self._jobs:
                return self._progress(heard)

    def _next(self) -> Any:
        # with a time limit, so that Ctrl-C is heard on every system
        while True:
            try:
                return self._heard.get(timeout=1.0)
            except queue.Empty:
                continue

    def _progress(self, told: dict[str, Any]) -> News:
        key = told["key"]
        (label, _), _ = self._jobs[key]
        if told.get("begun"):
            before, self._at[key] = self._at.get(key), told["worker"]
            at = f"{label}: on {told['worker']}" + (
                f" from round {told['round'] + 1}" if told["round"] else ""
            )
            if before is not None and before != told["worker"]:
                at += f", after {before} was lost"
            self._board.say(at)
        words = f"{told.get('phase', '')} {told.get('shown', '')}".strip()
        self._board.update(
            label,
            state="running",
            round=told["round"],
            rounds=told["rounds"],
            where=told["worker"],
            **({"shown": words} if words else {}),
        )
        return News(label, told)

    def _end(self, future: Future) -> Ended:
        (label, cell), _ = self._jobs.pop(future.key)
        found = self._collect(cell, future)
        future.release()
        self._board.update(label, state=found.status)
        self._board.say(f"{label}: {found.status}" + (f": {found.message}" if found.message else ""))
        return Ended(label, found)

    def _collect(self, cell: Cell, future: Future) -> Found:
        """What is on disk now; what the worker says of it only where something is missing."""
        answer = _answer_of(future)
        if "parcel" in answer:
            try:
                unpack(answer["parcel"], self._root / "runs" / cell.name)
            except FolderInUse as error:
                answer = {"status": "busy", "message": str(error), "error": type(error).__name__}
        found = read_cell(self._root, cell, self._published)
        if not found.missing:
            return found
        status = answer["status"]
        if status == "done":
            status, answer["message"] = "failed", "the worker says it is done, but its run is not here"
        return replace(found, status=status, message=answer["message"], error=answer["error"])


def _answer_of(future: Future) -> Answer:
    from distributed import KilledWorker

    try:
        answer: Answer = future.result()
    except KilledWorker as error:
        return {
            "status": "failed",
            "message": "every worker that took it died",
            "error": type(error).__name__,
        }
    except Exception as error:  # noqa: BLE001 - whatever a worker or the network does, the other cells go on
        return {"status": "failed", "message": first_line(error), "error": type(error).__name__}
    return answer


@contextmanager
def open_pool(
    client: Client,
    board: Board,
    root: Path,
    published: Path | None,
    data_dir: Path | None,
    cores: int | None,
) -> Iterator[Pool]:
    """A pool for as long as the block lasts; what still runs then is stopped where it can go on later."""
    pool = Pool(client, board, root, published, data_dir, cores)
    pool.open()
    try:
        with board:
            yield pool
    finally:
        pool.close()
