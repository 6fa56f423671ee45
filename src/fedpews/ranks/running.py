"""Run an experiment over the ranks that torchrun started: the first one leads, the others work for it."""

from __future__ import annotations

import logging
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

import fedpews
from fedpews.build import Setup, build, build_engine
from fedpews.callbacks import Callback
from fedpews.engines.engine import Diverged, Done, Engine, Job
from fedpews.engines.hardware import available_cores
from fedpews.errors import ConfigError, FedpewsError, Interrupted, RankLost
from fedpews.experiment import Experiment
from fedpews.methods.contract import Download, Upload
from fedpews.ranks.group import ERROR, LEADER, Group, Message, device_name, error_message, joined, read_error
from fedpews.ranks.rank import Rank
from fedpews.result import Result
from fedpews.running import train

READY, NEXT, END = "ready", "next", "end"

Outcomes = Sequence[Done | Diverged]


class RankEngine(Engine):
    """Sends every rank its clients of a round with their memories, and collects the uploads and new memories.

    Numbers depend on a job alone, not on the rank that runs it: the sums are those of one process.
    """

    def __init__(self, group: Group, setup: Setup, local: Engine) -> None:
        # it evaluates as the engine that it has for its share
        self.name, self.net, self.data, self._pool = local.name, local.net, local.data, local._pool
        self._group, self._setup, self._local = group, setup, local

    def made_with(self) -> dict[str, str]:
        return self._local.made_with()

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        self._local.go_on(made_with, may_change=may_change)

    def close(self) -> None:
        # if a rank is lost, a thread may still be training; the process ends without waiting for it
        if not self._group.lost:
            self._local.close()

    def train(self, jobs: Sequence[Job]) -> Outcomes:
        by_rank = self._assign(jobs)
        ended: SimpleQueue[Outcomes | Exception] = SimpleQueue()

        def put(outcomes: Callable[[], Outcomes]) -> None:
            try:
                ended.put(outcomes())
            except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
                ended.put(error)

        for rank, share in by_rank.items():
            if rank != LEADER:
                # the other rank has the method's client half
                jobs_sent = [{**vars(job), "half": None} for job in share]
                self._group.send(rank, Message("train", {"jobs": jobs_sent}))
        for rank, share in by_rank.items():
            todo = partial(self._local.train, share) if rank == LEADER else partial(self._receive, rank)
            # daemons: after a failure the other ranks' answers are not waited for
            threading.Thread(target=put, args=(todo,), daemon=True).start()
        outcomes: dict[tuple[int, int], Done | Diverged] = {}
        for _ in by_rank:
            answer = ended.get()
            if isinstance(answer, Exception):
                raise answer
            outcomes |= {(outcome.seed, outcome.client): outcome for outcome in answer}
        return [outcomes[job.seed, job.client] for job in jobs]

    def _receive(self, rank: int) -> Outcomes:
        answers = self._group.answer(rank).body["outcomes"]
        return [
            Done(**answer | {"upload": Upload(**answer["upload"])})
            if "upload" in answer
            else Diverged(**answer)
            for answer in answers
        ]

    def _assign(self, jobs: Sequence[Job]) -> dict[int, list[Job]]:
        """The jobs of each rank, so that all have about the same work."""
        clients = self._setup.data.clients
        sizes = [1 if self._setup.experiment.train.steps else len(clients[job.client]) for job in jobs]
        loads = [0] * self._group.here.world
        ranks: dict[int, int] = {}
        # the longest first, as they are the hardest to fit in
        for i in sorted(range(len(jobs)), key=lambda i: sizes[i], reverse=True):
            ranks[i] = loads.index(min(loads))
            loads[ranks[i]] += sizes[i]
        return {rank: [jobs[i] for i in sorted(ranks) if ranks[i] == rank] for rank in set(ranks.values())}


@contextmanager
def leading(here: Rank, device: str) -> Iterator[Group]:
    """All ranks, seen from the first; when this ends, the others end too, with the same exit code."""
    with joined(here, torch.device(device_name(device, here))) as group:
        # torchrun sends it when another rank has died: this rank writes a checkpoint and prints an error first
        _ignore(signal.SIGTERM)
        try:
            yield group
        except RankLost:
            # the remaining ranks notice that this one is gone
            raise
        except Exception as error:
            _dismiss(group, error)
            raise


