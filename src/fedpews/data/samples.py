"""Clients given in Python, as tensors, arrays or Datasets, as a Federation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedpews.data.federation import Federation, build, check_labels
from fedpews.data.inputs import (
    Inputs,
    Lazy,
    check,
    check_samples,
    concatenate,
    describe,
    shape,
    stack,
    tensor,
)
from fedpews.errors import ConfigError
from fedpews.tasks.builtin import Classification
from fedpews.tasks.task import Task
from fedpews.torch_private import tree_leaves

Samples = tuple[Any, Any] | Dataset[Any] | Mapping[str, Any]
"""One client: (x, y) as tensors or arrays, or a torch Dataset of (input, label) pairs; or a dict of those with the keys
``train``, ``val`` and ``test``."""

SPLITS = ("train", "val", "test")

READ_TWICE = 8
"""Items of a Dataset that are read twice, to see whether they are random."""


def from_clients(
    clients: Sequence[Samples],
    test: Samples | Sequence[Samples] | None = None,
    classes: int | None = None,
    name: str = "custom",
    class_names: Sequence[str] = (),
    client_names: Sequence[str] = (),
    *,
    task: Task | None = None,
    lazy: bool = False,
) -> Federation:
    """Your own data as a Federation: a list of clients and a test set.

    A client, like the test set, is an ``(x, y)`` pair of tensors or NumPy arrays, or a torch Dataset of
    (input, label) pairs. x may also be a tuple or dict of tensors, for a model that takes several. A client may be a
    dict of such with its own ``train``, ``val`` and ``test``; then ``test`` may be left out. The test set may also be a
    list with one for each client: the global model is evaluated on all of them, a client's metrics on its own.

    Args:
        classes: by default the largest label plus one.
        task: what the labels are; by default one class per sample.
        lazy: read the inputs of Datasets batch by batch, for data that does not fit in memory.

    >>> clients = [(torch.randn(8, 5), torch.zeros(8, dtype=torch.int64)), (np.ones((4, 5)), np.ones(4, int))]
    >>> data = from_clients(clients, test=(torch.randn(2, 5), torch.tensor([0, 1])))
    >>> len(data), data.classes, data.counts().tolist()
    (2, 2, [[8, 0], [0, 4]])
    """
    if isinstance(clients, Tensor | np.ndarray | Dataset) or not isinstance(clients, Sequence) or not clients:
        raise ConfigError(
            f"clients must be a list with an (x, y) pair or a torch Dataset per client; got {describe(clients)}."
        )
    task = task or Classification()
    splits = [_splits(samples, number) for number, samples in enumerate(clients)]
    if isinstance(test, list | tuple) and test and all(map(_is_pair, test)):
        if len(test) != len(clients):
            raise ConfigError(f"{len(test)} test sets for {len(clients)} clients; give one, or one for each.")
        splits = [each | {"test": samples} for each, samples in zip(splits, test, strict=True)]
        test = None
    pairs: dict[str, dict[int, tuple[Inputs, Tensor]]] = {split: {} for split in SPLITS}
    for number, samples in enumerate(splits):
        for split, given in samples.items():
            whose = f"client {number}" if split == "train" else f"client {number}'s {split}"
            pairs[split][number] = _read(given, whose, task, lazy)
    for split in ("val", "test"):
        if 0 < len(pairs[split]) < len(clients) and (split == "val" or test is None):
            lacking = min(set(range(len(clients))) - set(pairs[split]))
            raise ConfigError(f"client {lacking} has no {split} part, others have; give all of them one.")
    if test is not None:
        # the samples of no client are tested with the rest, and are in no client's metrics
        pairs["test"][-1] = _read(test, "the test data", task, lazy)
    if not pairs["test"]:
        raise ConfigError("there is no test set; give test=(x, y), or each client a 'test' of its own.")
    train = [*pairs["train"].values(), *pairs["val"].values()]
    forms = [_form(*pair) for pair in train]
    for number, form in enumerate(forms):
        if form != forms[0]:
            raise ConfigError(
                f"client {number % len(clients)} has {form}, client 0 has {forms[0]}; all clients need the same."
            )
    if classes is not None:
        for number, (_, y) in pairs["train"].items():
            check_labels(y, classes, f"client {number}", task)
    (x, y), (test_x, test_y) = _join(train), _join([*pairs["test"].values()])
    rows = torch.arange(len(y)).split([len(y) for _, y in train])
    owner = None
    if [*pairs["test"]] != [-1]:
        sizes = torch.tensor([len(y) for _, y in pairs["test"].values()])
        owner = torch.tensor([*pairs["test"]]).repeat_interleave(sizes)
    names = (name, class_names, client_names)
    data = (x, y, rows[: len(clients)], test_x, test_y, classes, *names, owner)
    return build(*data, task=task, validation=rows[len(clients) :])


def _is_pair(samples: Any) -> bool:
    return isinstance(samples, Dataset) or (isinstance(samples, tuple) and len(samples) == 2)


def _form(x: Inputs, y: Tensor) -> str:
    lazy = " that are read batch by batch" if isinstance(x, Lazy) else ""
    return f"inputs of shape {shape(x)}{lazy} and labels of shape {tuple(y.shape[1:])}"


def _join(pairs: Sequence[tuple[Inputs, Tensor]]) -> tuple[Inputs, Tensor]:
    return concatenate([x for x, _ in pairs]), torch.cat([y for _, y in pairs])


def _splits(samples: Any, client: int) -> dict[str, Any]:
    """A client's train, val and test samples; most have only the first."""
    if not isinstance(samples, Mapping):
        return {"train": samples}
    if "train" not in samples or not samples.keys() <= set(SPLITS):
        raise ConfigError(
            f"client {client}: a dict has the keys 'train' and, if there are any, 'val' and 'test'; "
            f"it has {', '.join(map(repr, samples))}. Inputs of several tensors go in a pair: (dict, labels)."
        )
    return dict(samples)


