"""The same classes with other inputs at every client, for `fedpews reproduce map`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedpews.data.loading import data_table, load_table

CHANGES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    torch.neg,
    lambda x: torch.rot90(x, 1, (2, 3)),
    lambda x: torch.flip(x, (3,)),
)
"""The digits as they are, as negatives, turned by 90° and mirrored."""


def digits(seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """100 MNIST images of 16×16 a class for four clients, each of which sees them changed in its own way.

    Each change has a quarter of the 50 test images a class.
    """
    options = {"train_per_class": 100, "test_per_class": 50, "image_size": 16, "seed": seed}
    data = load_table(data_table(name="mnist", partition="iid", clients=4, **options))
    clients = [
        (change(data.x[rows]), data.y[rows]) for change, rows in zip(CHANGES, data.clients, strict=True)
    ]
    # every fourth of a class: the test images are in the order of their classes
    parts = [(change(data.test_x[i::4]), data.test_y[i::4]) for i, change in enumerate(CHANGES)]
    x, y = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return clients, (x, y)
