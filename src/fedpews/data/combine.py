"""Several image sets as one: labels one after the other, the same channels and size, one scale of values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedpews.data.catalogue import Source
from fedpews.data.pool import Pool
from fedpews.data.readers import Images
from fedpews.errors import ConfigError
from fedpews.seeds import fold

CHUNK = 4096  # images converted at a time, so the peak is the result and little more
SCALINGS = ("symmetric", "unit", "standard")


def combine(
    name: str,
    parts: Sequence[tuple[Source, Images]],
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    seed: int = 0,
    partition: str = "source",
    scaling: str = "symmetric",
) -> Pool:
    """One pool from one or more sources.

    The first source keeps its labels, the next one's start where the first one's end, and so on. Grey images
    become RGB when any source is RGB; smaller images are enlarged (bilinear) to the largest.
    With ``train_per_class`` or ``test_per_class`` that many images of each class are drawn.
    ``scaling`` is 'symmetric' for values in [-1, 1], 'unit' for [0, 1], or 'standard': each source's drawn training
    images have mean 0 and deviation 1 in every channel, and its test images are moved likewise.
    """
    if scaling not in SCALINGS:
        raise ConfigError(f"scaling must be one of {', '.join(SCALINGS)}; got {scaling!r}.")
    shape = (
        max(source.shape[0] for source, _ in parts),
        max(source.shape[1] for source, _ in parts),
        max(source.shape[2] for source, _ in parts),
    )
    train, test = [], []
    for source, images in parts:
        train.append(
            _draw(
                images.train_y, train_per_class, fold(seed, "draw", source.name, "train"), source, "training"
            )
        )
        test.append(
            _draw(images.test_y, test_per_class, fold(seed, "draw", source.name, "test"), source, "test")
        )
    offsets = np.cumsum([0, *(source.classes for source, _ in parts)])
    several = len(parts) > 1
    x = _convert([(images.train_x, rows) for (_, images), rows in zip(parts, train, strict=True)], shape)
    test_x = _convert([(images.test_x, rows) for (_, images), rows in zip(parts, test, strict=True)], shape)
    _rescale(scaling, x.split([len(rows) for rows in train]), test_x.split([len(rows) for rows in test]))
    return Pool(
        x=x,
        y=_labels([images.train_y for _, images in parts], train, offsets),
        sources=torch.cat([torch.full((len(rows),), number) for number, rows in enumerate(train)]),
        test_x=test_x,
        test_y=_labels([images.test_y for _, images in parts], test, offsets),
        classes=int(offsets[-1]),
        name=name,
        class_names=tuple(
            f"{source.name}: {label}" if several else label
            for source, _ in parts
            for label in source.class_names
        ),
        source_names=tuple(source.name for source, _ in parts),
        test_sources=torch.cat([torch.full((len(rows),), number) for number, rows in enumerate(test)]),
        partition=partition,
    )


def _draw(
    labels: NDArray[np.int64], per_class: int | None, seed: int, source: Source, what: str
) -> NDArray[np.int64]:
    """The rows to use, rising: all, or ``per_class`` of each class at random."""
    if per_class is None:
        return np.arange(len(labels))
    counts = np.bincount(labels, minlength=source.classes)
    if per_class < 1 or per_class > counts.min():
        raise ConfigError(
            f"{source.name}: {per_class} {what} images per class were asked for, but class {counts.argmin()} "
            f"has {counts.min()}; ask for 1 to {counts.min()}."
        )
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]  # classes in order, each shuffled
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return np.sort(np.concatenate([by_class[start : start + per_class] for start in starts]))


def _convert(
    parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]], shape: tuple[int, int, int]
) -> Tensor:
    out = torch.empty(sum(len(rows) for _, rows in parts), *shape)  # (samples, channels, height, width)
    at = 0
    for pixels, rows in parts:
        for chunk in np.array_split(rows, max(1, -(-len(rows) // CHUNK))):
            x = torch.from_numpy(pixels[chunk]).float()
            if x.shape[2:] != shape[1:]:
                x = F.interpolate(x, size=shape[1:], mode="bilinear", align_corners=False)
            out[at : at + len(chunk)] = x / 127.5 - 1  # one channel is copied to all three
            at += len(chunk)
    return out


def _rescale(scaling: str, train: Sequence[Tensor], test: Sequence[Tensor]) -> None:
    """From [-1, 1] to another scale, in place, a source at a time."""
    if scaling == "symmetric":
        return
    centre, spread = torch.tensor(-1.0), torch.tensor(2.0)  # to [0, 1]
    for seen, unseen in zip(train, test, strict=True):
        if scaling == "standard":
            spread, centre = torch.std_mean(seen, dim=(0, 2, 3), keepdim=True)
            spread = spread.clamp_min(1e-3)  # a channel of one colour stays finite
        for x in (seen, unseen):
            x.sub_(centre).div_(spread)


def _labels(
    labels: Sequence[NDArray[np.int64]], rows: Sequence[NDArray[np.int64]], offsets: NDArray[np.int64]
) -> Tensor:
    shifted = [y[pick] + offset for y, pick, offset in zip(labels, rows, offsets[:-1], strict=True)]
    return torch.from_numpy(np.concatenate(shifted))
