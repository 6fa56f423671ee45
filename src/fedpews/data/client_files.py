"""The files of a client's folder: their order, and images."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpews.errors import ConfigError
from fedpews.outside import check_plain

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
"""The formats that are read, whatever a file is called."""

MOST_PIXELS = 64_000_000
"""In one image."""


class UnequalSizes(ConfigError):
    """Images of more than one size.

    Args:
        side: the shortest side so far.
    """

    def __init__(self, message: str, side: int) -> None:
        super().__init__(message)
        self.side = side


def read_image(
    path: Path, size: int | None = None, expected: tuple[int, int] | None = None
) -> NDArray[np.uint8]:
    """(height, width, 1 or 3) bytes.

    With ``size`` the shorter side is scaled to it (bilinear) and the middle square is kept, so nothing is stretched.
    With ``expected`` (height, width) another size is refused before its pixels are read.
    """
    from PIL import Image, ImageOps

    check_plain(path)
    try:
        # these formats only: others (EPS) start programs or decode without end
        with Image.open(path, formats=FORMATS) as image:
            _check_image(path, image.size, expected)
            if image.mode not in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"):
                raise ConfigError(f"{path}: pixels of kind {image.mode!r}; save it as 8-bit grey or RGB.")
            plain = image.convert("L" if image.mode in ("1", "L", "LA") else "RGB")
            if size is not None:
                plain = ImageOps.fit(plain, (size, size), Image.Resampling.BILINEAR)
            pixels = np.asarray(plain)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a decoder makes of foreign bytes
        raise ConfigError(f"{path}: cannot be read as an image ({error!s:.200}).") from None
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def _check_image(path: Path, size: tuple[int, int], expected: tuple[int, int] | None) -> None:
    width, height = size
    if width * height > MOST_PIXELS:
        raise ConfigError(
            f"{path}: has {width}×{height} pixels, more than {MOST_PIXELS:,}; make it smaller first."
        )
    if expected is not None and (height, width) != expected:
        raise UnequalSizes(
            f"{path}: is {width}×{height}, those before it {expected[1]}×{expected[0]}; "
            "make all images the same size, or set data.image_size.",
            min(width, height, *expected),
        )


def listed(folder: Path) -> list[Path]:
    """The entries of a folder, in natural order."""
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
