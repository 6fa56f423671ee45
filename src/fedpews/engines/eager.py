"""The plain engine: each client on one core, one batch after the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedpews.data.federation import Federation
from fedpews.engines.client_round import finish, start
from fedpews.engines.engine import Diverged, Done, Engine, Job, Schedule
from fedpews.engines.hardware import keep_freed_memory
from fedpews.errors import Interrupted
from fedpews.neurons.modules import channels_last, trains_channels_last
from fedpews.neurons.network import Batch, Network
from fedpews.seeds import fold, global_generator
from fedpews.torch_private import tree_map_only
from fedpews.trees import map_leaves


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
        self._streams = Streams(data.device)
        self._channels_last = prefers_channels_last(net.module(net.initial())) and net.survives_channels_last
        keep_freed_memory()
        self._pool = ThreadPoolExecutor(
            self.workers, "client", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def train(self, jobs: Sequence[Job]) -> list[Done | Diverged]:
        # the longest first, so that no core is left alone with a large client at the end
        sizes = [len(self.data.clients[job.client]) for job in jobs]
        order = sorted(range(len(jobs)), key=sizes.__getitem__, reverse=True)
        train = partial(self._train_client, self._streams.servers())
        done = dict(zip(order, self._pool.map(train, map(jobs.__getitem__, order)), strict=True))
        return list(map(done.__getitem__, range(len(jobs))))

    def close(self) -> None:
        # after an exception clients may still be training: the caller waits for a step, not for a round
        self._is_closed = True
        self._pool.shutdown(cancel_futures=True)

    def _train_client(self, servers_stream: Any, job: Job) -> Done | Diverged:
        net, names = self.net.at(job.seed), (job.seed, job.download.round, job.client)
        drawing = global_generator(fold(*names, "torch")) if self.net.is_stochastic else nullcontext()
        queued = nullcontext() if servers_stream is None else self._streams.behind(servers_stream)
        with queued, drawing:
            started = start(net, self.data, self.schedule, job)
            local, losses = started.local, []
            if self._channels_last:  # the kernels' own order, so they copy nothing
                local = map_leaves(channels_last, local)
            steps = zip(started.order.split(started.sizes), started.noise[:-1], strict=True)
            for step, (rows, noise) in enumerate(steps):
                if self._is_closed:
                    raise Interrupted("the engine was closed in the middle of a round")
                batch = Batch(*self.data.batch(rows))
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

    def servers(self) -> Any:
        """The stream of the calling thread; None on a device without streams."""
        is_cuda = self._device.type == "cuda" and torch.cuda.is_available()
        return torch.cuda.current_stream(self._device) if is_cuda else None

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
