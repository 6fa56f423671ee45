"""The files of a source: in the data directory, FEDPEWS_DATA or the cache, or downloaded."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedpews.data.catalogue import SOURCES, File, Source
from fedpews.errors import ConfigError, DataMissing, nearest

ATTEMPTS = 2  # times each address of a file is tried
PAUSE = 1.0  # seconds before the second try


@dataclass(frozen=True)
class Status:
    """Whether a source can be loaded without the network."""

    name: str
    state: str  # ready, made (needs no files), incomplete or missing
    paths: tuple[Path, ...] = ()
    lacking: tuple[str, ...] = ()  # files that are not there
    published: bool | None = None
    """Whether they are the published files, byte for byte; None when not checked."""

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def cache_dir() -> Path:
    """The default directory of downloads."""
    import pooch

    return Path(pooch.os_cache("fedpews"))


def roots(data_dir: Path | str | None = None) -> list[Path]:
    """The directories to look in, in order: the one given, FEDPEWS_DATA, the cache."""
    named = {"the data directory": data_dir, "FEDPEWS_DATA": os.environ.get("FEDPEWS_DATA") or None}
    paths = {what: Path(path).expanduser() for what, path in named.items() if path is not None}
    for what, path in paths.items():
        if not path.is_dir():
            raise DataMissing(f"{what} {str(path)!r} is not a directory.")
    return [*paths.values(), cache_dir()]


def find(source: Source, root: Path) -> tuple[dict[str, Path], list[str]]:
    """A source's files below one directory (name → path), and the names of those that are missing.

    A file may be at its usual path (mnist/train-images-idx3-ubyte.gz) or directly in the directory, an archive packed
    or unpacked, an idx file with or without .gz.
    """
    unpacked = {member: root / member for member in source.members if (root / member).is_file()}
    if source.members and len(unpacked) == len(source.members):
        return unpacked, []
    paths: dict[str, Path] = {}
    for file in source.files:
        candidates = [root / file.path, root / file.name]
        if source.kind == "idx":
            candidates += [path.with_suffix("") for path in candidates]
        here = [path for path in candidates if path.is_file()]
        if here:
            paths[file.name] = here[0]
    if source.members and not paths:
        return unpacked, [member for member in source.members if member not in unpacked]
    return paths, [file.path for file in source.files if file.name not in paths]


def obtain(source: Source, data_dir: Path | str | None = None, keep: bool = False) -> dict[str, Path]:
    """A source's files, from the first directory that has all of them, else downloaded to the cache.

    Args:
        keep: download to the data directory instead.
    """
    directories = roots(data_dir)
    for root in directories:
        paths, missing = find(source, root)
        if not missing:
            return paths
    into = directories[0 if keep else -1]
    for file in source.files:
        _fetch(file, into, source, directories[0])
    return find(source, into)[0]


def status(data_dir: Path | str | None = None, *, check: bool = False) -> list[Status]:
    """The status of every named source; nothing is downloaded.

    ``check`` also compares the files with the published checksums.
    """
    directories = roots(data_dir)
    return [_status(source, directories, check) for source in SOURCES.values()]


def get(names: Iterable[str], data_dir: Path | str | None = None) -> list[Status]:
    """Download the missing files of these sources, into the data directory when it is given, else the cache."""
    wanted = {source.name: source for name in names for source in named(name)}
    if data_dir is not None:
        Path(data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    for source in wanted.values():
        obtain(source, data_dir, keep=data_dir is not None)
    return [_status(source, roots(data_dir), check=False) for source in wanted.values()]


def named(name: str) -> list[Source]:
    """The single sources of a name: itself, those of a combination, or of `a+b+c`."""
    if name in SOURCES:
        return [SOURCES[single] for single in SOURCES[name].sources or (name,)]
    names = [single.strip() for single in name.split("+")]
    for single in names:
        if single not in SOURCES:
            raise ConfigError(
                f"unknown data set {single!r}; {nearest(single, SOURCES)} (Your own: folder:PATH or module:function.)"
            )
        if SOURCES[single].kind in ("combination", "synthetic"):
            raise ConfigError(f"{single!r} cannot be part of {name!r}; combine single image sets.")
    if len(set(names)) != len(names):
        raise ConfigError(f"{name!r} names a data set twice; name each once.")
    return [SOURCES[single] for single in names]


def _status(source: Source, directories: list[Path], check: bool) -> Status:
    if source.sources:
        singles = [_status(SOURCES[name], directories, check) for name in source.sources]
        states, checked = {single.state for single in singles}, [single.published for single in singles]
        return Status(
            source.name,
            states.pop() if len(states) == 1 else "incomplete",
            tuple(path for single in singles for path in single.paths),
            tuple(path for single in singles for path in single.lacking),
            None if None in checked else all(checked),
        )
    if not source.files:
        return Status(source.name, "made")
    # the first directory that has all files, else the first that has some
    candidates = [find(source, root) for root in directories]
    paths, lacking = min(candidates, key=lambda pair: 0 if not pair[1] else 1 if pair[0] else 2)
    if lacking:
        state = "incomplete" if paths else "missing"
        return Status(source.name, state, tuple(paths.values()), tuple(lacking))
    # unpacked archives have no published checksum
    md5s = {file.name: file.md5 for file in source.files}
    published = all(_md5(path) == md5s.get(name) for name, path in paths.items()) if check else None
    return Status(source.name, "ready", tuple(paths.values()), (), published)


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _fetch(file: File, into: Path, source: Source, hint: Path) -> None:
    import pooch

    target = into / file.path
    if target.is_file() and _md5(target) == file.md5:
        return
    reason = "downloads are switched off (FEDPEWS_OFFLINE)"
    if not os.environ.get("FEDPEWS_OFFLINE"):
        pooch.get_logger().setLevel("WARNING")
        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            for url in file.urls:
                bar = _Bar(file.name) if sys.stderr.isatty() else False
                downloader = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=(10, 60))
                try:
                    pooch.retrieve(url, f"md5:{file.md5}", target.name, target.parent, downloader=downloader)
                    return
                except ValueError:
                    reason = f"what {url.split('/')[2]} sent has a wrong checksum"
                except OSError as error:  # no network, or refused
                    reason = f"{type(error).__name__} from {url.split('/')[2]}"
    others = f" or its unpacked {source.members[0].rpartition('/')[0]}/" if source.members else ""
    raise DataMissing(
        f"{source.name}: {file.name} is not here and could not be downloaded: {reason}.\n"
        f"Put {file.name}{others} at {hint / file.path} (from {file.urls[0]})."
    )


class _Bar:
    """Progress on standard error, with the methods that pooch calls."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.done, self.shown = name, 0, 0, -1

    def update(self, size: int) -> None:
        self.done += size
        percent = min(100, 100 * self.done // self.total) if self.total else 0
        if percent != self.shown:
            self.shown = percent
            text = f"\r{self.name} {percent:3d} % of {self.total / 1e6:.1f} MB"
            print(text, end="", file=sys.stderr, flush=True)

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        print(file=sys.stderr)
