"""The work of one rank: it trains clients with the engine it would use alone, and keeps their memories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedpews.build import Setup
from fedpews.engines.diverging import sort_out
from fedpews.engines.engine import Engine, Job
from fedpews.measure import score_personal
from fedpews.methods.contract import Download
from fedpews.ranks.group import Message, download_parts, join_download, upload_parts
from fedpews.results.memories import MemoryStore
from fedpews.trees import Nest, nest_bytes

Key = tuple[int, int]
"""Seed and client."""


@dataclass(frozen=True)
class Order:
    """A request of the first rank: clients to train or to evaluate.

    A memory is sent only if the rank does not have it: after a resume, which may be on other ranks.
    """

    downloads: dict[Key, Download]
    memories: dict[Key, Nest] = field(default_factory=dict)
    lr: float = 0.0

    def message(self, kind: str) -> Message:
        """The order as a message. A download that several clients share is sent once."""
        distinct = {id(download): download for download in self.downloads.values()}
        number = {key: str(i) for i, key in enumerate(distinct)}
        parts = {number[key]: download_parts(download) for key, download in distinct.items()}
        about = {
            "clients": [(*key, number[id(download)]) for key, download in self.downloads.items()],
            "downloads": {name: about for name, (about, _) in parts.items()},
            "lr": self.lr,
        }
        tensors: Nest = {
            "downloads": {name: nest for name, (_, nest) in parts.items()},
            "memories": {f"{seed}-{client}": memory for (seed, client), memory in self.memories.items()},
        }
        return Message(kind, about, tensors)

    @classmethod
    def read(cls, message: Message) -> Order:
        """The inverse of ``message``."""
        about, tensors = message.about, message.tensors
        made = {
            name: join_download(fields, tensors["downloads"][name])
            for name, fields in about["downloads"].items()
        }
        downloads = {(seed, client): made[name] for seed, client, name in about["clients"]}
        sent = tensors["memories"]
        memories = {key: sent[f"{key[0]}-{key[1]}"] for key in downloads if f"{key[0]}-{key[1]}" in sent}
        return cls(downloads, memories, about["lr"])


class Worker:
    """The work of a rank in a run. Its answers are messages, on the first rank as on the others."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup, self.engine = setup, engine
        self.memories = MemoryStore(None, setup.net.device)
        self._answers: dict[str, Callable[[Message], Message]] = {
            "train": lambda message: self.train(Order.read(message)),
            "personal": lambda message: self.personal(Order.read(message)),
            "memories": lambda message: self.recall([(s, c) for s, c in message.about["clients"]]),
        }

    def answer(self, message: Message) -> Message:
        """The answer to a request."""
        return self._answers[message.kind](message)

    def train(self, order: Order) -> Message:
        """These clients' uploads; their memories stay here."""
        self._take(order)
        jobs = [
            Job(
                *key,
                self.setup.method.client(download.phase),
                download,
                self.memories.get(*key),
                order.lr,
            )
            for key, download in order.downloads.items()
        ]
        finished: list[dict[str, Any]] = []
        uploads: Nest = {}
        # here, where the memories are checked too; a client that diverges keeps its memory
        good, bad = sort_out(self.setup.net, self.engine.train(jobs))
        for i, done in enumerate(good):
            self.memories.put(done.seed, done.client, done.memory)
            about, uploads[str(i)] = upload_parts(done.upload)
            keeps = nest_bytes(done.memory) is not None
            finished.append({"seed": done.seed, "keeps": keeps, "upload": about})
        diverged = [[one.seed, one.client, one.reason] for one in bad]
        return Message("done", {"done": finished, "diverged": diverged}, uploads)

    def personal(self, order: Order) -> Message:
        """The metric of each client's personal model, which is made with its memory."""
        self._take(order)
        metrics: list[tuple[int, int, float]] = []
        for seed in {seed for seed, _ in order.downloads}:
            net = self.setup.net.at(seed)
            models = {}
            for key, download in order.downloads.items():
                memory = self.memories.get(*key)
                if key[0] == seed and memory is not None:
                    half = self.setup.method.client(download.phase)
                    models[key[1]] = half.personal(net, download, memory)
            scores = score_personal(self.engine, self.setup.data, seed, models)
            metrics += [(seed, client, value) for client, value in scores.items()]
        return Message("personal", {"metrics": metrics})

    def recall(self, keys: Sequence[Key]) -> Message:
        """These clients' memories, for a checkpoint."""
        return Message("memories", {}, {f"{s}-{c}": self.memories.get(s, c) or {} for s, c in keys})

    def close(self) -> None:
        self.engine.close()

    def _take(self, order: Order) -> None:
        for key, memory in order.memories.items():
            self.memories.put(*key, memory)
