"""A folder with an entry per client and a test: npz files, or folders of images. See `fedpews.data.user_data`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.federation import Federation, from_clients
from fedpews.data.readers import read_npz
from fedpews.errors import ConfigError, DataMissing

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
BESIDES = {".txt", ".md", ".rst", ".csv", ".json", ".toml", ".yaml", ".yml"}  # may lie about: notes, licences


def read_folder(folder: Path, name: str) -> Federation:
    if not folder.is_dir():
        raise DataMissing(
            f"data {name!r}: {str(folder)!r} is not a folder; it must hold an entry per client and a test."
        )
    entries: dict[str, Path] = {}
    for path in _listed(folder):
        if path.is_file() and path.suffix != ".npz":
            if path.suffix.lower() in BESIDES or not path.suffix:
                continue
            raise ConfigError(f"{path}: an entry must be an .npz file or a folder; move this one elsewhere.")
        title = path.stem if path.is_file() else path.name
        if title in entries:
            raise ConfigError(f"{folder}: {title!r} is there as a file and as a folder; keep one.")
        entries[title] = path
    test = entries.pop("test", None)
    if test is None or not entries:
        lacking = "an entry called test" if test is None else "an entry per client beside the test"
        raise ConfigError(f"{folder}: needs {lacking}: an .npz file with x and y, or a folder.")
    paths = [*entries.values(), test]
    archives = [_archive(path) for path in paths]
    if all(archive is not None for archive in archives):
        pairs = [read_pair(archive) for archive in archives if archive is not None]
        class_names: tuple[str, ...] = ()
    elif any(archive is not None for archive in archives):
        raise ConfigError(
            f"{folder}: has npz files for some clients and images for others; use one kind for all."
        )
    else:
        pairs, class_names = _read_images(paths)
    try:
        return from_clients(
            pairs[:-1], pairs[-1], len(class_names) or None, name, class_names, tuple(entries)
        )
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None


def _archive(path: Path) -> Path | None:
    """The npz file of an entry, or None when it is a folder of images."""
    if path.is_file():
        return path
    found = [inner for inner in _listed(path) if inner.suffix == ".npz"]
    if len(found) > 1:
        raise ConfigError(f"{path}: has {len(found)} npz files; put all samples of a client in one.")
    return found[0] if found else None


def read_pair(path: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """The samples in one npz file; bytes are taken for images."""
    arrays = read_npz(path, "x", "y")
    x, y = arrays["x"], arrays["y"]
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if x.dtype == np.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        if x.ndim != 4:
            raise ConfigError(
                f"{path}: x holds bytes, so it must be images, (n, h, w) or (n, h, w, 3); got {x.shape}."
            )
        x = x.astype(np.float32) / np.float32(127.5) - 1
    if not np.issubdtype(x.dtype, np.floating) or not np.issubdtype(y.dtype, np.integer):
        raise ConfigError(
            f"{path}: x must be floating point (or bytes) and y whole numbers; got {x.dtype} and {y.dtype}."
        )
    return x, y


def _read_images(paths: Sequence[Path]) -> tuple[list[tuple[NDArray[Any], NDArray[Any]]], tuple[str, ...]]:
    """The clients' images; a class is the name of a sub-folder, numbered in order over all clients."""
    classes = tuple(
        sorted({inner.name for path in paths for inner in _listed(path) if inner.is_dir()}, key=_natural)
    )
    raw: list[tuple[list[NDArray[np.uint8]], list[int]]] = []
    size: tuple[int, int] | None = None
    for path in paths:
        images, labels = [], []
        for label, title in enumerate(classes):
            for file in _listed(path / title) if (path / title).is_dir() else []:
                if file.suffix.lower() not in IMAGES:
                    raise ConfigError(
                        f"{file}: not an image ({', '.join(sorted(IMAGES))}); move it elsewhere."
                    )
                image = _read_image(file)
                size = size or (image.shape[0], image.shape[1])
                if image.shape[:2] != size:
                    raise ConfigError(
                        f"{file}: is {image.shape[1]}×{image.shape[0]}, those before it {size[1]}×{size[0]}; "
                        "make all images the same size."
                    )
                images.append(image)
                labels.append(label)
        if not images:
            raise ConfigError(
                f"{path}: has no images; they go in a sub-folder for each class, e.g. {path.name}/cat/1.png."
            )
        raw.append((images, labels))
    channels = max(image.shape[2] for images, _ in raw for image in images)
    pairs = []
    for images, labels in raw:
        x = np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])
        planes = x.transpose(0, 3, 1, 2).astype(np.float32) / np.float32(127.5) - 1
        pairs.append((planes, np.array(labels)))
    return pairs, classes


def _read_image(path: Path) -> NDArray[np.uint8]:
    """(height, width, 1 or 3) bytes."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError(
            "image folders need Pillow, which is not installed; install pillow, or use npz files."
        ) from None
    try:
        with Image.open(path) as image:
            if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
                raise ConfigError(f"{path}: pixels of kind {image.mode!r}; save it as 8-bit grey or RGB.")
            pixels = np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"{path}: cannot be read as an image ({error}).") from None
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _listed(folder: Path) -> list[Path]:
    return sorted(
        (path for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda path: _natural(path.name),
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """So that site-10 comes after site-9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
