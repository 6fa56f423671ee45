"""One client's part of a round on any engine: its batches and random numbers, its start and its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.engine import Diverged, Done, Job, Schedule
from fedpews.engines.evaluate import chunk_size, score_chunk
from fedpews.errors import ConfigError
from fedpews.methods.contract import Work
from fedpews.neurons.network import Network
from fedpews.seeds import fold
from fedpews.tasks.metrics import add
from fedpews.trees import Nest, Tree


def draw_order(samples: int, schedule: Schedule, seed: int, least: int = 1) -> tuple[Tensor, list[int]]:
    """The indices of a client's samples, batch after batch, and the sizes of the batches.

    Every epoch visits every sample exactly once; its last batch may be smaller. With ``steps`` there are as many
    epochs as the steps need. A last batch of fewer than ``least`` samples joins the one before it.

    >>> draw_order(5, Schedule(batch_size=2), seed=0)[1]
    [2, 2, 1]
    >>> draw_order(5, Schedule(batch_size=2), seed=0, least=2)[1]
    [2, 3]
    """
    generator = torch.Generator().manual_seed(seed)
    full, rest = divmod(samples, schedule.batch_size)
    epoch = [schedule.batch_size] * full + [rest] * (rest > 0)
    if len(epoch) > 1 and epoch[-1] < least:
        epoch[-2:] = [sum(epoch[-2:])]
    wanted = count_steps(samples, schedule, least)
    epochs = -(-wanted // len(epoch))
    sizes = (epoch * epochs)[:wanted]
    orders = [torch.randperm(samples, generator=generator) for _ in range(epochs)]
    order = torch.cat(orders) if epochs > 1 else orders[0]
    return order[: sum(sizes)], sizes


def count_steps(samples: int, schedule: Schedule, least: int = 1) -> int:
    """How many steps a client with so many samples takes in a round; ``least`` as in ``draw_order``.

    >>> count_steps(5, Schedule(batch_size=2, epochs=2)), count_steps(5, Schedule(batch_size=2), least=2)
    (6, 2)
    """
    full, rest = divmod(samples, schedule.batch_size)
    joined = full > 0 and 0 < rest < least
    return schedule.steps or (schedule.epochs or 1) * (full + (rest > 0) - joined)


@dataclass(frozen=True)
class ClientRound:
    """A job whose draws are all made, before its first step."""

    job: Job
    local: Nest
    order: Tensor  # rows of the resident data, batch after batch
    sizes: list[int]  # of each step's batch
    noise: Tensor  # (steps + 1, numbers)


def start(net: Network, data: Federation, schedule: Schedule, job: Job) -> ClientRound:
    """Start a client: its batches, its random numbers and its local state."""
    rows = data.clients[job.client]
    names = (job.seed, job.download.round, job.client)
    order, sizes = draw_order(len(rows), schedule, fold(*names, "batches"), net.least_batch)
    if min(sizes) < net.least_batch:
        what = f"client {job.client} has one" if len(rows) == 1 else "train.batch_size is 1"
        raise ConfigError(
            f"the model's BatchNorm cannot train on a single sample, and {what}; use larger batches, leave such "
            "clients out, or use another norm layer"
        )
    # (steps + 1, numbers): a row for each step, and one for what follows the last
    generator = torch.Generator().manual_seed(fold(*names, "noise"))
    noise = torch.rand(len(sizes) + 1, job.half.noise_size(net), generator=generator)
    memory = job.memory
    probe = job.half.probe(net, job.download, memory)
    if probe is not None:
        memory = job.half.probed(net, job.download, memory, accuracy_on(net, probe, data, rows))
    local = job.half.start(net, job.download, memory)
    # drawn on the CPU, so that the numbers are the same everywhere, and moved once a round
    return ClientRound(job, local, rows.index_select(0, order.to(rows.device)), sizes, noise.to(data.device))


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
