"""A folder with an entry per client: npz files, tables, or folders of images. See `fedpews.data.user_data`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedpews.data.client_files import listed, natural, read_image
from fedpews.data.client_tables import check_columns, fill, group, read_table, standardize
from fedpews.data.federation import Federation, from_clients
from fedpews.data.npz import read_npz
from fedpews.errors import ConfigError, DataMissing
from fedpews.outside import MEGABYTE, read_text
from fedpews.tasks.class_names import check_listed, check_spellings
from fedpews.tasks.task import Task

IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".pgm", ".ppm"}
TABLES = {".csv", ".parquet"}
BESIDES = {".txt", ".md", ".rst", ".csv", ".json", ".toml", ".yaml", ".yml"}  # may lie about: notes, licences
PARTS = ("train", "val", "test")
CLASSES = "classes.txt"
"""One class a line, in the order of their labels."""

Pair = tuple[NDArray[Any], NDArray[Any]]
Entry = Mapping[str, Path]
"""A client's files or folders, by part."""


def read_folder(
    folder: Path,
    name: str,
    task: Task,
    label: str | None = None,
    image_size: int | None = None,
    classes: Sequence[str] = (),
    missing: str = "refuse",
    scaling: str | Sequence[str] | None = None,
) -> Federation:
    """The clients of a folder.

    Args:
        label: the column of a table that holds the label.
        image_size: what images are brought to.
        missing: what becomes of missing values in tables, ``refuse`` or ``mean``.
        scaling: of tables: ``standard`` or None.
        classes: the names that the experiment lists. The federation's own may be fewer and in another order.
    """
    if not folder.is_dir():
        raise DataMissing(
            f"data {name!r}: {str(folder)!r} is not a folder; it must hold an entry per client and a test."
        )
    entries = {title: _parts(path) for title, path in _entries(folder).items()}
    common = entries.pop("test", {}).get("train")
    own = bool(entries) and all("test" in parts for parts in entries.values())
    if not entries or (common is None and not own):
        lacking = "an entry called test" if entries else "an entry per client beside the test"
        raise ConfigError(f"{folder}: needs {lacking}: an .npz file with x and y, or a folder.")
    owners = {
        path: title if part == "train" else f"{title}'s {part}"
        for title, parts in entries.items()
        for part, path in parts.items()
    }
    if common is not None:
        owners[common] = "test"
    kinds = {_kind(path) for path in owners}
    if len(kinds) > 1:
        raise ConfigError(
            f"{folder}: has {' and '.join(sorted(kinds))} for different clients; use one kind for all."
        )
    kind = kinds.pop()
    _check_scaling(folder, kind, scaling)
    columns: tuple[str, ...] = ()
    if kind == "images":
        raw = _read_images(owners, image_size)
    elif kind == "npz files":
        raw = {path: read_pair(path) for path in owners}
    else:
        raw, columns = _read_tables([*entries.values()], common, label, missing, scaling)
    names = _names(raw, owners, kind, task)
    class_names = _listed_classes(folder)
    if names:
        tests = {"test", *(owners[parts["test"]] for parts in entries.values() if "test" in parts)}
        _check_names(names, tests, class_names, classes)
        class_names = class_names or tuple(sorted({*chain(*names.values())}, key=natural))
        raw = {path: (x, _numbered(y, class_names)) for path, (x, y) in raw.items()}
    class_names = class_names if _has_classes(task) else ()
    clients = [{part: raw[path] for part, path in parts.items()} for parts in entries.values()]
    test = None if common is None else raw[common]
    try:
        data = from_clients(
            clients,
            test,
            len(class_names) or None,
            name,
            class_names,
            tuple(entries),
            task=task,
        )
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return replace(data, columns=columns)


def _entries(folder: Path) -> dict[str, Path]:
    """The entries by name. Tables beside npz files or folders are taken for notes, not for clients."""
    found = [path for path in listed(folder) if path.is_dir() or path.suffix == ".npz"]
    tables = [path for path in listed(folder) if path.is_file() and path.suffix in TABLES]
    entries: dict[str, Path] = {}
    for path in found or tables:
        title = path.stem if path.is_file() else path.name
        if title in entries:
            raise ConfigError(
                f"{folder}: {title!r} is there as a file and as a folder, or in two kinds; keep one."
            )
        entries[title] = path
    for path in listed(folder):
        known = path in (found or tables) or path.suffix.lower() in BESIDES or not path.suffix
        if path.is_file() and not known:
            raise ConfigError(
                f"{path}: an entry must be an .npz file, a table (.csv, .parquet) or a folder; move this one elsewhere."
            )
    return entries


def _parts(path: Path) -> Entry:
    """A client's train, val and test, where its folder has them; else all of it is for training."""
    parts = {"train": path}
    if path.is_dir():
        inside = {inner.stem if inner.is_file() else inner.name: inner for inner in listed(path)}
        found = {part: inside[part] for part in PARTS if part in inside}
        if "train" in found and len(found) > 1:
            parts = found
    return {part: _file(inner) for part, inner in parts.items()}


def _kind(path: Path) -> str:
    return "images" if path.is_dir() else "npz files" if path.suffix == ".npz" else "tables"


def _file(path: Path) -> Path:
    """The npz file or table of an entry; the entry itself when it is a folder of images."""
    if path.is_file():
        return path
    found = [inner for inner in listed(path) if inner.suffix == ".npz" or inner.suffix in TABLES]
    if len(found) > 1:
        raise ConfigError(
            f"{path}: has {len(found)} npz files or tables; put all samples of a client in one."
        )
    return found[0] if found else path


