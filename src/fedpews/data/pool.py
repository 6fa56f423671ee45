"""All samples before they belong to anybody, and the step that deals them to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedpews.data import federation, synthetic
from fedpews.data.catalogue import SOURCES
from fedpews.data.federation import Federation
from fedpews.data.partition import partition
from fedpews.errors import ConfigError


@dataclass(frozen=True)
class Pool:
    """Samples, each with its label and the source it came from; and a test set."""

    x: Tensor  # (samples, ...) float32
    y: Tensor  # (samples,) int64
    sources: Tensor  # (samples,) int64
    test_x: Tensor
    test_y: Tensor
    classes: int
    name: str
    class_names: tuple[str, ...]
    partition: str  # what to use when the user names none


def load(
    name: str, seed: int, data_dir: Path | str | None, train_per_class: int | None, test_per_class: int | None
) -> Pool:
    if name not in SOURCES or SOURCES[name].kind != "synthetic":
        raise ConfigError(f"unknown data {name!r}; known are {', '.join(SOURCES)}.")
    source = SOURCES[name]
    x, y = synthetic.sample(train_per_class or source.train_per_class or 0, seed, "train")
    test_x, test_y = synthetic.sample(test_per_class or source.test_per_class or 0, seed, "test")
    names = tuple(str(label) for label in range(source.classes))
    return Pool(x, y, torch.zeros_like(y), test_x, test_y, source.classes, name, names, source.partition)


def deal(
    pool: Pool,
    how: str | None,
    clients: int | None,
    alpha: float | None,
    seed: int,
    classes_per_client: int | None,
    class_lists: Sequence[Sequence[int]] | None,
) -> Federation:
    """Give every client its rows; samples nobody got are dropped, classes nobody has are not tested."""
    shares = partition(
        how or pool.partition,
        pool.y.numpy(),
        pool.classes,
        clients=clients,
        sources=pool.sources.numpy(),
        seed=seed,
        alpha=alpha,
        classes_per_client=classes_per_client,
        class_lists=class_lists,
    )
    rows = [torch.from_numpy(share) for share in shares]
    x, y, test_x, test_y = pool.x, pool.y, pool.test_x, pool.test_y
    if sum(map(len, rows)) < len(y):
        x, y = x[torch.cat(rows)], y[torch.cat(rows)]
        rows = list(torch.arange(len(y)).split_with_sizes([len(share) for share in rows]))
        tested = torch.isin(test_y, y)
        test_x, test_y = test_x[tested], test_y[tested]
    return federation.build(x, y, rows, test_x, test_y, pool.classes, pool.name, pool.class_names)
