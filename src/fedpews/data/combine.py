"""Several image sets as one: labels one after the other, the same channels and size, one scale of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Selection:
    """The images of one source, and those of them to use."""

    pixels: NDArray[np.uint8]  # (images, channels, height, width)
    labels: NDArray[np.int64]  # (images,), of all sources together
    rows: NDArray[np.int64]  # those to use


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
    train, validation, test = [], [], []
    offset = 0
    for source, raw in zip(sources, images, strict=True):
        rows = _draw(source, raw.train_y, table.train_per_class, table.seed, "train")
        train.append(Selection(raw.train_x, raw.train_y + offset, rows))
        rows = _draw(source, raw.test_y, table.test_per_class, table.seed, "test")
        test.append(Selection(raw.test_x, raw.test_y + offset, rows))
        if raw.val_x is not None and raw.val_y is not None:
            validation.append(Selection(raw.val_x, raw.val_y + offset, np.arange(len(raw.val_y))))
        offset += source.classes
    # in memory: the training images of all sources, then their validation images
    x, y = _join([*train, *validation], shape, dtype)
    test_x, test_y = _join(test, shape, dtype)
    sizes = [len(selection.rows) for selection in (*train, *validation)]
    test_sizes = [len(selection.rows) for selection in test]
    # views of x and test_x, one a source, so that they are rescaled in place
    views, count = x.split(sizes), len(sources)
    others = zip(test_x.split(test_sizes), *([views[count:]] if validation else []), strict=True)
    _rescale(scalings, views[:count], list(others))
    rows_of = torch.arange(len(y)).split(sizes)
    return build(
        x,
        y,
        rows_of[:count],
        test_x,
        test_y,
        offset,
        table.name,
        [
            f"{source.name}: {label}" if count > 1 else label
            for source in sources
            for label in source.class_names
        ],
        [source.name for source in sources],
        torch.repeat_interleave(torch.arange(count), torch.tensor(test_sizes)),
        task=task,
        validation=rows_of[count:],
    )


def _scalings(table: DataTable, count: int) -> list[str]:
    """One scaling for each source."""
    scaling = table.scaling or "symmetric"
    scalings = [scaling] * count if isinstance(scaling, str) else list(scaling)
    if len(scalings) != count:
        raise ConfigError(
            f"data.scaling lists {len(scalings)} scalings for the {count} sources of {table.name}."
        )
    if table.storage == "bytes" and set(scalings) != {"symmetric"}:
        raise ConfigError("data.storage 'bytes' is for values in [-1, 1]; leave data.scaling out.")
    return list(scalings)


def _draw(
    source: Source, labels: NDArray[np.int64], per_class: int | None, seed: int, split: str
) -> NDArray[np.int64]:
    """The rows to use, rising: all, or ``per_class`` of each class at random."""
    if per_class is None:
        return np.arange(len(labels))
    if labels.ndim > 1:
        raise ConfigError(f"{source.name}: images have several labels, so none can be drawn per class.")
    counts = np.bincount(labels, minlength=source.classes)
    if per_class > counts.min():
        kind = "training" if split == "train" else split
        raise ConfigError(
            f"{source.name}: {per_class} {kind} images per class were asked for, but class {counts.argmin()} "
            f"has {counts.min()}; ask for 1 to {counts.min()}."
        )
    # the draw depends on the source's name, so that every combination has the same images of it
    rng = np.random.default_rng(fold(seed, "draw", source.name, split))
    order = rng.permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]  # classes in order, each shuffled
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.sort(np.concatenate([by_class[start : start + per_class] for start in starts]))


def _join(selections: Sequence[Selection], shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The images of all selections in one tensor, (images, channels, height, width), and their labels."""
    x = torch.empty(sum(len(selection.rows) for selection in selections), *shape, dtype=dtype)
    start = 0
    for selection in selections:
        for rows in np.array_split(selection.rows, max(1, -(-len(selection.rows) // CHUNK))):
            chunk = torch.from_numpy(selection.pixels[rows]).float()
            if chunk.shape[2:] != x.shape[2:]:
                chunk = F.interpolate(chunk, size=x.shape[2:], mode="bilinear", align_corners=False)
            # one channel is copied to all three
            x[start : start + len(rows)] = chunk.round() if dtype == torch.uint8 else chunk / 127.5 - 1
            start += len(rows)
    return x, torch.from_numpy(np.concatenate([selection.labels[selection.rows] for selection in selections]))


def _rescale(scalings: Sequence[str], train: Sequence[Tensor], others: Sequence[tuple[Tensor, ...]]) -> None:
    """From [-1, 1] to another scale, in place, a source at a time."""
    first = _statistics(train[0]) if "first" in scalings else None
    for scaling, seen, unseen in zip(scalings, train, others, strict=True):
        if scaling == "symmetric":
            continue
        if scaling == "unit":
            spread, centre = torch.tensor(2.0), torch.tensor(-1.0)
        else:
            spread, centre = first if scaling == "first" and first is not None else _statistics(seen)
        for x in (seen, *unseen):
            x.sub_(centre).div_(spread)


def _statistics(seen: Tensor) -> tuple[Tensor, Tensor]:
    """Deviation and mean of each channel, (1, channels, 1, 1).

    Of training images alone, so that nothing of the test data is learnt.
    """
    spread, centre = torch.std_mean(seen, dim=(0, 2, 3), keepdim=True)
    # a channel of one colour stays finite
    return spread.clamp_min(1e-3), centre
