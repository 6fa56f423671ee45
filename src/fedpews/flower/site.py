"""One site's part of a round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fedpews.data.federation import Federation
from fedpews.engines.eager import EagerEngine
from fedpews.engines.engine import Job, Schedule
from fedpews.flower.memory import MemoryLost, SiteMemory
from fedpews.flower.messages import Task
from fedpews.methods.contract import Method
from fedpews.methods.wire import decode_download, encode_upload
from fedpews.neurons.network import Network


@dataclass(frozen=True)
class Site:
    """Everything a site needs to train: its number, its own data, and the method it agreed to run."""

    number: int
    net: Network
    method: Method
    data: Federation  # of all clients only this site's rows are used
    schedule: Schedule
    memory: Callable[[str], SiteMemory]  # by the name of the run
    restart_lost: bool = False  # begin anew when the memory is gone

    def train(self, task: Task) -> dict[int, bytes]:
        """The encoded upload for each seed. The memory is on disk before any of them is sent."""
        memory = self.memory(task.run)
        jobs = []
        for part in task.parts:
            download = decode_download(self.net, part.data)
            try:
                kept = memory.read(part.seed, part.accepted)
            except MemoryLost:
                if not self.restart_lost:
                    raise
                kept = None
            half = self.method.client(download.phase)
            jobs.append(Job(part.seed, self.number, half, download, kept, task.lr))
        engine = EagerEngine(self.net, self.data, self.schedule, workers=1)
        try:
            finished = engine.train(jobs)
        finally:
            engine.close()
        for part, done in zip(task.parts, finished, strict=True):
            memory.write(part.seed, task.round, done.memory, part.kept)
        return {done.seed: encode_upload(self.net, done.upload) for done in finished}

    def evaluate(self, task: Task) -> list[tuple[int, int, float]]:
        """For each model: right answers, samples and summed loss on the site's own test samples."""
        if not len(self.data.test_y):
            return [(0, 0, 0.0)] * len(task.parts)
        models = [decode_download(self.net, part.data).params for part in task.parts]
        engine = EagerEngine(self.net, self.data, self.schedule, workers=1)
        try:
            scores = engine.evaluate(models, [part.seed for part in task.parts])
        finally:
            engine.close()
        return [score.counts() for score in scores]

    def evaluate_personal(self, task: Task) -> float:
        """The accuracy of this site's own model on its own test samples, or on the classes it has."""
        (part,) = task.parts
        download = decode_download(self.net, part.data)
        memory = self.memory(task.run).read(part.seed, part.accepted)
        if memory is None:
            raise MemoryLost(f"site {self.number} has no memory to make its own model of")
        model = self.method.client(download.phase).personal(self.net.at(part.seed), download, memory)
        engine = EagerEngine(self.net, self.data, self.schedule, workers=1)
        try:
            (score,) = engine.evaluate([model], [part.seed])
        finally:
            engine.close()
        return score.client_accuracy(self.data.counts())[self.number]
