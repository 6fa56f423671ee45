"""The plain engine: each client on one core, one batch after the other."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fedpews.data.federation import Federation
from fedpews.errors import RunFailed
from fedpews.methods.contract import Work
from fedpews.neurons.network import Batch, Network
from fedpews.runtimes.batches import client_seed, draw_batches, draw_noise
from fedpews.runtimes.job import Done, Engine, Job, Local


class EagerEngine(Engine):
    """Clients over threads; torch's kernels leave the interpreter free while they run.

    Every client runs on one core: kernels split over a varying number of cores would add in another order, and
    the numbers would depend on the machine. A network with dropout draws from torch's one global generator,
    so its clients run one after the other.
    """

    def __init__(self, net: Network, data: Federation, local: Local, workers: int) -> None:
        self.net, self.data, self.local = net, data, local
        workers = 1 if net.is_stochastic else workers
        self._pool = ThreadPoolExecutor(workers, "client", initializer=torch.set_num_threads, initargs=(1,))

    def train(self, jobs: Sequence[Job]) -> list[Done]:
        return list(self._pool.map(self._run, jobs))

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self, job: Job) -> Done:
        net, half = self.net, job.half
        rows = self.data.clients[job.client]
        round = job.download.round
        batches = draw_batches(
            len(rows),
            self.local.batch_size,
            epochs=self.local.epochs,
            steps=self.local.steps,
            seed=client_seed(job.seed, round, job.client, "batches"),
        )
        noise = draw_noise(
            len(batches) + 1, half.noise_size(net), client_seed(job.seed, round, job.client, "noise")
        )
        if net.is_stochastic:
            torch.manual_seed(client_seed(job.seed, round, job.client, "torch"))
        local = half.start(net, job.download, job.memory)
        losses = []
        for batch, numbers in zip(batches, noise[:-1], strict=True):
            chosen = rows[batch]
            local, loss = half.step(net, local, Batch(self.data.x[chosen], self.data.y[chosen]), numbers, job.lr)
            losses.append(loss)
        mean = float(torch.stack(losses).mean())
        if mean != mean or mean in (float("inf"), float("-inf")):
            raise RunFailed(
                f"the loss of client {job.client} is no longer finite in round {round} (seed {job.seed}); "
                f"lower train.lr (now {job.lr:g}) or check the inputs' scale"
            )
        work = Work(job.client, len(rows), len(batches), job.lr, mean, noise[-1])
        memory, upload = half.finish(net, job.download, local, work)
        return Done(job.seed, job.client, memory, upload)