def _listed_classes(folder: Path) -> tuple[str, ...]:
    file = folder / CLASSES
    if not file.is_file():
        return ()
    names = tuple(line.strip() for line in read_text(file, MEGABYTE).splitlines() if line.strip())
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"{file}: must list the classes, one a line, none twice.")
    return names


def _check_scaling(folder: Path, kind: str, scaling: str | Sequence[str] | None) -> None:
    if scaling is None or (kind, scaling) == ("tables", "standard"):
        return
    words = f"of tables data.scaling is 'standard'; got {scaling!r}"
    raise ConfigError(
        f"{folder}: {words if kind == 'tables' else f'{kind} of your own have no data.scaling'}."
    )


def _read_tables(
    clients: Sequence[Entry],
    common: Path | None,
    label: str | None,
    missing: str,
    scaling: str | Sequence[str] | None,
) -> tuple[dict[Path, Pair], tuple[str, ...]]:
    """All tables by path, and the columns that they have in common."""
    paths = [*(path for parts in clients for path in parts.values()), *([common] if common else [])]
    tables = {path: read_table(path, label, missing) for path in paths}
    check_columns([*tables.values()])
    for change in (fill, standardize) if scaling else (fill,):
        parts = [{part: tables[path] for part, path in client.items()} for client in clients]
        tables = change(group(parts, tables[common] if common else None))
    return {path: (table.x, table.y) for path, table in tables.items()}, tables[paths[0]].columns


def _names(
    raw: Mapping[Path, Pair], owners: Mapping[Path, str], kind: str, task: Task
) -> dict[str, set[str]]:
    """Who has which class names, where labels are text."""
    text = [path for path, (_, y) in raw.items() if y.dtype.kind in "UO"]
    if not text:
        return {}
    if not _has_classes(task):
        y = raw[text[0]][1]
        row = next((row for row, value in enumerate(y.flat) if not _is_number(value)), 0)
        raise ConfigError(
            f"{text[0]}: row {row + 1}: the label {str(y.flat[row])!r:.40} is no number, which {task.name} needs."
        )
    for path in raw.keys() - text:
        raise ConfigError(f"labels are numbers in {path} and text in {text[0]}; use one kind for all.")
    if kind == "images":  # a class may have no images yet
        return {who: {inner.name for inner in listed(path) if inner.is_dir()} for path, who in owners.items()}
    return {owners[path]: {str(value) for value in y.flat} for path, (_, y) in raw.items()}


def _numbered(y: NDArray[Any], class_names: Sequence[str]) -> NDArray[Any]:
    number = {name: label for label, name in enumerate(class_names)}
    return np.array([number[str(value)] for value in y.flat]).reshape(y.shape)


def _has_classes(task: Task) -> bool:
    """Whether a sample has one class."""
    return task.classes_of(torch.zeros(1, dtype=torch.int64)) is not None


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _check_names(
    names: Mapping[str, set[str]], tests: set[str], listed: Sequence[str], classes: Sequence[str]
) -> None:
    """Refuse class names that do not fit each other, or the lists there are."""
    if classes:
        check_listed(names, classes)
    if listed:
        check_listed(names, listed, CLASSES)
    check_spellings(names)
    if classes or listed:
        return
    trained = {*chain(*(found for owner, found in names.items() if owner not in tests))}
    for owner, found in names.items():
        if found - trained:
            raise ConfigError(
                f"{owner} has the class {min(found - trained)!r}, which no client has for training; the clients "
                f"have {', '.join(sorted(trained, key=natural))}. If it is meant, list all classes: data.classes."
            )


def read_pair(path: Path) -> Pair:
    """The samples in one npz file; bytes are taken for images, and stay bytes."""
    arrays = read_npz(path, "x", "y")
    x, y = arrays["x"], arrays["y"]
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if x.dtype == np.uint8:
        if x.ndim == 3:
            x = x[:, None]
        elif x.ndim == 4 and x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        if x.ndim != 4:
            raise ConfigError(
                f"{path}: x holds bytes, so it must be images, (n, h, w) or (n, h, w, 3); got {x.shape}."
            )
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ConfigError(f"{path}: x must hold numbers; got {x.dtype}.")
    return x, y


def _read_images(paths: Iterable[Path], image_size: int | None) -> dict[Path, Pair]:
    """Each client's images; the class of an image is the name of its sub-folder."""
    raw: dict[Path, tuple[list[NDArray[np.uint8]], list[str]]] = {}
    size: tuple[int, int] | None = None
    for path in paths:
        images, labels = [], []
        for inner in (inner for inner in listed(path) if inner.is_dir()):
            for file in listed(inner):
                if file.suffix.lower() not in IMAGES:
                    raise ConfigError(
                        f"{file}: not an image ({', '.join(sorted(IMAGES))}); move it elsewhere."
                    )
                # once they are brought to one size, they may have any
                image = read_image(file, image_size, None if image_size else size)
                size = size or (image.shape[0], image.shape[1])
                images.append(image)
                labels.append(inner.name)
        if not images:
            raise ConfigError(
                f"{path}: has no images; they go in a sub-folder for each class, e.g. {path.name}/cat/1.png."
            )
        raw[path] = images, labels
    channels = max(image.shape[2] for images, _ in raw.values() for image in images)
    # one client after the other, so that no image is in memory twice for long
    return {path: _stacked(*raw.pop(path), channels) for path in list(raw)}


def _stacked(images: Sequence[NDArray[np.uint8]], labels: Sequence[str], channels: int) -> Pair:
    x = np.stack([np.broadcast_to(image, (*image.shape[:2], channels)) for image in images])
    return np.ascontiguousarray(x.transpose(0, 3, 1, 2)), np.array(labels)
