"""What the speed benchmarks run: the same federations, networks and rounds for every contender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_models import EmnistCNN, ResNet18, transformer
from plain_loop import PlainCNN
from torch import nn

from fedpews import data as data_room
from fedpews.data.federation import Federation, build
from fedpews.engines.engine import Schedule
from fedpews.models.networks import CNN, MLP


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
    plain: Callable[[], nn.Module] | None = None  # the same network as papers' code has it
    engines: tuple[str, ...] = ("eager", "compiled")
    floor: str | None = None  # which bare kernels to compare with
    also: tuple[str, ...] = ()  # more contenders: an engine, and a warmup with fixed masks or mixed precision

    def plain_model(self) -> nn.Module:
        """What the plain loop and other frameworks train."""
        return (self.plain or self.model)()

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


def many(clients: int, each: int = 20) -> Federation:
    """Many small clients: noise in the shape of Synthetic-32K."""
    generator = torch.Generator().manual_seed(0)
    total = clients * each
    x, tests = torch.randn(total, 5, generator=generator), torch.randn(1000, 5, generator=generator)
    return build(
        x, torch.arange(total) % 4, torch.arange(total).split(each), tests, torch.arange(1000) % 4, 4
    )


def many_images(clients: int, each: int = 20, held: int = 20_000) -> Federation:
    """Many small clients with images of FEMNIST's shape, who share 20,000 of them: 200,000 would fill the memory."""
    generator = torch.Generator().manual_seed(0)
    x, tests = torch.randn(held, 1, 28, 28, generator=generator), torch.randn(250, 1, 28, 28)
    rows = tuple((torch.arange(clients * each) % held).split(each))
    return Federation(x, torch.arange(held) % 62, rows, tests, torch.arange(250) % 62, 62)


def small_images(clients: int = 2, each: int = 64) -> Federation:
    generator = torch.Generator().manual_seed(0)
    total = clients * each
    x = torch.randn(total + 64, 3, 32, 32, generator=generator)
    y = torch.arange(total + 64) % 10
    return build(x[:total], y[:total], torch.arange(total).split(each), x[total:], y[total:], 10)


EACH = [
    Workload(
        "A2", "MLP, Synthetic-32K, N=2, 3 seeds", lambda: synthetic(2), MLP, Schedule(32), 0.001, 2, floor="mlp"
    ),
    Workload(
        "A4", "MLP, Synthetic-32K, N=4, 3 seeds", lambda: synthetic(4), MLP, Schedule(32), 0.001, 4, floor="mlp"
    ),
    Workload(
        "B", "CNN, CIFAR-MNIST shapes, N=2", images, CNN, Schedule(64), 0.01, 2, (0,), PlainCNN, ("eager",), "cnn",
        ("eager, fixed warmup", "eager, bfloat16"),
    ),
    Workload(
        "C", "MLP, N=200, participation 0.1, 3 seeds", lambda: synthetic(200, 160), MLP, Schedule(32), 0.001, 20,
        floor="mlp",
    ),
    Workload(
        "D", "MLP, N=10,000 of 20 samples, 100 a round", lambda: many(10_000), MLP, Schedule(10), 0.01, 100, (0,)
    ),
    Workload(
        "D1", "MLP, N=1,000 of 20 samples, 100 a round", lambda: many(1000), MLP, Schedule(10), 0.01, 100, (0,)
    ),
    Workload(
        "DC", "CNN of 1.2 M parameters, N=10,000 of 20 samples, 100 a round", lambda: many_images(10_000), EmnistCNN,
        Schedule(10), 0.01, 100, (0,), engines=("eager",),
    ),
    Workload(
        "E", "ResNet-18 with GroupNorm, batches of 32, N=2", small_images, ResNet18, Schedule(32), 0.01, 2, (0,),
        engines=("eager",),
    ),
    Workload(
        "F", "transformer of 6 layers, batches of 32, N=2", small_images, transformer, Schedule(32), 0.01, 2, (0,),
        engines=("eager",),
    ),
]  # fmt: skip

WORKLOADS = {workload.name: workload for workload in EACH}
