"""Samples of any form: tensors or arrays, a tuple or dict of them, or a Dataset, also one read batch by batch.

Bytes are pixels: they stay bytes in memory, a quarter of what numbers need, and become [-1, 1] in a batch. Other whole
numbers (tokens, categories) are not changed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fedpews.errors import ConfigError
from fedpews.tasks.task import Task
from fedpews.torch_private import tree_leaves, tree_map, tree_map_only

Inputs = Any
"""A tensor, a tuple or dict of tensors, each (samples, ...); or a `Lazy`."""

Samples = tuple[Any, Any] | Dataset[Any] | Mapping[str, Any]
"""One client: (x, y) as tensors or arrays, or a torch Dataset of (input, label) pairs; or a dict of those with the keys
``train``, ``val`` and ``test``."""

SPLITS = ("train", "val", "test")

READERS = 4
"""Threads that read a batch of a Dataset."""

READ_TWICE = 8
"""Items of a Dataset that are read twice, to see whether they are random."""


class Lazy:
    """Inputs that are read from Datasets when a batch needs them, and not kept.

    Only labels stay in memory. A few threads read a batch, which helps where files are decoded; each item is read once
    per epoch. Items must be the same whenever they are read, or a run cannot be repeated.
    """

    device = torch.device("cpu")

    def __init__(self, datasets: Sequence[Any]) -> None:
        self.items: ConcatDataset[Any] = ConcatDataset(datasets)
        self._pool = ThreadPoolExecutor(READERS, "reader")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, rows: Tensor | slice) -> Any:
        """These samples, read and stacked."""
        numbers = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return stack([item[0] for item in self._pool.map(self.items.__getitem__, numbers)], "a Dataset")

    def to(self, device: torch.device | str) -> Lazy:
        """Refuse any device but this one."""
        raise ConfigError("a Dataset that is read batch by batch needs runtime.device = 'cpu'.")


def take(x: Inputs, rows: Tensor | slice) -> Any:
    """The samples of some rows, ready for a model."""
    if isinstance(x, Tensor) and x.dtype != torch.uint8:
        return x[rows]  # the usual case, in every step
    return prepare(read(x, rows))


def read(x: Inputs, rows: Tensor | slice) -> Any:
    """The samples of some rows, as they are stored."""
    return x[rows] if isinstance(x, Tensor) else tree_map(lambda leaf: leaf[rows], x)


def select(x: Inputs, rows: Tensor) -> Inputs:
    """Inputs of some rows only; a Dataset that is read batch by batch is not read now."""
    return Lazy([Subset(x.items, rows.tolist())]) if isinstance(x, Lazy) else read(x, rows)


def prepare(x: Any) -> Any:
    """A batch as a model reads it: bytes become numbers in [-1, 1]."""
    if isinstance(x, Tensor):
        return x / 127.5 - 1 if x.dtype == torch.uint8 else x
    return tree_map_only(Tensor, prepare, x)


def shape(x: Inputs) -> Any:
    """The shape of one sample; of a tuple or dict, that of each entry."""
    return tree_map_only(Tensor, lambda leaf: tuple(leaf.shape[1:]), take(x, slice(0, 1)))


def stack(items: Sequence[Any], whose: str) -> Any:
    """Samples stacked, entry by entry."""
    first = items[0]
    try:
        if isinstance(first, Mapping):
            return {key: stack([item[key] for item in items], whose) for key in first}
        if isinstance(first, tuple | list):
            return tuple(stack(entries, whose) for entries in zip(*items, strict=True))
        return torch.stack([tensor(item) for item in items])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(f"{whose}: the items of its Dataset cannot be stacked: {error}") from None


def concatenate(inputs: Sequence[Inputs]) -> Inputs:
    """The inputs of several clients in one."""
    first = inputs[0]
    if len(inputs) == 1:
        return first
    if isinstance(first, Lazy):
        return Lazy([x.items for x in inputs])
    return tree_map(lambda *leaves: torch.cat(leaves), *inputs)


def read_samples(samples: Any, whose: str, task: Task, lazy: bool) -> tuple[Inputs, Tensor]:
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
        check(inputs[:1], whose)
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


def check_samples(x: Any, y: Any, whose: str, task: Task) -> tuple[Inputs, Tensor]:
    """Inputs and labels in the types that a run uses, or a ConfigError that says ``whose`` they are."""
    try:
        x, y = x if isinstance(x, Lazy) else check(x, whose), tensor(y)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{whose}: x and y must be tensors or numeric arrays: {error}") from None
    if y.ndim == 0:
        raise ConfigError(f"{whose}: y must have a label per sample; got a single number.")
    count = len(tree_leaves(x)[0])
    if count != len(y):
        raise ConfigError(f"{whose}: {count} inputs but {len(y)} labels; each input needs one label.")
    return x, task.labels(y.detach(), whose).to("cpu").contiguous()


def check(x: Any, whose: str) -> Any:
    """Inputs in the types that models take: float32, int64, bytes, bool; or a ConfigError."""
    if isinstance(x, Mapping):
        checked: Any = {str(key): check(value, f"{whose}: {key}") for key, value in x.items()}
    elif isinstance(x, tuple | list) and len(x) and not np.isscalar(x[0]):
        checked = tuple(check(value, f"{whose}: input {index}") for index, value in enumerate(x))
    else:
        return _check_leaf(x, whose)
    sizes = {len(leaf) for leaf in tree_leaves(checked)}
    if len(sizes) != 1:
        raise ConfigError(f"{whose}: the inputs have {sorted(sizes)} samples; all need the same number.")
    return checked


def _check_leaf(values: Any, whose: str) -> Tensor:
    x = tensor(values)
    if x.is_complex() or x.ndim < 1 or (x.ndim < 2 and x.is_floating_point()):
        raise ConfigError(f"{whose}: x must be (samples, ...) of numbers; got {describe(x)}.")
    if len(x) == 0 or x[0].numel() == 0:
        raise ConfigError(f"{whose}: there are no samples (x has shape {tuple(x.shape)}).")
    x = x.detach().to("cpu").contiguous()
    if not x.is_floating_point():
        return x if x.dtype in (torch.uint8, torch.bool) else x.to(torch.int64)
    x = x.to(torch.float32)
    low, high = torch.aminmax(x)  # NaN wins both: the same as isfinite, without its memory
    if not (torch.isfinite(low) and torch.isfinite(high)):
        bad = ~torch.isfinite(x.flatten(1)).all(1)
        raise ConfigError(
            f"{whose}: x has NaN or infinite values in {int(bad.sum())} of {len(x)} samples, "
            f"first in sample {int(bad.nonzero()[0])}; clean them first."
        )
    return x


def tensor(values: Any) -> Tensor:
    """A tensor of an array, a list or a number."""
    if isinstance(values, np.ndarray):  # read-only and reversed arrays must be copied first
        values = np.require(values, requirements=["C", "W"])
    converted: Tensor = torch.as_tensor(values)
    # torch has next to no operations on these types
    if converted.dtype in (torch.uint16, torch.uint32, torch.uint64):
        converted = converted.to(torch.int64)
        if converted.numel() and int(converted.min()) < 0:
            raise ValueError("whole numbers must be below 2^63")
    return converted


def describe(value: Any) -> str:
    """A value's type in a few words."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{value.dtype} of shape {tuple(value.shape)}"
    return type(value).__name__ + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
