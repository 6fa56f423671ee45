"""The engine whose clients are spread over ranks: each rank trains its share with the engine it would use alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from queue import SimpleQueue

from fedpews.build import Setup
from fedpews.engines.diverging import explain
from fedpews.engines.engine import Diverged, Done, Engine, Job
from fedpews.engines.evaluate import Part, Score
from fedpews.errors import RankLost, RunFailed
from fedpews.methods.contract import Download
from fedpews.ranks.group import LEADER, Group, Message, join_upload
from fedpews.ranks.share import Key, Order, Worker
from fedpews.results.memories import MemoryStore, Version
from fedpews.trees import Nest, Tree

COLLECTED = 32
"""Memories that a rank sends in one message."""


class RankMemories:
    """The first rank's view of all memories, for checkpoints.

    A client with a memory stays at its rank, so the memory is not sent. For a checkpoint, memories that changed are
    sent to the first rank, which writes them as it would alone: a run is resumed with any number of ranks.
    If a rank dies, the changes since the last checkpoint are lost, so the run continues from that checkpoint.
    """

    def __init__(self, group: Group, saved: MemoryStore) -> None:
        self._group, self._saved = group, saved
        self.share: Worker | None = None
        """The first rank's worker."""
        self._homes: dict[Key, int] = {}
        self._changed: dict[Key, None] = {}  # since the last checkpoint; an ordered set

    def restore(self, saved: Mapping[str, Version]) -> None:
        self._saved.restore(saved)

    def get(self, seed: int, client: int) -> Nest | None:
        """None: the rank that trains the client has it."""
        return None

    def put(self, seed: int, client: int, memory: Nest) -> None:
        """Do nothing: the rank that trained the client has kept it."""

    def home(self, key: Key) -> int | None:
        """The rank that has a client's memory; None if any rank may train the client."""
        return self._homes.get(key)

    def saved(self, key: Key) -> Nest | None:
        """The memory of a client that has no rank yet, from the checkpoint of a resumed run."""
        return None if key in self._homes else self._saved.get(*key)

    def settle(self, key: Key, rank: int) -> None:
        """The client's memory is at a rank from now on."""
        self._homes[key] = rank

    def changed(self, key: Key, rank: int, keeps: bool) -> None:
        """Note that a rank trained this client; ``keeps`` is whether the client has a memory."""
        if keeps or key in self._homes:
            self._homes[key] = rank
            self._changed[key] = None

    def commit(self) -> dict[str, Version]:
        """Collect what changed, and write it."""
        # the memories of a lost rank are unknown, even if it was lost while it evaluated
        if self._homes and self._group.lost:
            raise RankLost(
                f"rank {self._group.lost[0]} of {self._group.here.world} is gone, and the memories of its clients "
                "with it; continue from the last checkpoint: the same command and --resume, with any number of ranks"
            )
        for rank in range(self._group.here.world):
            keys = [key for key in self._changed if self._homes[key] == rank]
            for first in range(0, len(keys), COLLECTED):
                self._collect(rank, keys[first : first + COLLECTED])
        self._changed = {}
        return self._saved.commit()

    def keep(self, files: Collection[str]) -> None:
        self._saved.keep(files)

    def _collect(self, rank: int, keys: Sequence[Key]) -> None:
        if rank == LEADER:
            assert self.share is not None
            memories = self.share.recall(keys).tensors
        else:
            self._group.send(rank, Message("memories", {"clients": list(keys)}))
            memories = self._group.answer(rank).tensors
        for key in keys:
            self._saved.put(*key, memories[f"{key[0]}-{key[1]}"])


