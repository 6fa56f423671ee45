"""Samples of any form: a tensor, a tuple or dict of tensors, or a Dataset that is read batch by batch.

Bytes are taken for pixels: they stay bytes in memory, a quarter of what numbers need, and become [-1, 1] when a batch
is made. Other whole numbers (tokens, categories) stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.torch_private import tree_leaves, tree_map_only

Inputs = Any
"""A tensor, a tuple or dict of tensors, each (samples, ...); or a `Lazy`."""

READERS = 4
"""Threads that read a batch of a Dataset."""


class Lazy:
    """Inputs that are read from Datasets when a batch needs them, and forgotten after it.

    Only labels stay in memory. A batch is read by a few threads, which helps where files are decoded; each item is
    read once per epoch. Items must be the same whenever they are read, or a run cannot be repeated.
    """

    def __init__(self, datasets: Sequence[Any]) -> None:
        self._datasets = list(datasets)
        self._starts = np.cumsum([0, *(len(dataset) for dataset in datasets)])
        self._pool = ThreadPoolExecutor(READERS, "reader")

    def __len__(self) -> int:
        return int(self._starts[-1])

    def take(self, rows: Tensor | slice) -> Any:
        """These samples, stacked."""
        wanted = range(len(self))[rows] if isinstance(rows, slice) else rows.tolist()
        return stack([item[0] for item in self._pool.map(self.item, wanted)], "a Dataset")

    def item(self, row: int) -> Any:
        which = int(np.searchsorted(self._starts, row, side="right")) - 1
        return self._datasets[which][row - int(self._starts[which])]


def take(x: Inputs, rows: Tensor | slice) -> Any:
    """The samples of some rows, ready for a model."""
    if isinstance(x, Tensor):
        return prepare(x[rows])
    if isinstance(x, Lazy):
        return prepare(x.take(rows))
    return prepare(tree_map_only(Tensor, lambda leaf: leaf[rows], x))


def select(x: Inputs, rows: Tensor) -> Inputs:
    """Inputs of some rows only, as they are stored."""
    if isinstance(x, Lazy):
        raise ConfigError("a Dataset that is read batch by batch is used as it is given: partition 'given'.")
    return tree_map_only(Tensor, lambda leaf: leaf[rows], x)


def prepare(x: Any) -> Any:
    """A batch as a model reads it: bytes become numbers in [-1, 1]."""
    if isinstance(x, Tensor):
        return x / 127.5 - 1 if x.dtype == torch.uint8 else x
    return tree_map_only(Tensor, prepare, x)


def count(x: Inputs) -> int:
    """How many samples."""
    return len(x) if isinstance(x, Tensor | Lazy) else len(tree_leaves(x)[0])


def device(x: Inputs) -> torch.device:
    """Where the samples are."""
    return torch.device("cpu") if isinstance(x, Lazy) else tree_leaves(x)[0].device


def move(x: Inputs, to: torch.device | str) -> Inputs:
    """The same on a device; what is read batch by batch cannot be moved."""
    if isinstance(x, Lazy):
        raise ConfigError(
            "a Dataset that is read batch by batch stays on the CPU; set runtime.device to cpu."
        )
    return tree_map_only(Tensor, lambda leaf: leaf.to(to), x)


def shape(x: Inputs) -> Any:
    """The shape of one sample, of each part of it."""
    one = take(x, slice(0, 1))
    return tree_map_only(Tensor, lambda leaf: tuple(leaf.shape[1:]), one)


def stack(items: Sequence[Any], whose: str) -> Any:
    """Samples one below the other, part by part."""
    first = items[0]
    try:
        if isinstance(first, Mapping):
            return {key: stack([item[key] for item in items], whose) for key in first}
        if isinstance(first, tuple | list):
            return tuple(stack(part, whose) for part in zip(*items, strict=True))
        return torch.stack([tensor(item) for item in items])
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise ConfigError(
            f"{whose}: the items of its Dataset cannot be stacked into one tensor: {error}"
        ) from None


def concatenate(parts: Sequence[Any]) -> Any:
    """The samples of several clients in one."""
    first = parts[0]
    if isinstance(first, Mapping):
        return {key: concatenate([part[key] for part in parts]) for key in first}
    if isinstance(first, tuple):
        return tuple(concatenate(part) for part in zip(*parts, strict=True))
    return torch.cat(list(parts))


def check(x: Any, whose: str) -> Any:
    """Inputs in the types that models take: float32, int64, bytes, bool; or a ConfigError."""
    if isinstance(x, Lazy):
        return x
    if isinstance(x, Mapping):
        checked: Any = {str(key): check(value, f"{whose}: {key}") for key, value in x.items()}
    elif isinstance(x, tuple | list) and len(x) and not np.isscalar(x[0]):
        checked = tuple(check(value, f"{whose}: input {place}") for place, value in enumerate(x))
    else:
        return _check_leaf(x, whose)
    sizes = {len(leaf) for leaf in tree_leaves(checked)}
    if len(sizes) != 1:
        raise ConfigError(f"{whose}: the parts of x have {sorted(sizes)} samples; they need as many each.")
    return checked


def _check_leaf(values: Any, whose: str) -> Tensor:
    x = tensor(values)
    if x.is_complex() or x.ndim < 1:
        raise ConfigError(
            f"{whose}: x must be (samples, ...) of numbers; got {x.dtype} of shape {tuple(x.shape)}."
        )
    if x.ndim < 2 and x.is_floating_point():
        raise ConfigError(
            f"{whose}: x must be (samples, ...) and y (samples,); got x of shape {tuple(x.shape)}."
        )
    if len(x) == 0 or x[0].numel() == 0:
        raise ConfigError(f"{whose}: there are no samples (x has shape {tuple(x.shape)}).")
    x = x.detach().to("cpu").contiguous()
    if not x.is_floating_point():
        return x if x.dtype in (torch.uint8, torch.bool) else x.to(torch.int64)
    x = x.to(torch.float32)
    low, high = torch.aminmax(x)  # NaN wins both, so this finds what isfinite finds, without its memory
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
    made: Tensor = torch.as_tensor(values)
    # torch can hold these and do next to nothing with them
    if made.dtype in (torch.uint16, torch.uint32, torch.uint64):
        made = made.to(torch.int64)
        if made.numel() and int(made.min()) < 0:
            raise ValueError("whole numbers must be below 2^63")
    return made
