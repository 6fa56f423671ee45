"""Tiny data sets in the published layouts, one writer per layout."""

from __future__ import annotations

import gzip
import tarfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np

from fedpews.data.catalogue import SOURCES


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def pixels(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


def write_mnist(root: Path, per_class: int = 3) -> None:
    rng = np.random.default_rng(0)
    (root / "mnist").mkdir(parents=True, exist_ok=True)
    for half in ("train", "t10k"):
        labels = np.tile(np.arange(10), per_class)
        images = pixels(rng, len(labels), 28, 28)
        (root / f"mnist/{half}-images-idx3-ubyte.gz").write_bytes(idx(images))
        (root / f"mnist/{half}-labels-idx1-ubyte.gz").write_bytes(idx(labels))


def write_cifar(root: Path, classes: int = 10, per_class: int = 1) -> None:
    rng = np.random.default_rng(1)
    for member in SOURCES[f"cifar{classes}"].members:
        labels = np.tile(np.arange(classes), per_class).astype(np.uint8)[:, None]
        head = np.hstack([labels % 20, labels]) if classes == 100 else labels
        rows = np.hstack([head, pixels(rng, len(labels), 3072)])
        (root / member).parent.mkdir(parents=True, exist_ok=True)
        (root / member).write_bytes(rows.astype(np.uint8).tobytes())


def pack_cifar(
    root: Path, archive: Path, classes: int = 10, rename: Callable[[str], str] = lambda name: name
) -> None:
    with tarfile.open(archive, "w:gz") as tar:
        for member in SOURCES[f"cifar{classes}"].members:
            raw = (root / member).read_bytes()
            info = tarfile.TarInfo(rename(member))
            info.size = len(raw)
            tar.addfile(info, BytesIO(raw))


def medmnist_arrays(name: str, per_class: int = 3) -> dict[str, np.ndarray]:
    source, rng = SOURCES[name], np.random.default_rng(2)
    arrays = {}
    for half in ("train", "val", "test"):
        labels = np.tile(np.arange(source.classes), per_class).astype(np.uint8)[:, None]
        shape = (len(labels), 28, 28) + ((3,) if source.shape[0] == 3 else ())
        arrays |= {f"{half}_images": pixels(rng, *shape), f"{half}_labels": labels}
    return arrays


def write_medmnist(root: Path, name: str, per_class: int = 3, **changed: np.ndarray) -> Path:
    path = root / f"medmnist/{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **(medmnist_arrays(name, per_class) | changed))
    return path