def _read(samples: Any, whose: str, task: Task, lazy: bool) -> tuple[Inputs, Tensor]:
    """The samples of one client or of a test set."""
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        samples = samples.tensors
    if isinstance(samples, tuple | list) and len(samples) == 2:
        return check_samples(samples[0], samples[1], whose, task)
    is_dataset = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if not is_dataset or isinstance(samples, tuple | list | Tensor | np.ndarray):
        raise ConfigError(
            f"{whose} must be an (x, y) pair or a torch Dataset with a length; got {describe(samples)}."
        )
    if len(samples) == 0:
        raise ConfigError(f"{whose} has no samples; leave it out or give it some.")
    _warn_if_random(samples, whose, lazy)
    if lazy:
        inputs = Lazy([samples])
        check(inputs.take(slice(0, 1)), whose)
        return check_samples(inputs, _labels(samples, whose), whose, task)
    items = [_item(samples, row, whose) for row in range(len(samples))]
    x, y = (stack([item[side] for item in items], whose) for side in (0, 1))
    return check_samples(x, y, whose, task)


def _item(dataset: Any, row: int, whose: str) -> Any:
    item = dataset[row]
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise ConfigError(f"{whose}: each item of its Dataset must be an (input, label) pair.")
    return item


def _labels(dataset: Any, whose: str) -> Any:
    """The labels of a Dataset: its ``targets`` or ``labels`` where it has them, else read item by item."""
    for name in ("targets", "labels"):
        known = getattr(dataset, name, None)
        if known is not None and len(known) == len(dataset):
            return known
    return stack([_item(dataset, row, whose)[1] for row in range(len(dataset))], whose)


def _warn_if_random(dataset: Any, whose: str, lazy: bool) -> None:
    """Warn of a Dataset whose inputs differ each time they are read."""
    for row in range(min(READ_TWICE, len(dataset))):
        first, again = (tree_leaves(_item(dataset, row, whose)[0]) for _ in range(2))
        if not all(torch.equal(tensor(a), tensor(b)) for a, b in zip(first, again, strict=True)):
            logging.getLogger("fedpews").warning(
                "%s: its Dataset gives other inputs each time it is asked (a random transform?); %s. "
                "Use data.augment for what is to be random.",
                whose,
                "it is read anew for every batch, so two runs will differ"
                if lazy
                else "it is read once, so every epoch sees the same",
            )
            return
