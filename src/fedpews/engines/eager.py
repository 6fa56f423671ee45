"""The plain engine, each client on one core, one batch after the other; and a client's start and end on any engine."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.data.federation import Federation
from fedpews.data.inputs import take
from fedpews.engines.engine import Diverged, Done, Engine, Job, Schedule, chunk_size, score_chunk
from fedpews.engines.hardware import keep_freed_memory
from fedpews.engines.pooling import fast_pooling
from fedpews.errors import ConfigError, Interrupted
from fedpews.methods.contract import Work
from fedpews.neurons.modules import channels_last, trains_channels_last
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import fold, global_generator
from fedpews.tasks.metrics import add
from fedpews.torch_private import tree_map_only
from fedpews.trees import Nest, Tree, map_leaves


@dataclass(frozen=True)
class ClientRound:
    """A job whose draws are all made, before its first step."""

    job: Job
    local: Nest
    order: Tensor  # rows of the resident data, batch after batch
    sizes: list[int]  # of each step's batch
    noise: Tensor  # (steps + 1, numbers)


class EagerEngine(Engine):
    """Clients over threads; torch's kernels leave the interpreter free while they run.

    Every client runs on one core by default: kernels split over a varying number of cores would add in another
    order, and the numbers would depend on the machine. A network with dropout draws from torch's one global generator,
    so its clients run one after the other.
    """

    name = "eager"

    def __init__(
        self, net: Network, data: Federation, schedule: Schedule, workers: int, threads: int = 1
    ) -> None:
        self.net, self.data, self.schedule = net, data, schedule
        self.workers = 1 if net.is_stochastic else workers
        self._is_closed = False
        is_cuda = data.device.type == "cuda" and torch.cuda.is_available()
        self._streams = Streams(data.device) if is_cuda else None
        self._channels_last = prefers_channels_last(net.module({})) and net.survives_channels_last
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(
            self.workers, "client", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def train(self, jobs: Sequence[Job]) -> list[Done | Diverged]:
        # the longest first, so that no core is left alone with a large client at the end
        sizes = [len(self.data.clients[job.client]) for job in jobs]
        order = sorted(range(len(jobs)), key=sizes.__getitem__, reverse=True)
        servers_stream = torch.cuda.current_stream(self.data.device) if self._streams else None
        train = partial(self._train_client, servers_stream)
        done = dict(zip(order, self._pool.map(train, map(jobs.__getitem__, order)), strict=True))
        return list(map(done.__getitem__, range(len(jobs))))

    def close(self) -> None:
        # after an exception clients may still be training: the caller waits for a step, not for a round
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    def _train_client(self, servers_stream: Any, job: Job) -> Done | Diverged:
        net, names = self.net.at(job.seed), (job.seed, job.download.round, job.client)
        drawing = global_generator(fold(*names, "torch")) if self.net.is_stochastic else nullcontext()
        queued = self._streams.behind(servers_stream) if self._streams else nullcontext()
        with queued, drawing, fast_pooling(net):
            started = start(net, self.data, self.schedule, job)
            local, losses = started.local, []
            if self._channels_last:  # the kernels' own order, so they copy nothing
                local = map_leaves(channels_last, local)
            steps = zip(started.order.split(started.sizes), started.noise[:-1], strict=True)
            for step, (rows, noise) in enumerate(steps):
                if self._is_closed:
                    raise Interrupted("the engine was closed in the middle of a round")
                batch = Batch(take(self.data.x, rows), self.data.y[rows])
                if self.schedule.augment is not None:
                    batch = self.schedule.augment(batch, fold(*names, f"augment {step}"))
                if self._channels_last:
                    batch = batch._replace(x=tree_map_only(Tensor, channels_last, batch.x))
                local, loss = job.half.step(net, local, batch, noise, job.lr)
                losses.append(loss)
            if self._channels_last:
                local = map_leaves(Tensor.contiguous, local)
            # not every device has double precision
            mean = float(torch.stack(losses).cpu().double().mean())
            return finish(net, self.data, started, local, mean)


def prefers_channels_last(module: nn.Module) -> bool:
    """Whether a module has convolutions, and none of them is faulty or slow with channels last.

    Convolutions that read a single channel (of grey images) are slow with it, by more than the later layers gain: the
    network of the FEMNIST benchmarks takes a fifth longer.
    """
    reads = [layer.in_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return bool(reads) and min(reads) > 1 and trains_channels_last(module)


class Streams:
    """The streams of an engine's threads.

    A client's kernels wait for what the server queued before it, and the server goes on when they are done. So memory
    that the server frees is not written to by a client before the server's kernels have read it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = threading.local()

    @contextmanager
    def behind(self, server: Any) -> Iterator[None]:
        """While this lasts, this thread's kernels run on its own stream, behind what ``server`` has queued by now."""
        stream = getattr(self._own, "stream", None)
        if stream is None:
            stream = self._own.stream = torch.cuda.Stream(self._device)
        stream.wait_stream(server)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def batch_sizes(samples: int, schedule: Schedule, least: int = 1) -> list[int]:
    """The sizes of a client's batches in a round, one for each step.

    Every epoch visits every sample once; its last batch may be smaller, but one of fewer than ``least`` samples joins
    the batch before it. With ``steps`` there are as many epochs as the steps need.

    >>> batch_sizes(5, Schedule(batch_size=2)), batch_sizes(5, Schedule(batch_size=2), least=2)
    ([2, 2, 1], [2, 3])
    """
    full, rest = divmod(samples, schedule.batch_size)
    epoch = [schedule.batch_size] * full + [rest] * (rest > 0)
    if full and 0 < rest < least:
        epoch[-2:] = [sum(epoch[-2:])]
    steps = schedule.steps or (schedule.epochs or 1) * len(epoch)
    return (epoch * -(-steps // len(epoch)))[:steps]


def start(net: Network, data: Federation, schedule: Schedule, job: Job) -> ClientRound:
    """Start a client: its batches, its random numbers and its local state."""
    rows = data.clients[job.client]
    names = (job.seed, job.download.round, job.client)
    sizes = batch_sizes(len(rows), schedule, net.least_batch)
    if min(sizes) < net.least_batch:
        what = f"client {job.client} has one" if len(rows) == 1 else "train.batch_size is 1"
        raise ConfigError(
            f"the model's BatchNorm cannot train on a single sample, and {what}; use larger batches, leave such "
            "clients out, or use another norm layer"
        )
    # drawn on the CPU, so that the numbers are the same everywhere, and moved once a round
    generator = torch.Generator().manual_seed(fold(*names, "batches"))
    samples, drawn = len(rows), sum(sizes)
    epochs = [torch.randperm(samples, generator=generator) for _ in range(-(-drawn // samples))]
    order = (torch.cat(epochs) if len(epochs) > 1 else epochs[0])[:drawn].to(rows.device)
    # (steps + 1, numbers): a row for each step, and one for what follows the last
    noise = torch.empty(len(sizes) + 1, job.half.noise_size(net))
    if noise.numel():
        noise.uniform_(generator=torch.Generator().manual_seed(fold(*names, "noise")))
    download = job.download
    if job.half.probes:
        probe = job.half.probe(net, download, job.memory)
        download = download.with_accuracy(accuracy_on(net, probe, data, rows))
    local = job.half.start(net, download, job.memory)
    return ClientRound(job, local, rows.index_select(0, order), sizes, noise.to(rows.device))


def finish(net: Network, data: Federation, started: ClientRound, local: Nest, loss: float) -> Done | Diverged:
    """Finish a client after its last step; ``loss`` is the mean over its steps."""
    job = started.job
    if not math.isfinite(loss):
        return Diverged(job.seed, job.client, "its loss is no longer finite")
    samples = len(data.clients[job.client])
    work = Work(job.client, samples, len(started.sizes), job.lr, loss, started.noise[-1])
    memory, upload = job.half.finish(net, job.download, local, work)
    return Done(job.seed, job.client, memory, upload)


def accuracy_on(net: Network, params: Tree, data: Federation, rows: Tensor) -> float:
    """The accuracy of a model on these training samples."""
    task = data.task
    if "accuracy" not in task.METRICS:
        raise ConfigError(f"this method needs a client's training accuracy, which {task.name} does not have")
    sums = [score_chunk(net, params, data, "validation", chunk) for chunk in rows.split(chunk_size(net))]
    return replace(task, metrics=("accuracy",)).measure(reduce(add, sums))["accuracy"] or 0.0