def lead(
    group: Group,
    experiment: Experiment,
    *,
    out: str | Path | None = None,
    resume: bool = False,
    data_dir: str | Path | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """`fedpews.run` on the first rank, with the clients spread over all ranks; the others run `work`.

    A run that torchrun restarts after a rank died is resumed, with or without ``resume``.
    """
    try:
        setup = _build(experiment, group.here, data_dir)
    finally:
        # received also if there will be no run, so that the ranks can be sent its end
        others = {rank: group.receive(rank) for rank in group.others}
    for rank, message in others.items():
        _check_alike(setup, message, rank)
    _check_size(setup, group.here)

    def make_engine(setup: Setup) -> tuple[Engine, str]:
        engine, why = _build_engine(setup, group.here)
        return RankEngine(group, setup, engine), f"on {group.here.world} ranks, {why}"

    result = train(setup, out=out, resume=resume or group.again, callbacks=callbacks, make_engine=make_engine)
    for rank in group.others:
        group.send(rank, Message(NEXT))
    return result


def work(here: Rank, experiments: Sequence[Experiment], data_dir: str | Path | None = None) -> int:
    """A rank that is not the first: it answers requests, prints nothing, and returns its exit code."""
    logging.getLogger("fedpews").setLevel(logging.CRITICAL + 1)
    device = torch.device(device_name(experiments[0].runtime.device, here))
    with joined(here, device) as group:
        # Ctrl-C reaches all ranks; the first finishes the round with the help of all, and then ends the run
        _ignore(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for experiment in experiments:
            ended = serve(group, experiment, data_dir)
            if ended is not None:
                return ended
    return 0


def serve(group: Group, experiment: Experiment, data_dir: str | Path | None) -> int | None:
    """Answer the first rank until the run is over: None if another run may follow, else an exit code."""
    try:
        setup = _build(experiment, group.here, data_dir)
        engine = _build_engine(setup, group.here)[0]
    except Exception as error:  # noqa: BLE001 - raised again by the first rank
        group.send(LEADER, error_message(error))
        return _end(group, group.receive(LEADER))
    with closing(engine):
        group.send(LEADER, Message(READY, _identity(setup)))
        while True:
            message = group.receive(LEADER)
            if message.kind == NEXT:
                return None
            if message.kind == END:
                return _end(group, message)
            group.send(LEADER, message if message.kind == READY else _train(setup, engine, message))


def _ignore(*signals: signal.Signals) -> None:
    for number in signals:
        # not SIG_IGN, which a compiler that is started would inherit
        signal.signal(number, lambda number, frame: None)


def _end(group: Group, message: Message) -> int:
    """The exit code, once the first rank has ended: torchrun stops all ranks when one ends."""
    with suppress(RankLost):
        group.receive(LEADER)
    return int(message.body["code"])


def _train(setup: Setup, engine: Engine, message: Message) -> Message:
    """Train the jobs of a request."""
    try:
        jobs = []
        for job in message.body["jobs"]:
            download = Download(**job["download"])
            jobs.append(Job(**job | {"download": download, "half": setup.method.client(download.phase)}))
        return Message("done", {"outcomes": [*engine.train(jobs)]})
    except Exception as error:  # noqa: BLE001 - raised again by the first rank
        if not isinstance(error, FedpewsError):
            # a bug: the first rank prints the message, and this one the traceback
            traceback.print_exc()
        return error_message(error)


def _build(experiment: Experiment, here: Rank, data_dir: str | Path | None) -> Setup:
    """The setup of `fedpews.build.build`, with all tensors on this rank's device."""
    if experiment.data.name == "sites":
        raise ConfigError(
            "data.name is 'sites': across sites every site is a process of its own, started by `fedpews site`; "
            "torchrun is for clients on your own machines. Run `fedpews flower start` without it."
        )
    local = _with(experiment, device=device_name(experiment.runtime.device, here))
    return replace(build(local, data_dir=data_dir), experiment=experiment)


def _build_engine(setup: Setup, here: Rank) -> tuple[Engine, str]:
    """The engine of one process, with this rank's share of the machine's cores."""
    workers = setup.experiment.runtime.workers or max(1, available_cores() // here.local_world)
    return build_engine(replace(setup, experiment=_with(setup.experiment, workers=workers)))


def _with(experiment: Experiment, **changes: Any) -> Experiment:
    """The experiment with other values in its table ``runtime``."""
    return experiment.model_copy(update={"runtime": experiment.runtime.model_copy(update=changes)})


def _identity(setup: Setup) -> dict[str, Any]:
    """What must be the same at all ranks for equal numbers."""
    return {
        "experiment": setup.experiment.fingerprint(),
        "data": setup.data_hash,
        "version of fedpews": fedpews.__version__,
        "version of torch": torch.__version__,
    }


def _check_alike(setup: Setup, message: Message, rank: int) -> None:
    if message.kind == ERROR:
        raise read_error(message, rank)
    for name, value in _identity(setup).items():
        if message.body[name] != value:
            raise ConfigError(
                f"rank {rank} has another {name} than rank 0; give all ranks the same command, the same data and "
                "the same versions"
            )


def _check_size(setup: Setup, here: Rank) -> None:
    seeds = len(setup.experiment.seeds)
    cohort = setup.experiment.cohort_size(len(setup.data))
    if here.world > cohort * seeds:
        times = f" for each of {seeds} seeds" if seeds > 1 else ""
        raise ConfigError(
            f"{here.world} ranks were started, but a round trains {cohort} clients{times}, so "
            f"{here.world - cohort * seeds} would have nothing to do; start at most {cohort * seeds}"
        )


def _dismiss(group: Group, error: Exception) -> None:
    """Send the other ranks the end of the run; a rank that is gone may be its cause."""
    code = error.exit_code if isinstance(error, FedpewsError) else 1
    try:
        for rank in group.others:
            # an answer first: sending to a process that is gone need not fail
            if isinstance(error, Interrupted):
                group.send(rank, Message(READY))
                group.answer(rank)
            group.send(rank, Message(END, {"code": code}))
    except RankLost as lost:
        # torchrun asks all ranks to stop when one has died, which is not Ctrl-C
        if isinstance(error, Interrupted):
            raise RankLost(f"rank {group.lost[0]} of {group.here.world} is gone; {error}") from lost
