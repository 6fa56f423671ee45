"""Where the files of a source lie, and how they get there: data directory, FEDPEWS_DATA, cache, download."""

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
    paths: tuple[Path, ...] = ()  # the files found
    lacking: tuple[str, ...] = ()  # the files not found
    published: bool | None = None
    """Whether they are the published files, byte for byte; None when not checked."""

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)


def cache_dir() -> Path:
    """Where downloads go when nothing else is said."""
    import pooch

    return Path(pooch.os_cache("fedpews"))


def roots(data_dir: Path | str | None = None) -> list[Path]:
    """The directories to look in, in order: the one given, FEDPEWS_DATA, the cache."""
    given = [("the data directory", data_dir), ("FEDPEWS_DATA", os.environ.get("FEDPEWS_DATA") or None)]
    found = []
    for what, place in given:
        if place is not None:
            path = Path(place).expanduser()
            if not path.is_dir():
                raise DataMissing(
                    f"{what} {str(path)!r} is not a directory; name the one that holds your data sets."
                )
            found.append(path)
    return [*found, cache_dir()]


def find(source: Source, root: Path) -> tuple[dict[str, Path], list[str]]:
    """A source's files below one directory (name → path), and the names of those that are not there.

    A file may lie at its usual place (mnist/train-images-idx3-ubyte.gz) or directly in the directory, an
    archive may lie packed or unpacked, an idx file with or without .gz.
    """
    unpacked = {member: root / member for member in source.members if (root / member).is_file()}
    if source.members and len(unpacked) == len(source.members):
        return unpacked, []
    found: dict[str, Path] = {}
    for file in source.files:
        places = [root / file.path, root / file.name]
        if source.kind == "idx":
            places += [place.with_suffix("") for place in places]
        for place in places:
            if place.is_file():
                found[file.name] = place
                break
    if source.members and not found:
        return unpacked, [member for member in source.members if member not in unpacked]
    return found, [file.path for file in source.files if file.name not in found]


def obtain(source: Source, data_dir: Path | str | None = None) -> dict[str, Path]:
    """A source's files, from the first directory that has all of them, else downloaded to the cache."""
    places = roots(data_dir)
    for root in places:
        found, lacking = find(source, root)
        if not lacking:
            return found
    return download(source, places[-1], places[0])


def download(source: Source, into: Path, hint: Path | None = None) -> dict[str, Path]:
    """Fetch a source's published files into a directory; only what has the published checksum is kept."""
    for file in source.files:
        _fetch(file, into, source, hint or into)
    return find(source, into)[0]


def status(data_dir: Path | str | None = None, *, check: bool = False) -> list[Status]:
    """What is here and what is not, for every named source; nothing is downloaded.

    ``check`` also compares the files with the published checksums.
    """
    places = roots(data_dir)
    return [_status(source, places, check) for source in SOURCES.values()]


def get(names: Iterable[str], data_dir: Path | str | None = None) -> list[Status]:
    """Download what these sources lack, into the data directory when one is given, else the cache."""
    wanted: dict[str, Source] = {}
    for name in names:
        for part in named(name):
            wanted[part.name] = part
    if data_dir is not None:
        Path(data_dir).expanduser().mkdir(parents=True, exist_ok=True)
    places = roots(data_dir)
    into = places[-1] if data_dir is None else places[0]
    for source in wanted.values():
        if source.files and all(find(source, root)[1] for root in places):
            download(source, into)
    return [_status(source, places, check=False) for source in wanted.values()]


def named(name: str) -> list[Source]:
    """The single sources a name stands for: itself, the parts of a combination, or `a+b+c`."""
    if name in SOURCES:
        source = SOURCES[name]
        return [SOURCES[part] for part in source.parts] or [source]
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in SOURCES:
            raise ConfigError(
                f"unknown data set {part!r}; {nearest(part, SOURCES)} (Your own: folder:PATH or module:function.)"
            )
        if SOURCES[part].kind in ("combination", "synthetic"):
            raise ConfigError(
                f"{part!r} cannot be part of {name!r}; combine single image sets, e.g. cifar10+mnist."
            )
    if len(set(parts)) != len(parts):
        raise ConfigError(f"{name!r} names a data set twice; name each once.")
    return [SOURCES[part] for part in parts]


def _status(source: Source, places: list[Path], check: bool) -> Status:
    if source.parts:
        parts = [_status(SOURCES[part], places, check) for part in source.parts]
        states = {part.state for part in parts}
        state = states.pop() if len(states) == 1 else "incomplete"
        lacking = tuple(path for part in parts for path in part.lacking)
        published = all(part.published for part in parts) if check and state == "ready" else None
        return Status(
            source.name, state, tuple(path for part in parts for path in part.paths), lacking, published
        )
    if not source.files:
        return Status(source.name, "made")
    best = Status(source.name, "missing", lacking=tuple(file.path for file in source.files))
    for root in places:
        found, absent = find(source, root)
        paths = tuple(found.values())
        if not absent:
            return Status(source.name, "ready", paths, (), _is_published(source, found) if check else None)
        if found and best.state == "missing":
            best = Status(source.name, "incomplete", paths, tuple(absent))
    return best


def _is_published(source: Source, found: dict[str, Path]) -> bool:
    """Whether every file has its published checksum (unpacked archives have none)."""
    known = {file.name: file.md5 for file in source.files}
    return all(name in known and _md5(path) == known[name] for name, path in found.items())


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
                except (OSError, ValueError) as error:  # no network, refused, or a wrong checksum
                    reason = f"{type(error).__name__} from {url.split('/')[2]}"
                    if isinstance(error, ValueError):
                        reason = f"what {url.split('/')[2]} sent has a wrong checksum"
    others = f" or its unpacked {source.members[0].rpartition('/')[0]}/" if source.members else ""
    raise DataMissing(
        f"{source.name}: {file.name} is not here and could not be downloaded: {reason}.\n"
        f"Put {file.name}{others} at {hint / file.path} (from {file.urls[0]})."
    )


class _Bar:
    """The little of a progress bar that pooch asks for, on standard error."""

    def __init__(self, name: str) -> None:
        self.name, self.total, self.done, self.shown = name, 0, 0, -1

    def update(self, size: int) -> None:
        self.done += size
        percent = min(100, 100 * self.done // self.total) if self.total else 0
        if percent != self.shown:
            self.shown = percent
            print(
                f"\r{self.name} {percent:3d} % of {self.total / 1e6:.1f} MB",
                end="",
                file=sys.stderr,
                flush=True,
            )

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        print(file=sys.stderr)
