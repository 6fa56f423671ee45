"""A run folder as bytes, from a worker that does not see our folder, and back into a folder.

What comes in was written by another machine, so it is looked at before anything is written: plain files only, each
inside the folder it belongs to.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath

from fedpews.errors import ConfigError
from fedpews.results import layout
from fedpews.results.files import write_atomically
from fedpews.results.folder import RunFolder


def pack(folder: Path) -> bytes:
    """Every file under a folder but the locks, with the names they have in it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != layout.LOCK):
            tar.add(path, path.relative_to(folder).as_posix(), recursive=False)
    return buffer.getvalue()


def unpack(parcel: bytes, folder: Path) -> list[Path]:
    """Put the run folders of a parcel into ``folder``; the ones that are there now and were not finished before.

    A finished run stays as it is, and a folder that another process holds is a FolderInUse.
    """
    runs: dict[str, dict[PurePosixPath, bytes]] = {}
    for path, content in _files(parcel):
        runs.setdefault(path.parts[0], {})[PurePosixPath(*path.parts[1:])] = content
    placed = []
    for name, files in runs.items():
        target = folder / name
        if layout.is_finished(target):
            continue
        # held while it is written, as by any other run
        with closing(RunFolder(target)):
            _replace(target, files)
        placed.append(target)
    return placed


def _files(parcel: bytes) -> Iterator[tuple[PurePosixPath, bytes]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(parcel), mode="r:gz") as tar:
            for member in tar:
                name = PurePosixPath(member.name)
                inside = not name.is_absolute() and ".." not in name.parts and len(name.parts) > 1
                # a link could point anywhere, and a backslash or a drive means something else on Windows
                if not member.isreg() or not inside or any(sign in member.name for sign in ("\\", ":")):
                    raise ConfigError(f"a worker sent back {member.name!r}, which is no file of a run folder")
                file = tar.extractfile(member)
                assert file is not None
                yield name, file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise ConfigError(f"what a worker sent back is damaged: {error}") from error


def _replace(target: Path, files: dict[PurePosixPath, bytes]) -> None:
    """The files in the place of what a run that was not finished left; the summary last, as every run writes it."""
    for path in [path for path in target.rglob("*") if path.is_file() and path.name != layout.LOCK]:
        path.unlink()
    summary = PurePosixPath(layout.SUMMARY)
    for name, content in sorted(files.items(), key=lambda item: item[0] == summary):
        path = target / name
        os.makedirs(path.parent, exist_ok=True)
        write_atomically(path, content)
