"""``folder:PATH``, a folder with an entry per client, and one called ``test`` if clients have no test set of their own.

An entry is an npz file, a table (``.csv``, ``.parquet``) or a folder. All entries are of one kind:

- ``clinic-a.npz`` holds ``x`` (samples, ...) floating point, or bytes: images (samples, height, width),
  (samples, height, width, 3) or (samples, channels, height, width), scaled to [-1, 1]; and ``y`` (samples,);
- ``clinic-a.csv`` has a column for the label, and inputs in the others;
- ``clinic-a/cat/1.png`` is an image of the class cat;
- ``clinic-a/`` may also hold one npz file or table, or a ``train``, ``val`` and ``test`` of any kind.

>>> import tempfile
>>> from fedpews.data import load
>>> with tempfile.TemporaryDirectory() as folder:
...     for name, label in (("clinic-a", 0), ("clinic-b", 1), ("test", 1)):
...         np.savez(f"{folder}/{name}.npz", x=np.random.rand(6, 5), y=np.full(6, label))
...     data = load(f"folder:{folder}")
>>> data.client_names, data.counts().tolist()
(('clinic-a', 'clinic-b'), [[6, 0], [0, 6]])
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedpews.data.client_tables import is_text, number_labels, read_tables
from fedpews.data.federation import Federation, from_clients
from fedpews.data.files import listed, natural, read_image, read_npz, stack_images
from fedpews.data.inputs import SPLITS
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, DataMissing
from fedpews.outside import MEGABYTE, read_text
from fedpews.tasks.names import check_listed, check_spellings
from fedpews.tasks.task import Task

TABLES = {".csv", ".parquet"}
NOTES = {".txt", ".md", ".rst", ".csv", ".json", ".toml", ".yaml", ".yml"}  # may be beside the entries
CLASSES = "classes.txt"
"""One class a line, in the order of their labels."""

Arrays = tuple[NDArray[Any], NDArray[Any]]
"""Inputs and labels of a file or folder."""


def read_folder(table: DataTable, task: Task) -> Federation:
    """The clients of a folder; their class names may be fewer than the table's, and in another order."""
    folder = Path(table.name.removeprefix("folder:")).expanduser()
    if not folder.is_dir():
        raise DataMissing(f"data {table.name!r}: {str(folder)!r} is not a folder.")
    clients = {name: _splits(path) for name, path in _entries(folder).items()}
    test = clients.pop("test", {}).get("train")
    if not clients or (test is None and not all("test" in splits for splits in clients.values())):
        lacking = "an entry called test" if clients else "an entry per client beside the test"
        raise ConfigError(f"{folder}: needs {lacking}: an .npz file with x and y, or a folder.")
    owners = {
        path: name if split == "train" else f"{name}'s {split}"
        for name, splits in clients.items()
        for split, path in splits.items()
    } | ({test: "test"} if test else {})
    kinds = {
        "images" if path.is_dir() else "npz files" if path.suffix == ".npz" else "tables" for path in owners
    }
    if len(kinds) > 1:
        raise ConfigError(f"{folder}: has {' and '.join(sorted(kinds))} for different clients; use one kind.")
    kind = kinds.pop()
    if table.scaling is not None and (kind, table.scaling) != ("tables", "standard"):
        allowed = f"of tables data.scaling is 'standard'; got {table.scaling!r}"
        raise ConfigError(
            f"{folder}: {allowed if kind == 'tables' else f'{kind} of your own have no data.scaling'}."
        )
    columns: tuple[str, ...] = ()
    missing: tuple[tuple[int, ...], ...] = ()
    if kind == "images":
        arrays = _read_images(owners, table.image_size)
    elif kind == "npz files":
        arrays = {path: read_client_npz(path) for path in owners}
    else:
        tables = read_tables([*clients.values()], test, table)
        arrays = {path: (each.x, each.y) for path, each in tables.items()}
        train = [tables[splits["train"]] for splits in clients.values()]
        columns, missing = train[0].columns, tuple(each.missing for each in train)
    class_names: tuple[str, ...] = ()
    if task.classes_of(torch.zeros(1, dtype=torch.int64)) is None:  # a sample does not have one class
        _check_numbers(arrays, task)
    else:
        class_names = _class_names(folder, arrays, owners, table)
        arrays = {path: (x, number_labels(y, class_names)) for path, (x, y) in arrays.items()}
    splits = [{split: arrays[path] for split, path in paths.items()} for paths in clients.values()]
    tests = None if test is None else arrays[test]
    names = (table.name, class_names, tuple(clients))
    try:
        data = from_clients(splits, tests, len(class_names) or None, *names, task=task)
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return replace(data, columns=columns, missing=missing)


