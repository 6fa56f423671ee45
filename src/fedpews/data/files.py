"""Files of others: npz files and images, read within limits and without pickle; the entries of a folder in order."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpews.errors import ConfigError
from fedpews.outside import MEGABYTE, check_plain

MOST_TIMES, FREE = 200, 256 * MEGABYTE
"""An npz file may unpack to ``FREE`` bytes and so many times its size; beyond that it is an attack on memory."""

ARRAY_KINDS = "biufcSU"
"""dtypes that are read: numbers, and labels that are text."""

IMAGE_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""The formats that are read, whatever the name of a file."""

MOST_PIXELS = 64_000_000
"""In one image."""


class UnequalSizes(ConfigError):
    """Images of more than one size; ``side`` is the shortest side so far."""

    def __init__(self, message: str, side: int) -> None:
        super().__init__(message)
        self.side = side


def read_npz(path: Path, *keys: str) -> dict[str, NDArray[Any]]:
    """The named arrays of an npz file. Their headers are checked before any memory is allocated."""
    check_plain(path)
    arrays: dict[str, NDArray[Any]] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            missing = ", ".join(key for key in keys if key not in entries)
            if missing:
                raise ConfigError(f"{path}: lacks {missing}; it has {', '.join(entries)[:200]}.")
            size, packed = sum(_array_size(archive, entries[key]) for key in keys), path.stat().st_size
            if size > FREE + MOST_TIMES * packed:
                raise ConfigError(
                    f"{path}: has {packed:,} bytes and would unpack to {size:,}, more than {MOST_TIMES} times as "
                    "many; if that is intended, save it with numpy.savez, uncompressed."
                )
            for key in keys:
                with archive.open(entries[key]) as file:
                    arrays[key] = npy.read_array(file, allow_pickle=False)
    except ConfigError:
        raise
    except Exception as error:  # a damaged zip file, header or stream may raise anything
        raise ConfigError(
            f"{path}: not a readable npz file of plain arrays ({error!s:.200}); save it with numpy.savez."
        ) from error
    return arrays


def _array_size(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """The bytes of an array by its header, which must agree with its entry in the archive."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{info.filename} has a compression that numpy does not use")
    with archive.open(info) as file:
        if npy.read_magic(file) != (1, 0):
            raise ValueError(f"{info.filename} has another version of the format")
        shape, _, dtype = npy.read_array_header_1_0(file)
        if dtype.kind not in ARRAY_KINDS:
            raise ValueError(f"{info.filename} holds {dtype}")
        size, stored = math.prod(shape) * dtype.itemsize, info.file_size - file.tell()
    if size != stored:
        raise ValueError(f"{info.filename} promises {size:,} bytes and has {stored:,}")
    return size


def read_image(
    path: Path, size: int | None = None, expected: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """The pixels of a file; with ``expected`` (height, width) another size is refused before they are read."""
    from PIL import Image

    check_plain(path)
    try:
        # these formats only: others (EPS) start programs or decode without end
        with Image.open(path, formats=IMAGE_FORMATS) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ConfigError(f"{path}: has {width}×{height} pixels, more than {MOST_PIXELS:,}.")
            if expected is not None and (height, width) != expected:
                raise UnequalSizes(
                    f"{path}: is {width}×{height}, those before it {expected[1]}×{expected[0]}; "
                    "make all images the same size, or set data.image_size.",
                    min(width, height, *expected),
                )
            if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
                raise ConfigError(f"{path}: pixels of kind {image.mode!r}; save it as 8-bit grey or RGB.")
            return to_pixels(image, size)
    except ConfigError:
        raise
    except Exception as error:  # a decoder may raise anything on damaged bytes
        raise ConfigError(f"{path}: cannot be read as an image ({error!s:.200}).") from error


def to_pixels(image: Any, size: int | None = None) -> NDArray[np.uint8]:
    """An image of PIL as (height, width, 1 or 3) bytes.

    With ``size`` the shorter side is scaled to it (bilinear) and the middle square is kept, so nothing is stretched.
    """
    from PIL import Image, ImageOps

    plain = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
    if size is not None:
        plain = ImageOps.fit(plain, (size, size), Image.Resampling.BILINEAR)
    return np.atleast_3d(np.asarray(plain))


def stack_images(images: Sequence[NDArray[np.uint8]], channels: int | None = None) -> NDArray[np.uint8]:
    """(samples, channels, height, width); a grey image among others of three channels gets three, too."""
    channels = channels or max(image.shape[2] for image in images)
    x = np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2))


def listed(folder: Path) -> list[Path]:
    """The entries of a folder, in natural order; hidden entries are left out."""
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror}).") from error
    return sorted(paths, key=lambda path: natural(path.name))


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which site-10 comes after site-9."""
    # ASCII only: ² is a digit to Python, and no number
    pieces = re.split(r"([0-9]+)", name)
    return [(int(piece), "") if piece.isascii() and piece.isdigit() else (-1, piece) for piece in pieces]
