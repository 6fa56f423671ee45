"""The plain engine: each client on one core, one batch after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fedpews.data.federation import Federation
from fedpews.errors import RunFailed
from fedpews.methods.contract import Work
from fedpews.neurons.network import Batch, Network
from fedpews.runtimes.batches import client_seed, draw_batches, draw_noise
from fedpews.runtimes.evaluate import Score, score_models
from fedpews.runtimes.job import Done, Engine, Job, Schedule
from fedpews.trees import Tree


class EagerEngine(Engine):
    """Clients over threads; torch's kernels leave the interpreter free while they run.

    Every client runs on one core: kernels split over a varying number of cores would add in another order, and
    the numbers would depend on the machine. A network with dropout draws from torch's one global generator,
    so its clients run one after the other.
    """

    name = "eager"

    def __init__(self, net: Network, data: Federation, schedule: Schedule, workers: int) -> None:
        self.net, self.data, self.schedule = net, data, schedule
        self.workers = 1 if net.is_stochastic else workers
        self._pool = ThreadPoolExecutor(
            self.workers, "client", initializer=torch.set_num_threads, initargs=(1,)
        )

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        return list(self._pool.map(self._run, jobs))

    def evaluate(self, models: Sequence[Tree]) -> list[Score]:
        return score_models(self.net, models, self.data, self._pool)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self, job: Job) -> Done:
        net, half, device = self.net, job.half, self.data.x.device
        rows = self.data.clients[job.client]
        names = (job.seed, job.download.round, job.client)
        batches = draw_batches(len(rows), self.schedule, client_seed(*names, "batches"))
        noise = draw_noise(len(batches) + 1, half.noise_size(net), client_seed(*names, "noise")).to(device)
        if net.is_stochastic:
            torch.manual_seed(client_seed(*names, "torch"))
        local = half.start(net, job.download, job.memory)
        losses = []
        for batch, numbers in zip(batches, noise[:-1], strict=True):
            chosen = rows[batch]
            samples = Batch(self.data.x[chosen], self.data.y[chosen])
            local, loss = half.step(net, local, samples, numbers, job.lr)
            losses.append(loss)
        mean = mean_loss(job, torch.stack(losses))
        work = Work(job.client, len(rows), len(batches), job.lr, mean, noise[-1])
        memory, upload = half.finish(net, job.download, local, work)
        return Done(job.seed, job.client, memory, upload)


def mean_loss(job: Job, losses: torch.Tensor) -> float:
    """The mean over a client's steps, or the end of the run when it is no longer a number."""
    mean = float(losses.double().mean())
    if not math.isfinite(mean):
        raise RunFailed(
            f"the loss of client {job.client} is no longer finite in round {job.download.round} "
            f"(seed {job.seed}); lower train.lr (now {job.lr:g}) or check the inputs' scale"
        )
    return mean
