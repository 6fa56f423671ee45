"""The engine whose clients are spread over ranks: each rank trains some of them with the engine it would use alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from fedpews.build import Setup
from fedpews.engines.engine import Diverged, Done, Engine, Job, Part, Score
from fedpews.methods.contract import Download, Upload
from fedpews.ranks.group import LEADER, Group, Message
from fedpews.trees import Tree

Outcomes = Sequence[Done | Diverged]


class RankEngine(Engine):
    """Sends every rank its clients of a round with their memories, and collects the uploads and new memories.

    Numbers depend on a job alone, not on the rank that runs it: the sums are those of one process.
    """

    def __init__(self, group: Group, setup: Setup, local: Engine) -> None:
        self.name = local.name
        self._group, self._setup, self._local = group, setup, local

    def made_with(self) -> dict[str, str]:
        return self._local.made_with()

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        self._local.go_on(made_with, may_change=may_change)

    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: Part = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        return self._local.evaluate(models, seeds, part, owners)

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


def answer(setup: Setup, engine: Engine, message: Message) -> Message:
    """Train the jobs of a request."""
    jobs = []
    for job in message.body["jobs"]:
        download = Download(**job["download"])
        jobs.append(Job(**job | {"download": download, "half": setup.method.client(download.phase)}))
    return Message("done", {"outcomes": [*engine.train(jobs)]})
