"""Clients given in Python, as tensors, arrays or Datasets, as a Federation."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

READS = 4
"""Items of a Dataset that are read more than once, to see whether they are random."""


@dataclass(frozen=True)
class Pair:
    """Inputs and labels, checked; or the labels of a Dataset whose inputs are read batch by batch."""

    x: Inputs
    y: Tensor
    dataset: Any = None


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
            "clients must be a list with an (x, y) pair or a torch Dataset per client; "
            f"got {describe(clients)}."
        )
    task = Classification() if task is None else task
    pairs: dict[str, dict[int, Pair]] = {split: {} for split in SPLITS}
    for number, samples in enumerate(clients):
        for split, split_samples in _splits(samples, f"client {number}").items():
            whose = f"client {number}" if split == "train" else f"client {number}'s {split}"
            pairs[split][number] = _read_pair(split_samples, whose, task, lazy)
    for split in ("val", "test"):
        if pairs[split] and len(pairs[split]) < len(clients) and (split == "val" or test is None):
            lacking = next(number for number in range(len(clients)) if number not in pairs[split])
            raise ConfigError(f"client {lacking} has no {split} part, others have; give all of them one.")
    tests: list[Any] = list(test) if _is_list_of_tests(test) else []  # type: ignore[arg-type]
    if tests and len(tests) != len(clients):
        raise ConfigError(f"{len(tests)} test sets for {len(clients)} clients; give one, or one for each.")
    if tests:
        pairs["test"] = {
            number: _read_pair(samples, f"client {number}'s test", task, lazy)
            for number, samples in enumerate(tests)
        }
    elif test is not None:
        # the samples of no client are tested with the rest, and are in no client's metrics
        pairs["test"][-1] = _read_pair(test, "the test data", task, lazy)
    elif not pairs["test"]:
        raise ConfigError("there is no test set; give test=(x, y), or each client a 'test' of its own.")
    train, tested = [*pairs["train"].values(), *pairs["val"].values()], [*pairs["test"].values()]
    _check_shapes(train)
    if classes is not None:
        for number, pair in pairs["train"].items():
            check_labels(pair.y, classes, f"client {number}", task)
    rows = torch.arange(sum(len(pair.y) for pair in train)).split([len(pair.y) for pair in train])
    sizes = torch.tensor([len(pair.y) for pair in tested])
    owner = torch.repeat_interleave(torch.tensor([*pairs["test"]]), sizes)
    return build(
        _join(train),
        torch.cat([pair.y for pair in train]),
        rows[: len(clients)],
        _join(tested),
        torch.cat([pair.y for pair in tested]),
        classes,
        name,
        class_names,
        client_names,
        None if [*pairs["test"]] == [-1] else owner,
        task=task,
        validation=rows[len(clients) :],
    )


def _is_list_of_tests(test: Any) -> bool:
    """Whether it is a test set for each client, not one pair of inputs and labels."""
    return (
        isinstance(test, list | tuple)
        and len(test) > 0
        and all(
            isinstance(entry, Dataset) or (isinstance(entry, tuple) and len(entry) == 2) for entry in test
        )
    )


def _join(pairs: Sequence[Pair]) -> Inputs:
    if pairs[0].dataset is not None:
        return Lazy([pair.dataset for pair in pairs])
    return pairs[0].x if len(pairs) == 1 else concatenate([pair.x for pair in pairs])


def _check_shapes(pairs: Sequence[Pair]) -> None:
    if len({pair.dataset is None for pair in pairs}) > 1:
        raise ConfigError(
            "some clients are Datasets to be read batch by batch and some are not; make all one kind."
        )
    if pairs[0].dataset is not None:
        return
    first, labels = shape(pairs[0].x), pairs[0].y.shape[1:]
    for number, pair in enumerate(pairs):
        if shape(pair.x) != first:
            raise ConfigError(
                f"client {number} has inputs of shape {shape(pair.x)}, client 0 of {first}; "
                "all clients need the same."
            )
        if pair.y.shape[1:] != labels:
            raise ConfigError(
                f"client {number} has labels of shape {tuple(pair.y.shape[1:])}, client 0 of {tuple(labels)}."
            )


def _splits(samples: Any, whose: str) -> dict[str, Any]:
    """A client's train, val and test samples; most have only the first."""
    if not isinstance(samples, Mapping):
        return {"train": samples}
    unknown = [key for key in samples if key not in SPLITS]
    if unknown or "train" not in samples:
        raise ConfigError(
            f"{whose}: a dict has the keys 'train' and, if there are any, 'val' and 'test'; "
            f"it has {', '.join(map(repr, samples))}. Inputs of several tensors go in a pair: (dict, labels)."
        )
    return dict(samples)


def _read_pair(samples: Any, whose: str, task: Task, lazy: bool) -> Pair:
    """The samples of one client or of a test set."""
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        return Pair(*check_samples(samples.tensors[0], samples.tensors[1], whose, task))
    if isinstance(samples, tuple | list) and len(samples) == 2:
        return Pair(*check_samples(samples[0], samples[1], whose, task))
    is_dataset = hasattr(samples, "__getitem__") and hasattr(samples, "__len__")
    if not is_dataset or isinstance(samples, tuple | list | Tensor | np.ndarray):
        raise ConfigError(
            f"{whose} must be an (x, y) pair or a torch Dataset with a length; got {describe(samples)}."
        )
    if len(samples) == 0:
        raise ConfigError(f"{whose} has no samples; leave it out or give it some.")
    _notice_random(samples, whose, lazy)
    if lazy:
        y = task.labels(_labels(samples, whose), whose)
        check(Lazy([samples]).take(slice(0, 1)), whose)
        return Pair(None, y.to("cpu").contiguous(), samples)
    items = [samples[row] for row in range(len(samples))]
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise ConfigError(f"{whose}: each item of its Dataset must be an (input, label) pair.")
    x, y = stack([item[0] for item in items], whose), stack([item[1] for item in items], whose)
    return Pair(*check_samples(x, y, whose, task))


def _labels(dataset: Any, whose: str) -> Tensor:
    """The labels of a Dataset: its ``targets`` or ``labels`` where it has them, else read item by item."""
    for name in ("targets", "labels"):
        known = getattr(dataset, name, None)
        if known is not None and len(known) == len(dataset):
            return tensor(known)
    labels = stack([dataset[row][1] for row in range(len(dataset))], whose)
    if not isinstance(labels, Tensor):
        raise ConfigError(f"{whose}: a label must be a number or a tensor; got {describe(labels)}.")
    return labels


def _notice_random(dataset: Any, whose: str, lazy: bool) -> None:
    """Warn of a Dataset whose inputs differ each time they are read."""
    for row in range(min(READS, len(dataset))):
        first = dataset[row]
        if not isinstance(first, tuple | list) or len(first) != 2:
            raise ConfigError(f"{whose}: each item of its Dataset must be an (input, label) pair.")
        for _ in range(2):
            again = tree_leaves(dataset[row][0])
            if all(_same(a, b) for a, b in zip(tree_leaves(first[0]), again, strict=True)):
                continue
            anew = "it is read anew for every batch, so two runs will differ"
            once = "it is read once, so every epoch sees the same"
            logging.getLogger("fedpews").warning(
                "%s: its Dataset gives other inputs each time it is asked (a random transform?); %s. "
                "Use data.augment for what is to be random.",
                whose,
                anew if lazy else once,
            )
            return


def _same(a: Any, b: Any) -> bool:
    first, second = tensor(a), tensor(b)
    return first.shape == second.shape and torch.equal(first, second)
