"""Published image sets: their files, read exactly or refused, and several sets combined to one.

The layout of a file is checked (magic number, row length, keys, label range), the number of rows is free, so a subset
in the same layout reads like the original. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedpews.data.catalogue import Source
from fedpews.data.federation import Federation, build
from fedpews.data.files import read_npz
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError
from fedpews.outside import MEGABYTE, check_plain
from fedpews.seeds import fold
from fedpews.tasks.task import Task

MOST_BYTES = 1024 * MEGABYTE
"""Of one unpacked file; the largest that is known by name has 47 million."""

CHUNK = 4096
"""Images that are converted at a time, so that peak memory is the result and little more."""

Images = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""The images (samples, channels, height, width) and labels of each split (train, test, val) as published."""

Selection = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]
"""Images (images, channels, height, width), the rows of them to use, and the labels of those rows."""


def read(source: Source, paths: Mapping[str, Path], validation: bool = False) -> Images:
    """Read a source from its files: published (or member) name → path."""
    splits = ("train", "test", "val") if validation else ("train", "test")
    if source.kind == "medmnist":
        return _read_medmnist(source, paths[source.files[0].name], splits)
    return _read_cifar(source, paths) if source.kind == "cifar" else _read_mnist(source, paths)


def _read_mnist(source: Source, paths: Mapping[str, Path]) -> Images:
    train, train_labels, test, test_labels = (paths[file.name] for file in source.files)
    files = {"train": (train, train_labels), "test": (test, test_labels)}
    return {
        split: _checked(source, read_idx(images)[:, None], read_idx(labels), images)
        for split, (images, labels) in files.items()
    }


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An array of bytes in the idx layout: two zeros, type 8, the number of axes, each axis, the values."""
    raw = _bytes(path)
    axes = raw[3] if len(raw) > 3 else 0
    if raw[:3] != b"\x00\x00\x08" or axes not in (1, 3) or len(raw) < 4 + 4 * axes:
        raise ConfigError(f"{path}: not an idx file of bytes (it starts with {raw[:4].hex(' ')}).")
    shape = np.frombuffer(raw, ">u4", axes, 4).astype(int)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if values.size != int(np.prod(shape, dtype=object)):
        raise ConfigError(f"{path}: its header promises {shape.tolist()} values, not {values.size}.")
    return values.reshape(shape)


def _read_cifar(source: Source, paths: Mapping[str, Path]) -> Images:
    archive = paths.get(source.files[0].name)
    packed = _unpack(archive, source.members) if archive else {}
    batches = []
    for member in source.members:
        where = f"{archive}: {member}" if archive else str(paths[member])
        raw = packed[member] if archive else _bytes(paths[member])
        batches.append(_checked(source, *read_cifar_rows(raw, source.classes, where), where))
    train_x, train_y = (np.concatenate(arrays) for arrays in zip(*batches[:-1], strict=True))
    return {"train": (train_x, train_y), "test": batches[-1]}


def read_cifar_rows(raw: bytes, classes: int, where: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rows of the binary version: label (of CIFAR-100: coarse, fine), then 1,024 bytes each of R, G and B."""
    head = 2 if classes == 100 else 1
    if len(raw) == 0 or len(raw) % (head + 3072):
        raise ConfigError(f"{where}: {len(raw)} bytes are no whole number of {head + 3072}-byte rows.")
    rows = np.frombuffer(raw, np.uint8).reshape(-1, head + 3072)
    return rows[:, head:].reshape(-1, 3, 32, 32), rows[:, head - 1]


def _read_medmnist(source: Source, path: Path, splits: Sequence[str]) -> Images:
    arrays = read_npz(path, *(f"{split}_{what}" for split in splits for what in ("images", "labels")))
    images: Images = {}
    for split in splits:
        x, y = arrays[f"{split}_images"], arrays[f"{split}_labels"]
        planes = x.transpose(0, 3, 1, 2) if x.ndim == 4 else x[:, None]
        labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
        images[split] = _checked(source, planes, labels, f"{path}: {split}")
    return images


def _checked(
    source: Source, x: NDArray[Any], y: NDArray[Any], where: Path | str
) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images and labels, if they have the source's shape and classes."""
    if x.dtype != np.uint8 or x.shape[1:] != source.shape:
        raise ConfigError(
            f"{where}: images must be bytes of shape {source.shape}; got {x.dtype} of shape {x.shape[1:]}."
        )
    wanted, classes = ((source.classes,), 2) if source.multi_label else ((), source.classes)
    if not np.issubdtype(y.dtype, np.integer) or y.shape[1:] != wanted:
        raise ConfigError(
            f"{where}: labels must be whole numbers of shape {wanted}; got {y.dtype} of shape {y.shape[1:]}."
        )
    labels = y.astype(np.int64)
    if len(x) != len(labels) or len(x) == 0:
        raise ConfigError(f"{where}: {len(x)} images but {len(labels)} labels.")
    if labels.min() < 0 or labels.max() >= classes:
        bad = labels[(labels < 0) | (labels >= classes)][0]
        raise ConfigError(
            f"{where}: label {bad} is outside 0 to {classes - 1}; the file is damaged or of another data set."
        )
    return np.ascontiguousarray(x), labels


def _bytes(path: Path) -> bytes:
    check_plain(path)
    try:
        with path.open("rb") if path.suffix != ".gz" else gzip.open(path) as file:
            raw: bytes = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read, truncated or damaged ({error}).") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: has more than {MOST_BYTES:,} bytes, more than any supported data set.")
    return raw


def _unpack(archive: Path, names: Sequence[str]) -> dict[str, bytes]:
    """Members by their exact names, into memory: nothing is written to the paths in the archive."""
    packed: dict[str, bytes] = {}
    check_plain(archive)
    try:
        with tarfile.open(archive, "r|gz") as tar:  # one pass over the archive
            for member in tar:
                if member.name in names and member.isreg() and member.size <= MOST_BYTES:
                    file = tar.extractfile(member)
                    packed[member.name] = file.read() if file else b""
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ConfigError(f"{archive}: cannot be read, truncated or damaged ({error}).") from error
    missing = [name for name in names if name not in packed]
    if missing:
        raise ConfigError(f"{archive}: lacks {missing[0]}; it must be the binary version of the data set.")
    return packed


def combine(
    table: DataTable, sources: Sequence[Source], images: Sequence[Images], task: Task | None = None
) -> Federation:
    """A federation with one client for each source.

    The first source keeps its labels; those of the next follow on, and so on. Grey images become RGB when any source
    is RGB; all images get the size of the largest, or ``image_size`` (bilinear). With ``storage`` 'bytes' pixels
    stay bytes in memory and become [-1, 1] in a batch; resized images are rounded to bytes then.
    """
    scalings = _scalings(table, len(sources))
    dtype = torch.uint8 if table.storage == "bytes" else torch.float32
    shape = tuple(max(sizes) for sizes in zip(*(source.shape for source in sources), strict=True))
    if table.image_size is not None:
        shape = (shape[0], table.image_size, table.image_size)
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
                smaller = x.shape[2] < chunk.shape[2]
                chunk = F.interpolate(chunk, size=x.shape[2:], mode="bilinear", antialias=smaller)
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
