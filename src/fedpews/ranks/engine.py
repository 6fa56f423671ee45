"""The engine whose clients are spread over ranks: each rank trains its share with the engine it would use alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from fedpews.build import Setup
from fedpews.engines.diverging import explain
from fedpews.engines.engine import Diverged, Done, Engine, Job
from fedpews.engines.evaluate import Part, Score
from fedpews.errors import RankLost, RunFailed
from fedpews.methods.contract import Download
from fedpews.ranks.group import LEADER, Group, Message, join_upload
from fedpews.ranks.share import Key, Order, Share
from fedpews.results.memories import MemoryStore, Version
from fedpews.trees import Nest, Tree

COLLECTED = 32
"""Memories that a rank hands over in one message."""


class RankMemories:
    """The leader's view of all memories, for checkpoints.

    A client with a memory stays at its rank, so the memory does not travel. When the run is saved, those that changed
    are handed to the leader, which writes them as it would alone: a run goes on with any number of ranks, or one.
    A rank that dies takes with it what its clients learned since, so such a run goes on from that checkpoint.
    """

    def __init__(self, group: Group, saved: MemoryStore) -> None:
        self._group, self._saved = group, saved
        self.share: Share | None = None
        """The leader's own share of the work."""
        self._homes: dict[Key, int] = {}
        self._changed: dict[Key, None] = {}  # since the last checkpoint; an ordered set

    def restore(self, saved: Mapping[str, Version]) -> None:
        self._saved.restore(saved)

    def get(self, seed: int, client: int) -> Nest | None:
        """Nothing: whoever trains the client has it."""
        return None

    def put(self, seed: int, client: int, memory: Nest) -> None:
        """Nothing to do: it was kept where the client was trained."""

    def home(self, key: Key) -> int | None:
        """The rank that has a client's memory; None if the client may go to any."""
        return self._homes.get(key)

    def saved(self, key: Key) -> Nest | None:
        """The memory of a client that has no rank yet, from the checkpoint that the run goes on from."""
        return None if key in self._homes else self._saved.get(*key)

    def settle(self, key: Key, rank: int) -> None:
        """The client's memory is at a rank from now on."""
        self._homes[key] = rank

    def changed(self, key: Key, rank: int, keeps: bool) -> None:
        """A round is complete in which this client was trained; ``keeps`` says whether it has a memory."""
        if keeps or key in self._homes:
            self._homes[key] = rank
            self._changed[key] = None

    def commit(self) -> dict[str, Version]:
        """Collect what changed, and write it."""
        # whatever a rank still had to say of its clients is unknown now, also where it was only asked to evaluate them
        if self._homes and self._group.lost:
            raise RankLost(
                f"rank {self._group.lost[0]} of {self._group.place.world} is gone, and the memories of its clients "
                "with it; go on from the last checkpoint with the same command and --resume, with any number of ranks"
            )
        for rank in range(self._group.place.world):
            here = [key for key in self._changed if self._homes[key] == rank]
            for first in range(0, len(here), COLLECTED):
                self._collect(rank, here[first : first + COLLECTED])
        self._changed = {}
        return self._saved.commit()

    def keep(self, files: Collection[str]) -> None:
        self._saved.keep(files)

    def _collect(self, rank: int, keys: Sequence[Key]) -> None:
        if rank == LEADER:
            assert self.share is not None
            held = self.share.recall(keys).tensors
        else:
            self._group.send(rank, Message("memories", {"clients": list(keys)}))
            held = self._group.answer(rank).tensors
        for key in keys:
            self._saved.put(*key, held[f"{key[0]}-{key[1]}"])


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
