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

# images converted at a time, so that peak memory is the result and little more
CHUNK = 4096
SCALINGS = ("symmetric", "unit", "standard", "first")


def combine(
    name: str,
    parts: Sequence[tuple[Source, Images]],
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    seed: int = 0,
    partition: str = "source",
    scaling: str | Sequence[str] = "symmetric",
    own_validation: bool = False,
    storage: str = "numbers",
) -> Pool:
    """One pool from one or more sources.

    The first source keeps its labels, the next one's start where the first one's end, and so on. Grey images
    become RGB when any source is RGB; smaller images are enlarged (bilinear) to the largest.
    With ``train_per_class`` or ``test_per_class`` that many images of each class are drawn.
    ``scaling`` is 'symmetric' for values in [-1, 1], 'unit' for [0, 1], 'standard' (each source's drawn training
    images have mean 0 and deviation 1 in every channel, and its test images are moved likewise) or 'first' (the mean
    and deviation of the first source for all of them); a list has one for each source.
    With ``storage`` 'bytes' pixels stay bytes in memory, a quarter of the space, and become [-1, 1] in a batch;
    enlarged images are rounded to bytes then.
    With ``own_validation`` the sources' own validation images follow the training images, marked as held out.
    """
    scalings = [scaling] * len(parts) if isinstance(scaling, str) else list(scaling)
    if not set(scalings) <= set(SCALINGS):
        raise ConfigError(f"data.scaling must be one of {', '.join(SCALINGS)}; got {scaling!r}.")
    if len(scalings) != len(parts):
        raise ConfigError(
            f"data.scaling lists {len(scalings)} scalings for the {len(parts)} sources of {name}."
        )
    if storage == "bytes" and set(scalings) != {"symmetric"}:
        raise ConfigError("data.storage 'bytes' is for values in [-1, 1]; leave data.scaling out.")
    kept = torch.uint8 if storage == "bytes" else torch.float32
    shape = (
        max(source.shape[0] for source, _ in parts),
        max(source.shape[1] for source, _ in parts),
        max(source.shape[2] for source, _ in parts),
    )
    train, test = [], []
    # a source's draw depends on its name, not on its place: the same images in every combination
    for source, images in parts:
        train.append(
            _draw(
                images.train_y, train_per_class, fold(seed, "draw", source.name, "train"), source, "training"
            )
        )
        test.append(
            _draw(images.test_y, test_per_class, fold(seed, "draw", source.name, "test"), source, "test")
        )
    # the first label of each source
    offsets = np.cumsum([0, *(source.classes for source, _ in parts)])
    several = len(parts) > 1
    seen = [(images.train_x, images.train_y, rows) for (_, images), rows in zip(parts, train, strict=True)]
    held = []
    if own_validation:
        held = [
            (images.val_x, images.val_y, np.arange(len(images.val_y)))
            for _, images in parts
            if images.val_x is not None and images.val_y is not None
        ]
    # rows: the training images of all sources, then their held-out ones
    x = _convert([(pixels, rows) for pixels, _, rows in (*seen, *held)], shape, kept)
    test_x = _convert(
        [(images.test_x, rows) for (_, images), rows in zip(parts, test, strict=True)], shape, kept
    )
    # views of x, one a source, so that rescaling in place changes x itself
    mine = x.split([len(rows) for _, _, rows in (*seen, *held)])
    others = [test_x.split([len(rows) for rows in test]), *([mine[len(seen) :]] if held else [])]
    _rescale(scalings, mine[: len(seen)], list(zip(*others, strict=True)))
    labels = [labels for _, labels, _ in (*seen, *held)]
    # once for the training images and once for the held-out ones, in that order
    sources = torch.arange(len(parts)).repeat(2 if held else 1)
    sizes = torch.tensor([len(rows) for _, _, rows in (*seen, *held)])
    start = sum(len(rows) for rows in train)
    offsets_of = np.concatenate([offsets[:-1]] * (2 if held else 1))
    return Pool(
        x=x,
        y=_labels(labels, [rows for _, _, rows in (*seen, *held)], offsets_of),
        sources=torch.repeat_interleave(sources, sizes),
        test_x=test_x,
        test_y=_labels([images.test_y for _, images in parts], test, offsets[:-1]),
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
        held=torch.arange(start, len(x)) if held else None,
    )


def _draw(
    labels: NDArray[np.int64], per_class: int | None, seed: int, source: Source, what: str
) -> NDArray[np.int64]:
    """The rows to use, rising: all, or ``per_class`` of each class at random."""
    if per_class is None:
        return np.arange(len(labels))
    if labels.ndim > 1:
        raise ConfigError(f"{source.name}: images have several labels, so none can be drawn per class.")
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
    parts: Sequence[tuple[NDArray[np.uint8], NDArray[np.int64]]],
    shape: tuple[int, int, int],
    kept: torch.dtype,
) -> Tensor:
    # (samples, channels, height, width)
    out = torch.empty(sum(len(rows) for _, rows in parts), *shape, dtype=kept)
    at = 0
    for pixels, rows in parts:
        for chunk in np.array_split(rows, max(1, -(-len(rows) // CHUNK))):
            x = torch.from_numpy(pixels[chunk]).float()
            if x.shape[2:] != shape[1:]:
                x = F.interpolate(x, size=shape[1:], mode="bilinear", align_corners=False)
            # one channel is copied to all three
            out[at : at + len(chunk)] = x.round() if kept == torch.uint8 else x / 127.5 - 1
            at += len(chunk)
    return out


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


def _labels(
    labels: Sequence[NDArray[np.int64]], rows: Sequence[NDArray[np.int64]], offsets: NDArray[np.int64]
) -> Tensor:
    shifted = [y[pick] + offset for y, pick, offset in zip(labels, rows, offsets, strict=True)]
    return torch.from_numpy(np.concatenate(shifted))
