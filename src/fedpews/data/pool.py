"""All samples before they belong to anybody, and the step that assigns them to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from fedpews.data.federation import Federation, build
from fedpews.data.inputs import Inputs, select
from fedpews.data.partition import partition
from fedpews.errors import ConfigError
from fedpews.tasks.class_names import LIST, check_listed
from fedpews.tasks.classification import Classification
from fedpews.tasks.task import Task

BY_LABEL = {"class", "classes", "dirichlet", "noc", "parity"}
"""Partitions that look at a sample's class."""


@dataclass(frozen=True)
class Pool:
    """Samples, each with its label and the source it came from; and a test set."""

    x: Inputs  # (samples, ...)
    y: Tensor  # (samples, ...) as the task has its labels
    sources: Tensor  # (samples,) int64: which data set, or which given client
    test_x: Inputs
    test_y: Tensor
    classes: int
    name: str
    class_names: tuple[str, ...]
    source_names: tuple[str, ...]
    partition: str  # what to use when the user names none
    task: Task = field(default_factory=Classification)
    test_sources: Tensor | None = None  # (tests,) whose test sample each is; None when they are common to all
    held: Tensor | None = None  # rows of x and y that a source holds out for validation
    columns: tuple[str, ...] = ()  # of tables: the name and type of each


Data = TypeVar("Data", Pool, Federation)


def number_classes(data: Data, classes: Sequence[str]) -> Data:
    """The same data with its labels numbered by a list of names; labels without names are numbers in it already."""
    if not data.class_names:
        exact = len(data.y) > 0 and data.task.largest(data.y) is None
        if data.classes > len(classes) or (exact and data.classes != len(classes)):
            raise ConfigError(
                f"{data.name} has labels up to {data.classes - 1}, but {LIST} has {len(classes)} "
                f"name{'s' * (len(classes) > 1)}: {', '.join(classes)}."
            )
        return replace(data, classes=len(classes), class_names=tuple(classes))
    check_listed({data.name: data.class_names}, classes)
    number = torch.tensor([classes.index(name) for name in data.class_names])
    return replace(
        data,
        y=number[data.y],
        test_y=number[data.test_y],
        classes=len(classes),
        class_names=tuple(classes),
    )


def assign(
    pool: Pool,
    how: str | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
    classes_per_client: int | None = None,
    class_lists: Sequence[Sequence[int]] | None = None,
) -> Federation:
    """Give every client its rows; samples nobody got are dropped, classes nobody has are not tested."""
    how = how or pool.partition
    if how == "given" and pool.partition != "given":
        raise ConfigError(
            f"partition 'given' is for your own data; for {pool.name!r} use e.g. {pool.partition!r}."
        )
    labels = pool.task.classes_of(pool.y)
    if labels is None and how in BY_LABEL:
        raise ConfigError(
            f"partition {how!r} needs one class per sample, which {pool.task.name} does not have; use iid, quantity, "
            "source or given."
        )
    free = torch.ones(len(pool.y), dtype=torch.bool)
    if pool.held is not None:
        free[pool.held] = False
    pick = free.nonzero().flatten()
    shares = partition(
        how,
        torch.zeros(len(pick), dtype=torch.int64).numpy() if labels is None else labels[pick].numpy(),
        pool.classes,
        clients=clients,
        sources=pool.sources[pick].numpy(),
        seed=seed,
        alpha=alpha,
        classes_per_client=classes_per_client,
        class_lists=class_lists,
    )
    rows = [pick[torch.from_numpy(share)] for share in shares]
    owned = how in ("given", "source")
    validation = _validation(pool, rows, owned)
    x, y, test_x, test_y = pool.x, pool.y, pool.test_x, pool.test_y
    owner = pool.test_sources if owned else None
    if sum(map(len, rows)) + sum(map(len, validation)) < len(y):
        used = torch.cat([*rows, *validation])
        x, y = select(x, used), y[used]
        sizes = [len(share) for share in (*rows, *validation)]
        every = torch.arange(len(y)).split_with_sizes(sizes)
        rows, validation = list(every[: len(rows)]), list(every[len(rows) :])
        if labels is not None:
            tested = torch.isin(test_y, y)
            test_x, test_y = select(test_x, tested), test_y[tested]
            owner = None if owner is None else owner[tested]
    data = build(
        x,
        y,
        rows,
        test_x,
        test_y,
        pool.classes,
        pool.name,
        pool.class_names,
        pool.source_names if owned else (),
        owner,
        task=pool.task,
        validation=validation,
    )
    return replace(data, columns=pool.columns)


def _validation(pool: Pool, rows: Sequence[Tensor], owned: bool) -> list[Tensor]:
    """Each client's part of what the sources hold out: its own source's, or as much as its part of the training."""
    if pool.held is None:
        return []
    if owned:
        return [pool.held[pool.sources[pool.held] == pool.sources[mine[0]]] for mine in rows]
    sizes = torch.tensor([0, *(len(mine) for mine in rows)], dtype=torch.float64)
    cuts = (sizes.cumsum(0) / sizes.sum() * len(pool.held)).round().long().tolist()
    return [pool.held[start:end] for start, end in pairwise(cuts)]
