"""What the speed benchmarks run: the same federations, networks and rounds for every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedpews import data as data_room
from fedpews.data.federation import Federation, build
from fedpews.engines.engine import Schedule
from fedpews.models.cnn import CNN
from fedpews.models.mlp import MLP


@dataclass(frozen=True)
class Workload:
    name: str
    what: str
    data: Callable[[], Federation]
    model: Callable[[], nn.Module]
    schedule: Schedule
    lr: float
    cohort: int  # clients that train in a round
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def is_image(self) -> bool:
        return self.model is CNN

    @property
    def jobs(self) -> int:
        return self.cohort * len(self.seeds)

    def steps(self, data: Federation) -> int:
        """Client steps of one round, all seeds; the clients are of equal size here."""
        a_client = self.schedule.steps or -(-len(data.clients[0]) // self.schedule.batch_size)
        return self.jobs * a_client


def synthetic(clients: int, size: int | None = None) -> Federation:
    how = {2: "parity", 4: "class"}.get(clients, "iid")
    data = data_room.load("synthetic-32k", clients=clients, partition=how)
    if size is None:
        return data
    return build(
        data.x, data.y, [rows[:size] for rows in data.clients], data.test_x, data.test_y, data.classes
    )


TESTS = 480
"""To 2,560 training samples, as CIFAR-MNIST has 20,000 to 110,000."""


def images(clients: int = 2, each: int = 1280) -> Federation:
    """Noise in the shape of CIFAR-MNIST: convolutions take as long for it."""
    generator = torch.Generator().manual_seed(0)
    total = clients * each
    x = torch.randn(total + TESTS, 3, 32, 32, generator=generator)
    y = torch.randint(0, 20, (total + TESTS,), generator=generator)
    return build(x[:total], y[:total], torch.arange(total).split(each), x[total:], y[total:], 20)


WORKLOADS = {
    "A2": Workload(
        "A2", "MLP, Synthetic-32K, N=2, 3 seeds", lambda: synthetic(2), MLP, Schedule(32), 0.001, 2
    ),
    "A4": Workload(
        "A4", "MLP, Synthetic-32K, N=4, 3 seeds", lambda: synthetic(4), MLP, Schedule(32), 0.001, 4
    ),
    "B": Workload("B", "CNN, CIFAR-MNIST shapes, N=2", images, CNN, Schedule(64), 0.01, 2, seeds=(0,)),
    "C": Workload(
        "C",
        "MLP, N=200, participation 0.1, 3 seeds",
        lambda: synthetic(200, 160),
        MLP,
        Schedule(32),
        0.001,
        20,
    ),
}
