"""From a name to a Federation: find or make the samples, then assign them to clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedpews.data import readers, store, synthetic, user_data
from fedpews.data.catalogue import SOURCES, Source
from fedpews.data.combine import combine
from fedpews.data.federation import Federation
from fedpews.data.pool import Pool, assign, number_classes
from fedpews.errors import ConfigError
from fedpews.tasks.classification import Classification
from fedpews.tasks.task import Task


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
    classes: Sequence[str] | None = None,
    scaling: str | Sequence[str] | None = None,
    task: Task | None = None,
    own_validation: bool = False,
    label: str | None = None,
    missing: str = "refuse",
    image_size: int | None = None,
    lazy: bool = False,
    storage: str | None = None,
    pool: bool = False,
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
        classes: the names of all classes, in the order of their labels; by default all clients' names, sorted.
        scaling: of named images: 'symmetric' to [-1, 1] (the default), 'unit' to [0, 1], or 'standard', mean 0 and
            deviation 1 in each channel of each source. Of tables: 'standard', by each client's training rows.
        task: what the labels are; by default one class per sample.
        own_validation: also take the data set's own validation split (MedMNIST).
        label: of CSV and Parquet folders: the column that holds the label.
        missing: of CSV and Parquet folders: 'refuse' missing values, or fill them in with the 'mean' of the column over
            the client's training rows (for a common test set: of all clients').
        image_size: of image folders: the shorter side is brought to this, and the middle square kept.
        storage: of named images: 'numbers' (the default), or 'bytes' for a quarter of the memory.
        lazy: read the inputs of a function's Datasets batch by batch.
        pool: put the samples of your own clients together, to be split by ``partition``.

    >>> data = load("synthetic-3.2k", partition="parity")
    >>> data.counts().tolist()
    [[800, 0, 800, 0], [0, 800, 0, 800]]
    """
    for what, value in (("train_per_class", train_per_class), ("test_per_class", test_per_class)):
        if value is not None and value < 1:
            raise ConfigError(f"{what} must be above 0; got {value}.")
    if ":" in name and name not in SOURCES:
        if (train_per_class, test_per_class, storage) != (None,) * 3:
            raise ConfigError(
                "train_per_class, test_per_class and storage are for named data sets, not your own data."
            )
        own = (label, image_size, lazy, classes or (), missing, scaling)
        found = user_data.load(name, seed, task or Classification(), *own)
        names = found.names if isinstance(found, Federation) else found.source_names
        _check_partition(name, names, partition, pool)
        if isinstance(found, Federation):
            return number_classes(found, classes) if classes else found
    else:
        draws = (train_per_class, test_per_class)
        found = _named(
            name, seed, data_dir, *draws, scaling, task or Classification(), own_validation, storage
        )
    if classes:
        found = number_classes(found, classes)
    return assign(found, partition, clients, alpha, seed, classes_per_client, class_lists)


def _check_partition(name: str, clients: Sequence[str], partition: str | None, pool: bool) -> None:
    """Own clients stay what they are, unless the configuration says that their samples are pooled."""
    kept = partition in (None, "given", "source")
    if pool and kept:
        raise ConfigError(
            "data.pool puts your own clients' samples together, so data.partition must say how to split them."
        )
    if not kept and not pool and len(clients) > 1:
        shown = ", ".join(clients[:5]) + (", ..." if len(clients) > 5 else "")
        raise ConfigError(
            f"{name} has {len(clients)} clients of its own ({shown}), and data.partition = {partition!r} would mix "
            "them; leave it out, or set data.pool = true to put their samples together and split them anew."
        )


def _named(
    name: str,
    seed: int,
    data_dir: Path | str | None,
    train_per_class: int | None,
    test_per_class: int | None,
    scaling: str | Sequence[str] | None,
    task: Task,
    own_validation: bool,
    storage: str | None,
) -> Pool:
    parts = store.named(name)
    source = SOURCES.get(name)
    if source is not None:
        train_per_class = train_per_class or source.train_per_class
        test_per_class = test_per_class or source.test_per_class
    if source is not None and source.kind == "synthetic":
        if own_validation:
            raise ConfigError(
                f"{name} has no validation split of its own; give data.validation a part, such as 0.1."
            )
        if scaling is not None:
            raise ConfigError(f"scaling is for images; {name} has none.")
        return replace(_synthetic(source, seed, train_per_class or 1, test_per_class or 1), task=task)
    for part in parts:
        if part.multi_label != (task.name == "multilabel"):
            raise ConfigError(
                f"{part.name} gives an image several labels at once; set task.name to multilabel."
                if part.multi_label
                else f"{part.name} gives an image one label, so it is not for {task.name}."
            )
        if own_validation and part.kind != "medmnist":
            raise ConfigError(
                f"{part.name} has no validation split of its own; give data.validation a part, such as 0.1."
            )
    found = [store.obtain(part, data_dir) for part in parts]  # all of them, before the first is read
    images = [
        (part, readers.read(part, paths, own_validation)) for part, paths in zip(parts, found, strict=True)
    ]
    how = source.partition if source is not None else "source"
    how = "iid" if source is not None and source.multi_label else how
    pool = combine(
        name,
        images,
        train_per_class,
        test_per_class,
        seed,
        how,
        scaling or "symmetric",
        own_validation,
        storage or "numbers",
    )
    return replace(pool, task=task)


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
