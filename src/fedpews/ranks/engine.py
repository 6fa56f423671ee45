"""The engine whose clients are spread over ranks: each trains its share with the engine it would use alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from fedpews.build import Setup
from fedpews.engines.diverging import explain
from fedpews.engines.engine import Diverged, Done, Engine, Job
from fedpews.engines.evaluate import Part, Score
from fedpews.errors import RunFailed
from fedpews.methods.contract import Download
from fedpews.ranks.group import LEADER, Group
from fedpews.ranks.memories import RankMemories
from fedpews.ranks.packing import Message, join_upload
from fedpews.ranks.share import Key, Order, Share
from fedpews.trees import Nest, Tree


class RankEngine(Engine):
    """Hands every rank its part of a round, and puts the uploads together again.

    Numbers depend on a job alone, so it does not matter who does it: the leader adds up what one process would.
    """

    def __init__(self, group: Group, setup: Setup, local: Engine, memories: RankMemories) -> None:
        self.name = local.name
        self._group, self._setup, self._memories = group, setup, memories
        self._share = memories.share = Share(setup, local)

    def made_with(self) -> dict[str, str]:
        return self._share.engine.made_with()

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        self._share.engine.go_on(made_with, may_change=may_change)

    def train(self, jobs: Sequence[Job]) -> list[Done | Diverged]:
        ranks = self._assign([(job.seed, job.client) for job in jobs])
        orders: dict[int, _Parts] = {}
        for job, rank in zip(jobs, ranks, strict=True):
            key = job.seed, job.client
            self._hand_over(orders.setdefault(rank, _Parts()), key, job.download, rank)
        answers = self._ask(
            "train", {r: Order(part.downloads, part.memories, jobs[0].lr) for r, part in orders.items()}
        )
        done: dict[Key, Done] = {}
        for rank, answer in answers.items():
            for place, told in enumerate(answer.about["done"]):
                upload = join_upload(told["upload"], answer.tensors[str(place)])
                key = told["seed"], upload.client
                done[key] = Done(*key, {}, upload)
                self._memories.changed(key, rank, told["keeps"])
        lost = [Diverged(*told) for answer in answers.values() for told in answer.about["diverged"]]
        seeds = {job.seed for job in jobs}
        if lost and (self._setup.experiment.train.diverged == "stop" or {seed for seed, _ in done} != seeds):
            # the others' memories of this round are at their ranks already, so the round before cannot be saved
            raise RunFailed(str(explain(lost, jobs)))
        outcomes: dict[Key, Done | Diverged] = {**done, **{(one.seed, one.client): one for one in lost}}
        return [outcomes[job.seed, job.client] for job in jobs]

    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: Part = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        return self._share.engine.evaluate(models, seeds, part, owners)

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            client
            for client in clients
            if self._memories.home((seed, client)) is not None
            or self._memories.saved((seed, client)) is not None
        )

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        keys = [(seed, client) for client in downloads]
        orders: dict[int, _Parts] = {}
        for key, rank in zip(keys, self._assign(keys), strict=True):
            self._hand_over(orders.setdefault(rank, _Parts()), key, downloads[key[1]], rank)
        answers = self._ask("personal", {r: Order(p.downloads, p.memories) for r, p in orders.items()})
        found = {client: value for each in answers.values() for _, client, value in each.about["found"]}
        return {client: found[client] for client in downloads if client in found}

    def close(self) -> None:
        # with a rank lost, a thread may still be training; the process ends without waiting for it
        if not self._group.lost:
            self._share.close()

    def _assign(self, keys: Sequence[Key]) -> list[int]:
        """The rank of each client: where its memory is, or else where there is least to do."""
        ranks = {key: home for key in keys if (home := self._memories.home(key)) is not None}
        loads = [0] * self._group.place.world
        for key, rank in ranks.items():
            loads[rank] += self._work(key)
        # the longest first, as they are the hardest to fit in
        for key in sorted(keys, key=self._work, reverse=True):
            if key not in ranks:
                ranks[key] = loads.index(min(loads))
                loads[ranks[key]] += self._work(key)
        return [ranks[key] for key in keys]

    def _work(self, key: Key) -> int:
        """How long a client takes, in units of its own."""
        return 1 if self._setup.experiment.train.steps else len(self._setup.data.clients[key[1]])

    def _hand_over(self, part: _Parts, key: Key, download: Download, rank: int) -> None:
        part.downloads[key] = download
        memory = self._memories.saved(key)
        if memory is not None:
            part.memories[key] = memory
            self._memories.settle(key, rank)

    def _ask(self, kind: str, orders: Mapping[int, Order]) -> dict[int, Message]:
        """All ranks' answers, by rank; whichever fails first ends the waiting."""
        for rank, order in orders.items():
            if rank != LEADER:
                self._group.send(rank, order.message(kind))
        ended: SimpleQueue[tuple[int, Message | Exception]] = SimpleQueue()

        def wait_for(rank: int, answer: Callable[[], Message]) -> None:
            try:
                ended.put((rank, answer()))
            except Exception as error:  # noqa: BLE001 - raised again by whoever waits
                ended.put((rank, error))

        for rank, order in orders.items():
            mine = self._share.train if kind == "train" else self._share.personal
            todo = partial(mine, order) if rank == LEADER else partial(self._group.answer, rank)
            # daemons: after a failure nobody waits for what the others may still be doing
            threading.Thread(target=wait_for, args=(rank, todo), daemon=True).start()
        answers: dict[int, Message] = {}
        for _ in orders:
            rank, answer = ended.get()
            if isinstance(answer, Exception):
                raise answer
            answers[rank] = answer
        return dict(sorted(answers.items()))


@dataclass(frozen=True)
class _Parts:
    """An order in the making."""

    downloads: dict[Key, Download] = field(default_factory=dict)
    memories: dict[Key, Nest] = field(default_factory=dict)
