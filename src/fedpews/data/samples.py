"""What stands for one client, in all the forms that users bring, as inputs and labels."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from fedpews.data.inputs import Lazy, check, count, stack, tensor
from fedpews.errors import ConfigError
from fedpews.tasks.task import Task
from fedpews.torch_private import tree_leaves

Samples = tuple[Any, Any] | Dataset[Any] | Mapping[str, Any]
"""One client: (x, y) as tensors or arrays, or a torch Dataset of (input, label) pairs; or a dict of those, with its
own ``train``, ``val`` and ``test``."""

PARTS = ("train", "val", "test")
LOOKS = 4
"""Items of a Dataset that are read more than once, to see whether they are random."""


@dataclass(frozen=True)
class Pair:
    """Inputs and labels, checked; or a Dataset whose inputs are still to be read, with its labels."""

    x: Any
    y: Tensor
    dataset: Any = None


def parts_of(samples: Any, whose: str) -> dict[str, Any]:
    """A client's train, val and test; most have only the first."""
    if not isinstance(samples, Mapping):
        return {"train": samples}
    unknown = [key for key in samples if key not in PARTS]
    if unknown or "train" not in samples:
        raise ConfigError(
            f"{whose}: a dict stands for its parts, 'train' and if there are any 'val' and 'test'; "
            f"it has {', '.join(map(repr, samples))}. Inputs of several parts go in a pair: (dict, labels)."
        )
    return dict(samples)


def read_pair(samples: Any, whose: str, task: Task, lazy: bool = False) -> Pair:
    """The samples of one client or of a test set."""
    if isinstance(samples, TensorDataset) and len(samples.tensors) == 2:
        return pair(*samples.tensors, whose, task)
    if isinstance(samples, tuple | list) and len(samples) == 2:
        return pair(samples[0], samples[1], whose, task)
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
    return pair(x, y, whose, task)


def pair(x: Any, y: Any, whose: str, task: Task) -> Pair:
    """Inputs and labels in the types that a run uses, or a ConfigError that names ``whose`` they are."""
    try:
        x, y = check(x, whose), tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{whose}: x and y must be tensors or numeric arrays: {error}") from None
    if y.ndim == 0:
        raise ConfigError(f"{whose}: y must have a label per sample; got a single number.")
    if count(x) != len(y):
        raise ConfigError(f"{whose}: {count(x)} inputs but {len(y)} labels; each input needs one label.")
    return Pair(x, task.labels(y.detach(), whose).to("cpu").contiguous())


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
    """Say when a Dataset gives other inputs each time it is asked."""
    for row in range(min(LOOKS, len(dataset))):
        first = dataset[row]
        if not isinstance(first, tuple | list) or len(first) != 2:
            raise ConfigError(f"{whose}: each item of its Dataset must be an (input, label) pair.")
        for _ in range(2):
            again = tree_leaves(dataset[row][0])
            if all(_same(a, b) for a, b in zip(tree_leaves(first[0]), again, strict=True)):
                continue
            what = (
                "it is read anew for every batch, so two runs will differ"
                if lazy
                else "it is read once, so every epoch sees the same"
            )
            logging.getLogger("fedpews").warning(
                "%s: its Dataset gives other inputs each time it is asked (a random transform?); %s. "
                "Use data.augment for what is to be random.",
                whose,
                what,
            )
            return


def _same(a: Any, b: Any) -> bool:
    one, other = tensor(a), tensor(b)
    return one.shape == other.shape and torch.equal(one, other)


def describe(value: Any) -> str:
    """A value's kind in a few words."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return (
        f"{type(value).__name__} of {len(value)}" if isinstance(value, tuple | list) else type(value).__name__
    )
