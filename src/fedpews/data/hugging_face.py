"""``hf:PATH``, a Hugging Face dataset on disk or in the hub's cache; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.client_tables import label_column, number_labels
from fedpews.data.federation import Federation, from_clients
from fedpews.data.files import stack_images, to_pixels
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, DataMissing, first_line, nearest, need_extra
from fedpews.outside import offline
from fedpews.tasks.task import Task

SPLITS = {"train": "train", "validation": "val", "val": "val", "test": "test"}
"""The splits that are read, by their names in a dataset."""


def read_hugging_face(table: DataTable, task: Task) -> Federation:
    """The clients of a dataset: those that ``data.client`` names, or one that ``data.partition`` splits."""
    datasets = need_extra("hf", "datasets", f"data {table.name!r}")
    splits = _open(datasets, table.name)
    columns = splits["train"].column_names
    label = label_column(table.name, columns, table.label)
    if table.client is not None and table.client not in columns:
        raise ConfigError(
            f"data.client: {table.name} has no column {table.client!r}; {nearest(table.client, columns)}"
        )
    others = [name for name in columns if name not in (label, table.client)]
    inputs = others if table.inputs is None else table.inputs
    if not inputs or not set(inputs) <= set(others) or (table.inputs is None and len(inputs) > 1):
        raise ConfigError(
            f"{table.name} has the columns {', '.join(others)} beside the label; say which hold the inputs: "
            "data.inputs = [...]"
        )
    names = _class_names(datasets, splits, label)
    arrays = {
        split: (
            _read_inputs(datasets, rows, inputs, table),
            number_labels(rows.with_format("numpy")[:][label], names),
        )
        for split, rows in splits.items()
    }
    groups = {split: _by_client(rows, table.client) for split, rows in splits.items() if split != "test"}
    clients = [
        {
            split: tuple(array[rows[name]] for array in arrays[split])
            for split, rows in groups.items()
            if name in rows
        }
        for name in groups["train"]
    ]
    client_names = [] if table.client is None else [*groups["train"]]
    return from_clients(
        clients, arrays["test"], len(names) or None, table.name, names, client_names, task=task
    )


def _open(datasets: Any, name: str) -> dict[str, Any]:
    """The splits of a dataset, called train, val and test."""
    path = name.removeprefix("hf:")
    folder = Path(path).expanduser()
    try:
        with offline():
            opened = datasets.load_from_disk(folder) if folder.is_dir() else datasets.load_dataset(path)
    except Exception as error:
        hint = "" if folder.is_dir() else f"; fetch it once with datasets.load_dataset({path!r})"
        raise DataMissing(f"data {name!r} is not on this machine: {first_line(error)}{hint}") from error
    splits = opened if isinstance(opened, dict) else {"train": opened}
    known = {SPLITS[split]: rows for split, rows in splits.items() if split in SPLITS}
    for split in ("train", "test"):
        if not len(known.get(split, ())):
            raise ConfigError(
                f"data {name!r} has no rows in a split called {split}; it has {', '.join(splits)}. Make one with "
                "Dataset.train_test_split."
            )
    return known


def _read_inputs(datasets: Any, rows: Any, columns: Sequence[str], table: DataTable) -> NDArray[Any]:
    """(samples, …): an image, a list of numbers, or one number of each of several columns."""
    arrays = [_column(datasets, rows, name, table) for name in columns]
    if len(arrays) == 1 and arrays[0].ndim > 1:
        return arrays[0]
    if any(values.ndim != 1 for values in arrays):
        raise ConfigError(f"{table.name}: data.inputs names several columns, which must hold single numbers")
    return np.stack(arrays, 1).astype(np.float32)


def _column(datasets: Any, rows: Any, name: str, table: DataTable) -> NDArray[Any]:
    if isinstance(rows.features[name], datasets.Image):
        return _images(rows, name, table)
    values: NDArray[Any] = rows.with_format("numpy")[:][name]
    if values.dtype.kind == "O":
        raise ConfigError(f"{table.name}: the rows of column {name!r} have unequal lengths; pad them first")
    if values.dtype.kind not in "iufb":
        raise ConfigError(
            f"{table.name}: column {name!r} holds text; tokenise it first (Dataset.map), and name the column of "
            "token numbers in data.inputs"
        )
    # lists of whole numbers are tokens
    return values.astype(np.int64 if values.dtype.kind in "iu" and values.ndim > 1 else np.float32)


def _images(rows: Any, name: str, table: DataTable) -> NDArray[np.uint8]:
    """(samples, channels, height, width) bytes, which become [-1, 1] in a batch."""
    images = [to_pixels(image, table.image_size) for image in rows[name]]
    if len({image.shape[:2] for image in images}) > 1:
        raise ConfigError(f"{table.name}: images of column {name!r} differ in size; set data.image_size")
    return stack_images(images)


def _class_names(datasets: Any, splits: dict[str, Any], label: str) -> list[str]:
    """The classes by name, in the order of their labels; empty if labels are numbers."""
    feature = splits["train"].features[label]
    if isinstance(feature, datasets.ClassLabel):
        return list(feature.names)
    if getattr(feature, "dtype", "") == "string":
        return sorted({name for rows in splits.values() for name in rows.unique(label)})
    return []


def _by_client(rows: Any, column: str | None) -> dict[str, NDArray[np.int64]]:
    """The rows of each client, by its name."""
    if column is None:
        return {"": np.arange(len(rows))}
    values = np.array([str(value) for value in rows[column]])
    return {str(name): np.flatnonzero(values == name) for name in np.unique(values)}
