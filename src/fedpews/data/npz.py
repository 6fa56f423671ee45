"""npz files, whose headers are checked before any memory is spent on them. Nothing is unpickled."""

from __future__ import annotations

import math
import os
import struct
import tokenize
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpews.errors import ConfigError
from fedpews.outside import MEGABYTE, check_plain

MOST_TIMES, FREE = 200, 256 * MEGABYTE
"""Unpacked, a file may always have ``FREE`` bytes and so many times its size: beyond that it is an attack on memory."""

BROKEN = (
    ValueError,
    OSError,
    EOFError,
    zlib.error,
    struct.error,
    zipfile.BadZipFile,
    # a password, or an unknown compression
    RuntimeError,
    # a header is parsed as a Python literal
    SyntaxError,
    tokenize.TokenError,
    TypeError,
    LookupError,
    OverflowError,
    MemoryError,
)
"""What a zip file, a header or a compressed stream that is damaged may raise."""

_DTYPE_KINDS = "biufcSU"  # numbers, and labels that are text


def read_npz(path: Path, *keys: str) -> dict[str, NDArray[Any]]:
    """The named arrays of an npz file, without pickle."""
    check_plain(path)
    try:
        with path.open("rb") as raw:
            # a single array, as numpy.save makes it
            if raw.read(6) == b"\x93NUMPY":
                raise ConfigError(f"{path}: not an npz file; save it with numpy.savez(path, x=..., y=...).")
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            lacking = [key for key in keys if key not in entries]
            if lacking:
                raise ConfigError(
                    f"{path}: lacks {', '.join(lacking)}; it has {', '.join(entries)[:200] or 'no arrays'}."
                )
            sizes = {key: _declared_size(path, archive, entries[key]) for key in keys}
            _check_size(path, sum(sizes.values()))
            return {key: _read(archive, entries[key]) for key in keys}
    except BROKEN as error:
        raise ConfigError(
            f"{path}: not a readable npz file of plain arrays ({error!s:.200}); make it again."
        ) from error


def _declared_size(path: Path, archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> int:
    """The bytes of an array by its header, which must be those of its entry."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ConfigError(
            f"{path}: {info.filename} has a compression that numpy does not use; make it again."
        )
    with archive.open(info) as file:
        shape, _, dtype = _header(file)
        if dtype.hasobject or dtype.kind not in _DTYPE_KINDS:
            raise ConfigError(
                f"{path}: not a readable npz file of plain arrays: {info.filename} holds {dtype}; make it again."
            )
        size = math.prod(shape) * dtype.itemsize
        if file.tell() + size != info.file_size:
            raise ConfigError(
                f"{path}: {info.filename} promises {size:,} bytes of {dtype} and has {info.file_size - file.tell():,}; "
                "it is truncated or damaged, make it again."
            )
    return size


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(file)
    with warnings.catch_warnings():
        # about headers that Python 2 wrote
        warnings.simplefilter("ignore")
        if version == (1, 0):
            return npy.read_array_header_1_0(file)
        if version == (2, 0):
            return npy.read_array_header_2_0(file)
    raise ValueError(f"an array in the version {version} of the format")


def _check_size(path: Path, size: int) -> None:
    packed = path.stat().st_size
    if size > FREE + MOST_TIMES * packed:
        raise ConfigError(
            f"{path}: has {packed:,} bytes and would unpack to {size:,}, more than {MOST_TIMES} times as many; if that "
            "is meant, save it with numpy.savez, uncompressed."
        )
    memory = _memory()
    if memory is not None and size > memory:
        raise ConfigError(f"{path}: its arrays need {size:,} bytes, and this machine has {memory:,}.")


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # not everywhere
    except (AttributeError, ValueError, OSError):
        return None


def _read(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(info) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array: NDArray[Any] = npy.read_array(file, allow_pickle=False)
    return array
