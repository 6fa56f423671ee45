"""All samples before they belong to anybody, and the step that assigns them to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews.data.federation import Federation, build
from fedpews.data.partition import partition
from fedpews.errors import ConfigError


@dataclass(frozen=True)
class Pool:
    """Samples, each with its label and the source it came from; and a test set."""

    x: Tensor  # (samples, ...) float32
    y: Tensor  # (samples,) int64
    sources: Tensor  # (samples,) int64: which data set, or which given client
    test_x: Tensor
    test_y: Tensor
    classes: int
    name: str
    class_names: tuple[str, ...]
    source_names: tuple[str, ...]
    partition: str  # what to use when the user names none
    test_sources: Tensor | None = None  # (tests,) int64: the source of each test sample, where it is known


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
    shares = partition(
        how,
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
    by_source = how in ("given", "source")
    owner = pool.test_sources if by_source else None
    if sum(map(len, rows)) < len(y):
        x, y = x[torch.cat(rows)], y[torch.cat(rows)]
        rows = list(torch.arange(len(y)).split_with_sizes([len(share) for share in rows]))
        tested = torch.isin(test_y, y)
        test_x, test_y = test_x[tested], test_y[tested]
        owner = None if owner is None else owner[tested]
    client_names = pool.source_names if by_source else ()
    return build(x, y, rows, test_x, test_y, pool.classes, pool.name, pool.class_names, client_names, owner)
