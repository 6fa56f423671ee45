"""Which samples a client sees in a round, and the random numbers it uses."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpews.engines.engine import Schedule


def draw_order(samples: int, schedule: Schedule, seed: int, least: int = 1) -> tuple[Tensor, list[int]]:
    """Positions in a client's own data, batch after batch, and the sizes of the batches.

    Every epoch visits every sample exactly once; its last batch may be smaller. With ``steps`` the epochs go on until
    there are enough.

    A last batch of fewer than ``least`` samples joins the one before it.

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


def draw_noise(rows: int, size: int, seed: int) -> Tensor:
    """Uniform numbers for each step, and one row more for what follows the last: (rows, size)."""
    if not size:
        return torch.empty(rows, 0)
    return torch.rand(rows, size, generator=torch.Generator().manual_seed(seed))
