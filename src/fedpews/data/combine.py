"""Several image sets as one: labels one after the other, the same channels and size, one scale of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedpews.data.catalogue import Source
from fedpews.data.federation import Federation, build
from fedpews.data.readers import Images
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError
from fedpews.seeds import fold
from fedpews.tasks.task import Task

# images converted at a time, so that peak memory is the result and little more
CHUNK = 4096


Selection = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]
"""Images (images, channels, height, width), the rows of them to use, and the labels of those rows."""


def combine(
    table: DataTable, sources: Sequence[Source], images: Sequence[Images], task: Task | None = None
) -> Federation:
    """A federation with one client for each source.

    The first source keeps its labels; those of the next follow on, and so on. Grey images become RGB when any source
    is RGB; smaller images are enlarged (bilinear) to the largest. With ``storage`` 'bytes' pixels stay bytes in memory
    and become [-1, 1] in a batch; enlarged images are rounded to bytes then.
    """
    scalings = _scalings(table, len(sources))
    dtype = torch.uint8 if table.storage == "bytes" else torch.float32
    shape = tuple(max(sizes) for sizes in zip(*(source.shape for source in sources), strict=True))
    chosen: dict[str, list[Selection]] = {"train": [], "val": [], "test": []}
    offset, count = 0, len(sources)
    for source, splits in zip(sources, images, strict=True):
        for split, (pixels, labels) in splits.items():
            rows = _draw(source, labels, split, table)
            chosen[split].append((pixels, rows, labels[rows] + offset))
        offset += source.classes
    # in memory: the training images of all sources, then their validation images
    x, y, sizes = _join(chosen["train"] + chosen["val"], shape, dtype)
    test_x, test_y, test_sizes = _join(chosen["test"], shape, dtype)
    views, tests = x.split(sizes), test_x.split(test_sizes)
    for index in reversed(range(count)):  # the first source last: others may need its statistics
        seen = views[0 if scalings[index] == "first" else index]
        _rescale(scalings[index], seen, [*views[index::count], tests[index]])
    shares = torch.arange(len(y)).split(sizes)
    owner = torch.arange(count).repeat_interleave(torch.tensor(test_sizes))
    names = [source.name for source in sources]
    class_names = [
        f"{each.name}: {label}" if count > 1 else label for each in sources for label in each.class_names
    ]
    data = (x, y, shares[:count], test_x, test_y, offset, table.name, class_names, names, owner)
    return build(*data, task=task, validation=shares[count:])


def _scalings(table: DataTable, count: int) -> list[str]:
    """One scaling for each source."""
    scaling = table.scaling or "symmetric"
    scalings: list[str] = [scaling] * count if isinstance(scaling, str) else [*scaling]
    if len(scalings) != count:
        raise ConfigError(f"data.scaling lists {len(scalings)} scalings for the {count} sources.")
    if table.storage == "bytes" and set(scalings) != {"symmetric"}:
        raise ConfigError("data.storage 'bytes' is for values in [-1, 1]; leave data.scaling out.")
    return scalings


def _draw(source: Source, labels: NDArray[np.int64], split: str, table: DataTable) -> NDArray[np.int64]:
    """The rows to use, rising: all, or so many of each class at random."""
    per_class = {"train": table.train_per_class, "test": table.test_per_class}.get(split)
    if per_class is None:
        return np.arange(len(labels))
    if labels.ndim > 1:
        raise ConfigError(f"{source.name}: images have several labels, so none can be drawn per class.")
    counts = np.bincount(labels, minlength=source.classes)
    if per_class > counts.min():
        raise ConfigError(
            f"{source.name}: {per_class} {split} images per class were asked for, but class {counts.argmin()} "
            f"has {counts.min()}; ask for 1 to {counts.min()}."
        )
    # the draw depends on the source's name, so that every combination has the same images of it
    rng = np.random.default_rng(fold(table.seed, "draw", source.name, split))
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]  # classes in order, each shuffled
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.sort(np.concatenate([by_class[start : start + per_class] for start in starts]))


def _join(
    selections: Sequence[Selection], shape: Sequence[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor, list[int]]:
    """The images of all selections in one tensor, (images, channels, height, width), their labels and numbers."""
    sizes = [len(rows) for _, rows, _ in selections]
    x = torch.empty(sum(sizes), *shape, dtype=dtype)
    start = 0
    for pixels, selected, _ in selections:
        for rows in np.array_split(selected, max(1, -(-len(selected) // CHUNK))):
            chunk = torch.from_numpy(pixels[rows]).float()
            if chunk.shape[2:] != x.shape[2:]:
                chunk = F.interpolate(chunk, size=x.shape[2:], mode="bilinear", align_corners=False)
            # one channel is copied to all three
            x[start : start + len(rows)] = chunk.round() if dtype == torch.uint8 else chunk / 127.5 - 1
            start += len(rows)
    return x, torch.from_numpy(np.concatenate([labels for _, _, labels in selections])), sizes


def _rescale(scaling: str, seen: Tensor, views: Sequence[Tensor]) -> None:
    """Images from [-1, 1] to another scale, in place; by the statistics of training images alone."""
    if scaling == "symmetric":
        return
    spread, centre = torch.tensor(2.0), torch.tensor(-1.0)
    if scaling != "unit":
        spread, centre = torch.std_mean(seen, dim=(0, 2, 3), keepdim=True)
        spread = spread.clamp_min(1e-3)  # a channel of one colour stays finite
    for x in views:
        x.sub_(centre).div_(spread)