class RankEngine(Engine):
    """Sends every rank its clients of a round, and collects the uploads.

    Numbers depend on a job alone, not on the rank that runs it: the sums are those of one process.
    """

    def __init__(self, group: Group, setup: Setup, local: Engine, memories: RankMemories) -> None:
        self.name = local.name
        self._group, self._setup, self._memories = group, setup, memories
        self._share = memories.share = Worker(setup, local)

    def made_with(self) -> dict[str, str]:
        return self._share.engine.made_with()

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        self._share.engine.go_on(made_with, may_change=may_change)

    def train(self, jobs: Sequence[Job]) -> list[Done | Diverged]:
        downloads = {(job.seed, job.client): job.download for job in jobs}
        answers = self._ask("train", self._orders(downloads, jobs[0].lr))
        done: dict[Key, Done] = {}
        for rank, answer in answers.items():
            for i, finished in enumerate(answer.about["done"]):
                upload = join_upload(finished["upload"], answer.tensors[str(i)])
                key = finished["seed"], upload.client
                done[key] = Done(*key, {}, upload)
                self._memories.changed(key, rank, finished["keeps"])
        lost = [Diverged(*fields) for answer in answers.values() for fields in answer.about["diverged"]]
        seeds = {job.seed for job in jobs}
        if lost and (self._setup.experiment.train.diverged == "stop" or {seed for seed, _ in done} != seeds):
            # the other clients' memories of this round are kept already, so the round before cannot be saved
            raise RunFailed(str(explain(lost, jobs)))
        outcomes: dict[Key, Done | Diverged] = {**done, **{(bad.seed, bad.client): bad for bad in lost}}
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
        by_key = {(seed, client): download for client, download in downloads.items()}
        answers = self._ask("personal", self._orders(by_key))
        metrics = {client: value for each in answers.values() for _, client, value in each.about["metrics"]}
        return {client: metrics[client] for client in downloads if client in metrics}

    def close(self) -> None:
        # if a rank is lost, a thread may still be training; the process ends without waiting for it
        if not self._group.lost:
            self._share.close()

    def _orders(self, downloads: Mapping[Key, Download], lr: float = 0.0) -> dict[int, Order]:
        """By rank, the clients it trains, each with its memory if the rank does not have it yet."""
        orders: dict[int, Order] = {}
        for key, rank in self._assign([*downloads]).items():
            order = orders.setdefault(rank, Order({}, {}, lr))
            order.downloads[key] = downloads[key]
            memory = self._memories.saved(key)
            if memory is not None:
                order.memories[key] = memory
                self._memories.settle(key, rank)
        return orders

    def _assign(self, keys: Sequence[Key]) -> dict[Key, int]:
        """The rank of each client: where its memory is, or else the rank with the least work."""
        ranks = {key: home for key in keys if (home := self._memories.home(key)) is not None}
        loads = [0] * self._group.here.world
        for key, rank in ranks.items():
            loads[rank] += self._work(key)
        # the longest first, as they are the hardest to fit in
        for key in sorted(keys, key=self._work, reverse=True):
            if key not in ranks:
                ranks[key] = loads.index(min(loads))
                loads[ranks[key]] += self._work(key)
        return {key: ranks[key] for key in keys}

    def _work(self, key: Key) -> int:
        """The time of a client, in any unit."""
        return 1 if self._setup.experiment.train.steps else len(self._setup.data.clients[key[1]])

    def _ask(self, kind: str, orders: Mapping[int, Order]) -> dict[int, Message]:
        """All ranks' answers, by rank; the first failure is raised at once."""
        for rank, order in orders.items():
            if rank != LEADER:
                self._group.send(rank, order.message(kind))
        ended: SimpleQueue[tuple[int, Message | Exception]] = SimpleQueue()

        def wait_for(rank: int, answer: Callable[[], Message]) -> None:
            try:
                ended.put((rank, answer()))
            except Exception as error:  # noqa: BLE001 - raised again by the thread that waits
                ended.put((rank, error))

        for rank, order in orders.items():
            mine = self._share.train if kind == "train" else self._share.personal
            todo = partial(mine, order) if rank == LEADER else partial(self._group.answer, rank)
            # daemons: after a failure the other ranks' answers are not waited for
            threading.Thread(target=wait_for, args=(rank, todo), daemon=True).start()
        answers: dict[int, Message] = {}
        for _ in orders:
            rank, answer = ended.get()
            if isinstance(answer, Exception):
                raise answer
            answers[rank] = answer
        return dict(sorted(answers.items()))
