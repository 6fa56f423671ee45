"""Readers of the published file layouts: each returns exactly what a file holds, or says what is wrong with it.

The layout is checked (magic number, row length, keys, label range), the number of rows is free, so a subset in the
same layout reads like the original. Nothing is unpickled.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.catalogue import Source
from fedpews.data.npz import read_npz
from fedpews.errors import ConfigError
from fedpews.outside import MEGABYTE, check_plain

MOST_BYTES = 1024 * MEGABYTE
"""Of one unpacked file; the largest that is known by name has 47 million."""

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Images:
    """A source as it was published: bytes, not yet scaled."""

    train_x: Pixels  # (samples, channels, height, width)
    train_y: Labels  # (samples,)
    test_x: Pixels
    test_y: Labels
    val_x: Pixels | None = None  # where the source has a validation split and the caller wants it
    val_y: Labels | None = None


def read(source: Source, paths: Mapping[str, Path], validation: bool = False) -> Images:
    """Read a source from its files: published (or member) name → path."""
    if source.kind == "medmnist":
        return _read_medmnist(source, paths, validation)
    return {"idx": _read_mnist, "cifar": _read_cifar}[source.kind](source, paths)


def _read_mnist(source: Source, paths: Mapping[str, Path]) -> Images:
    train, train_labels, test, test_labels = (paths[file.name] for file in source.files)
    halves: list[Any] = []
    _, height, width = source.shape
    for path, labels_path in ((train, train_labels), (test, test_labels)):
        images, labels = read_idx(path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (height, width) or labels.ndim != 1:
            raise ConfigError(
                f"{path}: expected images of {height}×{width} and one label each; "
                f"got arrays of shape {images.shape} and {labels.shape}."
            )
        halves += _checked(images[:, None], labels, source.classes, path)
    return Images(*halves)


def read_idx(path: Path) -> Pixels:
    """An array of bytes in the idx layout: two zeros, type 8, the number of axes, each axis, the values."""
    raw = _bytes(path)
    axes = raw[3] if len(raw) > 3 else 0
    if raw[:3] != b"\x00\x00\x08" or axes not in (1, 3) or len(raw) < 4 + 4 * axes:
        raise ConfigError(
            f"{path}: not an idx file of bytes (it starts with {raw[:4].hex(' ')}, not with 00 00 08 01 "
            "or 00 00 08 03); fetch it again."
        )
    shape = np.frombuffer(raw, ">u4", axes, 4).astype(int)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if values.size != int(np.prod(shape, dtype=object)):
        raise ConfigError(
            f"{path}: truncated or damaged: its header promises {shape.tolist()} values, "
            f"it holds {values.size}; fetch it again."
        )
    return values.reshape(shape)


def _read_cifar(source: Source, paths: Mapping[str, Path]) -> Images:
    archive = paths.get(source.files[0].name)
    packed = _unpack(archive, source.members) if archive else {}
    rows = []
    for member in source.members:
        raw = packed[member] if archive else _bytes(paths[member])
        where = f"{archive}: {member}" if archive else str(paths[member])
        rows.append(read_cifar_rows(raw, source.classes, where))
    train_x, train_y = (np.concatenate(arrays) for arrays in zip(*rows[:-1], strict=True))
    return Images(train_x, train_y, *rows[-1])


def read_cifar_rows(raw: bytes, classes: int, where: str) -> tuple[Pixels, Labels]:
    """Rows of the binary version: label (of CIFAR-100: coarse, fine), then 1,024 bytes each of R, G and B."""
    head = 2 if classes == 100 else 1
    if len(raw) == 0 or len(raw) % (head + 3072):
        raise ConfigError(
            f"{where}: truncated or damaged: {len(raw)} bytes are no whole number of "
            f"{head + 3072}-byte rows; fetch it again."
        )
    rows = np.frombuffer(raw, np.uint8).reshape(-1, head + 3072)
    if head == 2 and rows[:, 0].max() >= 20:
        raise ConfigError(
            f"{where}: coarse label {rows[:, 0].max()} is outside 0 to 19; the file is damaged."
        )
    return _checked(rows[:, head:].reshape(-1, 3, 32, 32), rows[:, head - 1], classes, where)


def _read_medmnist(source: Source, paths: Mapping[str, Path], validation: bool) -> Images:
    path = paths[source.files[0].name]
    wanted = ("train", "test", "val") if validation else ("train", "test")
    arrays = read_npz(path, *(f"{half}_{what}" for half in wanted for what in ("images", "labels")))
    halves: list[Any] = []
    for half in wanted:
        x, y = arrays[f"{half}_images"], arrays[f"{half}_labels"]
        channels, height, width = source.shape
        expected = (height, width, 3) if channels == 3 else (height, width)
        if x.dtype != np.uint8 or x.shape[1:] != expected:
            raise ConfigError(
                f"{path}: {half}_images must be bytes of shape (n, {', '.join(map(str, expected))}); "
                f"got {x.dtype} of shape {x.shape}."
            )
        several = source.classes if source.multi_label else 1
        if not np.issubdtype(y.dtype, np.integer) or y.ndim > 2 or (y.ndim == 2 and y.shape[1] != several):
            raise ConfigError(
                f"{path}: {half}_labels must be {'one whole number' if several == 1 else f'{several} whole numbers'} "
                f"an image; got {y.dtype} of shape {y.shape}."
            )
        planes = x.transpose(0, 3, 1, 2) if channels == 3 else x[:, None]
        labels = y if source.multi_label else y.reshape(-1)
        halves += _checked(planes, labels, 2 if source.multi_label else source.classes, f"{path}: {half}")
    return Images(*halves)


def _checked(x: Pixels, y: NDArray[Any], classes: int, where: Path | str) -> tuple[Pixels, Labels]:
    labels = y.astype(np.int64)
    if len(x) != len(labels) or len(x) == 0:
        raise ConfigError(
            f"{where}: {len(x)} images but {len(labels)} labels; there must be as many, and some."
        )
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
        raise ConfigError(
            f"{path}: cannot be read ({error}); it is truncated or damaged, fetch it again."
        ) from error
    if len(raw) > MOST_BYTES:
        raise ConfigError(
            f"{path}: has more than {MOST_BYTES:,} bytes, which no data set here has; fetch it again."
        )
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
        raise ConfigError(
            f"{archive}: cannot be read ({error}); it is truncated or damaged, fetch it again."
        ) from error
    missing = [name for name in names if name not in packed]
    if missing:
        raise ConfigError(f"{archive}: lacks {missing[0]}; it must be the binary version of the data set.")
    return packed
