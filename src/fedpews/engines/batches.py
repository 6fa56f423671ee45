"""Which samples a client sees in a round, and the random numbers it uses."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpews.engines.engine import Schedule
from fedpews.seeds import fold


def client_seed(seed: int, round: int, client: int, purpose: str) -> int:
    """The seed of one draw of one client in one round, whoever runs it."""
    return fold(seed, round, client, purpose)


def draw_batches(samples: int, schedule: Schedule, seed: int) -> list[Tensor]:
    """Positions in a client's own data, one tensor per step; every epoch visits every sample exactly once.

    The last batch of an epoch may be smaller. With ``steps`` the epochs go on until there are enough.

    >>> [len(batch) for batch in draw_batches(5, Schedule(batch_size=2), seed=0)]
    [2, 2, 1]
    """
    order, sizes = draw_order(samples, schedule, seed)
    return list(order.split(sizes))


def count_steps(samples: int, schedule: Schedule) -> int:
    """How many steps a client with so many samples takes in a round.

    >>> count_steps(5, Schedule(batch_size=2, epochs=2))
    6
    """
    return schedule.steps or (schedule.epochs or 1) * -(-samples // schedule.batch_size)


def draw_order(samples: int, schedule: Schedule, seed: int) -> tuple[Tensor, list[int]]:
    """The same as one tensor, batch after batch, and the sizes of the batches.

    >>> draw_order(5, Schedule(batch_size=2), seed=0)[1]
    [2, 2, 1]
    """
    generator = torch.Generator().manual_seed(seed)
    full, rest = divmod(samples, schedule.batch_size)
    epoch = [schedule.batch_size] * full + [rest] * (rest > 0)
    wanted = count_steps(samples, schedule)
    epochs = -(-wanted // len(epoch))
    sizes = (epoch * epochs)[:wanted]
    order = torch.cat([torch.randperm(samples, generator=generator) for _ in range(epochs)])
    return order[: sum(sizes)], sizes


def draw_noise(rows: int, size: int, seed: int) -> Tensor:
    """Uniform numbers for each step, and one row more for what follows the last: (rows, size)."""
    return torch.rand(rows, size, generator=torch.Generator().manual_seed(seed))
