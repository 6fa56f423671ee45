"""From a name to a Federation: find or make the samples, then assign them to clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedpews.data import readers, store, synthetic, user_data
from fedpews.data.catalogue import SOURCES, Source
from fedpews.data.combine import combine
from fedpews.data.federation import Federation
from fedpews.data.pool import Pool, assign
from fedpews.errors import ConfigError


def load(
    name: str,
    *,
    partition: str | None = None,
    clients: int | None = None,
    alpha: float | None = None,
    seed: int = 0,
    data_dir: Path | str | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    classes_per_client: int | None = None,
    class_lists: Sequence[Sequence[int]] | None = None,
    scaling: str | None = None,
) -> Federation:
    """A data set by name, assigned to clients.

    Arguments:
        name: one of `SOURCES`, several joined by ``+`` (``"pathmnist+octmnist"``), or your own data:
            ``"folder:PATH"`` or ``"module:function"`` (see `fedpews.data.user_data`).
        partition: one of `PARTITIONS`; by default the source's own ('given' for your own data).
        clients: how many; may be left out where the partition says it ('source', 'class', 'parity', ...).
        alpha: for 'dirichlet' and 'quantity'; other partitions ignore it.
        seed: of the synthetic data, of what is drawn and of how it is assigned.
        data_dir: where to look for files first; then FEDPEWS_DATA, then the cache; else they are downloaded.
        train_per_class, test_per_class: draw (or make) that many samples of each class.
        classes_per_client: for 'noc'.
        class_lists: for 'classes': the classes of each client.
        scaling: of named images: 'symmetric' to [-1, 1] (the default), 'unit' to [0, 1], or 'standard', mean 0 and
            deviation 1 in each channel of each source.

    >>> data = load("synthetic-3.2k", partition="parity")
    >>> data.counts().tolist()
    [[800, 0, 800, 0], [0, 800, 0, 800]]
    """
    for what, value in (("train_per_class", train_per_class), ("test_per_class", test_per_class)):
        if value is not None and value < 1:
            raise ConfigError(f"{what} must be above 0; got {value}.")
    if ":" in name and name not in SOURCES:
        if (train_per_class, test_per_class, scaling) != (None, None, None):
            raise ConfigError(
                "train_per_class, test_per_class and scaling are for named data sets, not your own data."
            )
        pool = user_data.load(name, seed)
    else:
        pool = _named(name, seed, data_dir, train_per_class, test_per_class, scaling)
    return assign(pool, partition, clients, alpha, seed, classes_per_client, class_lists)


def _named(
    name: str,
    seed: int,
    data_dir: Path | str | None,
    train_per_class: int | None,
    test_per_class: int | None,
    scaling: str | None,
) -> Pool:
    parts = store.named(name)
    source = SOURCES.get(name)
    if source is not None:
        train_per_class = train_per_class or source.train_per_class
        test_per_class = test_per_class or source.test_per_class
    if source is not None and source.kind == "synthetic":
        if scaling is not None:
            raise ConfigError(f"scaling is for images; {name} has none.")
        return _synthetic(source, seed, train_per_class or 1, test_per_class or 1)
    for part in parts:
        if part.multi_label:
            raise ConfigError(
                f"{part.name} gives an image several labels at once, so it is not for classification; "
                "choose another MedMNIST set."
            )
    found = [store.obtain(part, data_dir) for part in parts]  # all of them, before the first is read
    images = [(part, readers.read(part, paths)) for part, paths in zip(parts, found, strict=True)]
    how = source.partition if source is not None else "source"
    return combine(name, images, train_per_class, test_per_class, seed, how, scaling or "symmetric")


def _synthetic(source: Source, seed: int, train_per_class: int, test_per_class: int) -> Pool:
    x, y = synthetic.sample(train_per_class, seed, "train")
    test_x, test_y = synthetic.sample(test_per_class, seed, "test")
    names = tuple(str(label) for label in range(source.classes))
    return Pool(
        x,
        y,
        torch.zeros_like(y),
        test_x,
        test_y,
        source.classes,
        source.name,
        names,
        (source.name,),
        source.partition,
    )
