"""Files of a run's folder: written whole or not at all, and verified by their SHA-256 when they are read.

Tensors are in files of safetensors, which never hold code.

There is one scheme of integrity: a table of digests by file name. ``SHA256SUMS`` is the table of a run's folder, in the
format of ``sha256sum --check``, and every checkpoint has a table of its files. The digest of a file that grows
is that of all lines written so far: lines that a killed process added after it are ignored.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpews import outside
from fedpews.errors import CheckpointError, ConfigError, first_line
from fedpews.results import layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fedpews.trees import Nest

ASIDE = re.compile(r"\..+\.[0-9a-f]{8}\.new")
"""The name of a file that is being written."""

FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
"""How a file is opened for writing: never through a link, and on Windows without changing line ends."""

MOST_TEXT = 1024 * outside.MEGABYTE
"""Bytes of one text file of a run; 2,000 rounds of five seeds with 100 clients have 60 million."""

_LINE = re.compile(r"([0-9a-f]{64})  ([\w.+-]+)")


def digest(data: bytes) -> str:
    """The SHA-256 of a file's content."""
    return hashlib.sha256(data).hexdigest()


@contextmanager
def _failing(path: Path, what: str = "written") -> Iterator[None]:
    """Errors of the system as a CheckpointError that names the file."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} cannot be {what}: {error.strerror or error}") from error


def write_atomically(path: Path, data: bytes, *, durable: bool = True) -> None:
    """A file appears whole or not at all, even if the machine goes down.

    Args:
        durable: whether the file must be on disk when this returns; if not, the caller calls ``sync`` when it must.
    """
    # a name that cannot be guessed, and never through a link
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    with _failing(path):
        try:
            file = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | FLAGS, 0o666)
            try:
                _write_all(file, data)
                if durable:
                    os.fsync(file)
            finally:
                os.close(file)
            os.replace(aside, path)
            if durable:
                sync(path.parent)
        except BaseException:
            aside.unlink(missing_ok=True)
            raise


def _write_all(file: int, data: bytes) -> None:
    """Write all of the data: the system may write less at a time."""
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    is_folder = path.is_dir()
    # Windows syncs folders by itself, and only files that are open for writing
    if is_folder and os.name == "nt":
        return
    file = os.open(path, os.O_RDONLY if is_folder else os.O_RDWR)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def read_bytes(path: Path, most: int = MOST_TEXT) -> bytes:
    """The content of a plain file; anything else, and text of more than ``most`` bytes, is a CheckpointError."""
    try:
        return outside.read_bytes(path, sys.maxsize if path.suffix == ".safetensors" else most, follow=False)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error


def remove_file(path: Path) -> None:
    """Delete a file if it exists; a folder of that name does not belong to a run, and stays."""
    with _failing(path, "deleted"):
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)


def read_sums(folder: Path) -> dict[str, str]:
    """The digests in SHA256SUMS by file name; none if there is no such file."""
    path = folder / layout.SUMS
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        lines = read_bytes(path).decode().splitlines()
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    matches = [_LINE.fullmatch(line) for line in lines]
    if not lines or not all(matches):
        raise CheckpointError(f"{path} is damaged: not every line is a digest and a name")
    return {match[2]: match[1] for match in matches if match is not None}


def write_sums(folder: Path, sums: Mapping[str, str], *, durable: bool = True) -> None:
    """Write SHA256SUMS; without any digest there is no such file."""
    if not sums:
        remove_file(folder / layout.SUMS)
        return
    text = "".join(f"{value}  {name}\n" for name, value in sorted(sums.items()))
    write_atomically(folder / layout.SUMS, text.encode(), durable=durable)


def is_expected(path: Path) -> bool:
    """Whether a file exists, or is listed in SHA256SUMS beside it."""
    return path.exists() or path.is_symlink() or path.name in read_sums(path.parent)


def read_verified(path: Path, most: int = MOST_TEXT) -> bytes:
    """A file's content, if it is what SHA256SUMS beside it says; a file that is not listed there is not verified."""
    for _ in range(2):
        expected = read_sums(path.parent).get(path.name)
        data = read_bytes(path, most)
        content = data if expected is None else matching(data, expected, path.name)
        if content is not None:
            return content
        # a run that is going on may have replaced both files between the two reads
    raise CheckpointError(
        f"{path} is damaged: it does not match its digest in {layout.SUMS}; "
        "restore a copy, or continue the run (--resume), which writes it again where it can"
    )


def matching(data: bytes, expected: str, name: str) -> bytes | None:
    """The data if it has the digest expected, of a growing file its first lines that have it; else None.

    >>> matching(b"1\\n2\\n3\\n", digest(b"1\\n2\\n"), layout.ROUNDS)
    b'1\\n2\\n'
    """
    if digest(data) == expected:
        return data
    if name in layout.GROWING:
        hasher, size = hashlib.sha256(), 0
        for line in [b"", *data.splitlines(keepends=True)]:
            hasher.update(line)
            size += len(line)
            if hasher.hexdigest() == expected:
                return data[:size]
    return None


class GrowingFile:
    """A file of lines that one process appends to, and the digest of all that is in it."""

    def __init__(self, path: Path, keep: bytes) -> None:
        """Open a file and cut off what follows ``keep``, which it starts with: a killed run's later lines."""
        self._path, self._hasher, self.is_empty = path, hashlib.sha256(keep), not keep
        with _failing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | FLAGS, 0o666)
            os.ftruncate(self._file, len(keep))

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def append(self, text: str) -> None:
        data = text.encode()
        with _failing(self._path):
            _write_all(self._file, data)
        self._hasher.update(data)
        self.is_empty = self.is_empty and not data

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


def read_tensors(path: Path, *, follow: bool = False) -> dict[str, Tensor]:
    """The tensors of a plain file; with ``follow`` the path may be a link."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = outside.read_bytes(path, sys.maxsize, follow=follow)
    try:
        tensors: dict[str, Tensor] = load(data)
    # a type of numbers that torch does not have is a KeyError
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{path} is damaged: {first_line(error)}") from error
    return tensors


def write_nest(path: Path, nest: Nest, header: Mapping[str, Any], *, durable: bool = True) -> str:
    """Write a nested dict of tensors as one file and return its digest."""
    from safetensors.torch import save

    from fedpews.trees import flatten

    leaves, structure = flatten(nest)
    # numbered: the structure says where each tensor belongs
    tensors = {str(i): leaf.detach().cpu().contiguous().clone() for i, leaf in enumerate(leaves)}
    data = save(tensors, {"about": json.dumps({"header": dict(header), "structure": structure})})
    write_atomically(path, data, durable=durable)
    return digest(data)


def read_nest(
    path: Path, device: torch.device | str = "cpu", expected: str | None = None
) -> tuple[Nest, dict[str, Any]]:
    """The inverse of ``write_nest``: the nest with its tensors on a device, and the header.

    A damaged file is a CheckpointError.

    Args:
        expected: the digest that the file must have.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    from fedpews.trees import unflatten

    data = read_bytes(path)
    if expected is not None and digest(data) != expected:
        raise CheckpointError(f"{path} is damaged: it does not match its digest")
    try:
        # the format: the length of a JSON header in eight bytes, then the header
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        about = json.loads(header["__metadata__"]["about"])
        tensors = load(data)
        leaves = (tensors[str(i)].to(device) for i in range(len(tensors)))
        return unflatten(leaves, about["structure"]), dict(about["header"])
    except (
        SafetensorError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
        StopIteration,
    ) as error:
        raise CheckpointError(
            f"{path} is damaged ({first_line(error)}). Start again in another folder (--out)."
        ) from error