def _entries(folder: Path) -> dict[str, Path]:
    """The entries by name. Tables beside npz files or folders are notes, not clients."""
    inside = listed(folder)
    paths = [path for path in inside if path.is_dir() or path.suffix == ".npz"]
    paths = paths or [path for path in inside if path.is_file() and path.suffix in TABLES]
    entries: dict[str, Path] = {}
    for path in paths:
        if entries.setdefault(_name(path), path) != path:
            raise ConfigError(f"{folder}: {_name(path)!r} exists as a file and as a folder.")
    for path in inside:
        known = path in paths or path.suffix.lower() in NOTES or not path.suffix
        if path.is_file() and not known:
            raise ConfigError(f"{path}: an entry must be an .npz file, a table (.csv, .parquet) or a folder.")
    return entries


def _name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _splits(path: Path) -> dict[str, Path]:
    """The train, val and test of a client's folder; without these, all of it is for training."""
    paths = {"train": path}
    if path.is_dir():
        inside = {_name(inner): inner for inner in listed(path)}
        splits = {split: inside[split] for split in SPLITS if split in inside}
        if "train" in splits and len(splits) > 1:
            paths = splits
    return {split: _file(inner) for split, inner in paths.items()}


def _file(path: Path) -> Path:
    """The npz file or table of an entry; the entry itself when it is a folder of images."""
    if path.is_file():
        return path
    files = [inner for inner in listed(path) if inner.suffix in {".npz", *TABLES}]
    if len(files) > 1:
        raise ConfigError(f"{path}: has {len(files)} npz files or tables; put a client's samples in one.")
    return files[0] if files else path


def _check_numbers(arrays: Mapping[Path, Arrays], task: Task) -> None:
    """Refuse labels that are text, with the first that is no number."""
    for path, (_, y) in arrays.items():
        for row, value in enumerate(y.flat if is_text(y) else ()):
            try:
                float(value)
            except (TypeError, ValueError):
                raise ConfigError(
                    f"{path}: row {row + 1}: the label {str(value)!r:.40} is no number, which {task.name} needs."
                ) from None


def _class_names(
    folder: Path, arrays: Mapping[Path, Arrays], owners: Mapping[Path, str], table: DataTable
) -> tuple[str, ...]:
    """The names of all classes: those in classes.txt, else those of all labels; () if labels are numbers.

    Names that contradict each other, classes.txt or data.classes are refused.
    """
    file = folder / CLASSES
    known: tuple[str, ...] = ()
    if file.is_file():
        known = tuple(line.strip() for line in read_text(file, MEGABYTE).splitlines() if line.strip())
        if not known or len(set(known)) < len(known):
            raise ConfigError(f"{file}: must list the classes, one per line, each only once.")
    text = [path for path, (_, y) in arrays.items() if is_text(y)]
    if not text:
        return known
    for path in arrays.keys() - text:
        raise ConfigError(f"labels are numbers in {path} and text in {text[0]}; use one kind for all.")
    names = {
        # a folder names a class that may have no images yet
        owner: {inner.name for inner in listed(path) if inner.is_dir()}
        if path.is_dir()
        else {str(value) for value in arrays[path][1].flat}
        for path, owner in owners.items()
    }
    if table.classes:
        check_listed(names, table.classes)
    if known:
        check_listed(names, known, CLASSES)
    check_spellings(names)
    tests = {owner for owner in names if owner == "test" or owner.endswith("'s test")}
    trained = {*chain(*(names[owner] for owner in names.keys() - tests))}
    for owner in () if table.classes or known else sorted(tests):
        if names[owner] - trained:
            raise ConfigError(
                f"{owner} has the class {min(names[owner] - trained)!r}, which no client has for training; the clients "
                f"have {', '.join(sorted(trained, key=natural))}. If it is intended, list all classes: data.classes."
            )
    return known or tuple(sorted({*chain(*names.values())}, key=natural))


def read_client_npz(path: Path) -> Arrays:
    """The samples of one npz file; bytes are images, and stay bytes."""
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
            raise ConfigError(f"{path}: x holds bytes, so it must be images, (n, h, w) or (n, h, w, 3).")
    if not (np.issubdtype(x.dtype, np.number) or x.dtype == bool):
        raise ConfigError(f"{path}: x must hold numbers; got {x.dtype}.")
    return x, y


def _read_images(paths: Iterable[Path], image_size: int | None) -> dict[Path, Arrays]:
    """Each client's images; the class of an image is the name of its sub-folder."""
    raw: dict[Path, tuple[list[NDArray[np.uint8]], list[str]]] = {}
    size: tuple[int, int] | None = None
    for path in paths:
        images, labels = raw.setdefault(path, ([], []))
        for inner in (inner for inner in listed(path) if inner.is_dir()):
            for file in listed(inner):
                # any size will do where all are resized
                image = read_image(file, image_size, None if image_size else size)
                size = size or (image.shape[0], image.shape[1])
                images.append(image)
                labels.append(inner.name)
        if not images:
            raise ConfigError(
                f"{path}: has no images; put them in folders of classes: {path.name}/cat/1.png."
            )
    channels = max(image.shape[2] for images, _ in raw.values() for image in images)
    arrays: dict[Path, Arrays] = {}
    for path in list(raw):  # one client after the other, so that no image is in memory twice for long
        images, labels = raw.pop(path)
        arrays[path] = stack_images(images, channels), np.array(labels)
    return arrays
