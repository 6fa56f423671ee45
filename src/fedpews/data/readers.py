"""Readers of the published file layouts: each returns exactly what a file holds, or says what is wrong with it.

The layout is checked (magic number, row length, keys, label range), the number of rows is free, so a subset in the
same layout reads like the original. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.catalogue import Source
from fedpews.data.files import read_npz
from fedpews.errors import ConfigError
from fedpews.outside import MEGABYTE, check_plain

MOST_BYTES = 1024 * MEGABYTE
"""Of one unpacked file; the largest that is known by name has 47 million."""

Images = dict[str, tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""The images (samples, channels, height, width) and labels of each split (train, test, val) as published."""


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
        raise ConfigError(f"{where}: label {bad} is outside 0 to {classes - 1}; a damaged or foreign file.")
    return np.ascontiguousarray(x), labels


def _bytes(path: Path) -> bytes:
    check_plain(path)
    try:
        with path.open("rb") if path.suffix != ".gz" else gzip.open(path) as file:
            raw: bytes = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read, truncated or damaged ({error}).") from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"{path}: has more than {MOST_BYTES:,} bytes, which no data set here has.")
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
