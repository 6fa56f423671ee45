"""The tables of clients (CSV, Parquet): columns are matched by name, missing values refused or filled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.files import natural
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, need_extra
from fedpews.outside import check_plain

LABELS = ("label", "target", "y", "class")
"""A column of one of these names is the label when none is named."""


@dataclass(frozen=True)
class ClientTable:
    """Inputs and labels; the columns are in the order of their names, so that all clients have the same order."""

    path: Path
    x: NDArray[np.float32]  # (rows, columns); NaN is a missing value
    y: NDArray[Any]  # text labels stay text
    columns: tuple[str, ...]
    """Each column and its type, the label's at the end: ``age (number)``."""
    missing: tuple[int, ...]
    """How many values of each column were missing."""


def read_tables(
    clients: Sequence[Mapping[str, Path]], test: Path | None, options: DataTable
) -> dict[Path, ClientTable]:
    """All tables by path, with missing values filled and numbers scaled.

    The means and deviations are those of a client's training rows, and of all clients' for a common test set.
    """
    paths = [*(path for splits in clients for path in splits.values()), *([test] if test else [])]
    tables = {path: read_table(path, options.label, options.missing) for path in paths}
    first = tables[paths[0]]
    for table in tables.values():
        difference = compare_columns(table.columns, first.columns)
        if difference:
            raise ConfigError(f"{table.path}: {difference}; {first.path} has {', '.join(first.columns)}.")
    groups = [([splits["train"]], list(splits.values())) for splits in clients]
    if test is not None:
        groups.append(([splits["train"] for splits in clients], [test]))
    for change in (_fill, _standardize) if options.scaling else (_fill,):
        # all statistics are of the tables before the change
        tables = {
            path: change([tables[source] for source in sources], tables[path])
            for sources, targets in groups
            for path in targets
        }
    return tables


def read_table(path: Path, label: str | None = None, missing: str = "refuse") -> ClientTable:
    """A table; every column but the label is an input and must hold numbers, or true and false.

    Args:
        label: the column of the label; by default the column called label, target, y or class.
        missing: ``refuse`` missing inputs; with ``mean`` they are NaN.
    """
    pd = need_extra("pandas", "pandas", f"{path}, a table,")
    table = _read(pd, path)
    label = label_column(str(path), list(table.columns), label)
    names = sorted(table.columns.drop(label), key=lambda name: (natural(name), name))
    if not names:
        raise ConfigError(f"{path}: has no column except the label.")
    kinds = [_kind(pd, path, table[name]) for name in names]
    for name in (label, *names):
        gaps = table[name].isna().to_numpy()
        if gaps.any() and (missing == "refuse" or name == label):
            fill = "every row needs a label" if name == label else 'fill them, or set data.missing = "mean"'
            raise ConfigError(
                f"{path}: column {name!r} lacks a value in {gaps.sum()} of {len(gaps)} rows, first in row "
                f"{gaps.argmax() + 1}; {fill}."
            )
    x, y = table[names].to_numpy(dtype=np.float32, na_value=np.nan), table[label]
    labels = y.to_numpy() if pd.api.types.is_numeric_dtype(y) else y.astype(str).to_numpy(dtype=str)
    columns = (*(f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True)), f"{label} (label)")
    return ClientTable(path, x, labels, columns, tuple(np.isnan(x).sum(0).tolist()))


def label_column(where: str, columns: Sequence[str], label: str | None) -> str:
    """The column of the label: the column that is named, else the only column with a usual name."""
    likely = [name for name in columns if name.lower() in LABELS] if label is None else [label]
    if len(likely) != 1 or likely[0] not in columns:
        raise ConfigError(
            f"{where}: has the columns {', '.join(columns)}; say which holds the label: data.label = ..."
        )
    return likely[0]


def is_text(y: NDArray[Any]) -> bool:
    """Whether labels are text."""
    return y.dtype.kind in "UO"


def number_labels(y: NDArray[Any], classes: Sequence[str]) -> NDArray[Any]:
    """Labels that are text as their numbers in the list of classes; numbers as they are."""
    if not is_text(y):
        return y
    numbers = {name: number for number, name in enumerate(classes)}
    return np.array([numbers[str(value)] for value in y.flat]).reshape(y.shape)


def compare_columns(columns: Sequence[str], reference: Sequence[str]) -> str:
    """How a table's columns differ from the reference; "" if they do not.

    >>> compare_columns(["age (number)", "hb (number)"], ["age (number)", "bmi (number)"])
    'lacks bmi (number) and has hb (number) in addition'
    """
    lacking = ", ".join(name for name in reference if name not in columns)
    more = ", ".join(name for name in columns if name not in reference)
    return " and ".join([f"lacks {lacking}"] * bool(lacking) + [f"has {more} in addition"] * bool(more))


def _fill(sources: Sequence[ClientTable], table: ClientTable) -> ClientTable:
    """The table with every missing value replaced by its column's mean over the sources."""
    missing = np.isnan(table.x)
    if not missing.any():
        return table
    x = np.concatenate([source.x for source in sources]).astype(np.float64)
    count = (~np.isnan(x)).sum(0)
    if not count.all():
        name = table.columns[int(count.argmin())].rpartition(" (")[0]
        raise ConfigError(f"{sources[0].path}: column {name!r} has no values, so it has no mean.")
    mean = np.nansum(x, axis=0) / count
    return replace(table, x=np.where(missing, mean, table.x).astype(np.float32))


def _standardize(sources: Sequence[ClientTable], table: ClientTable) -> ClientTable:
    """The table with numbers of mean 0 and deviation 1 over the sources; true and false stay 1 and 0."""
    x = np.concatenate([source.x for source in sources]).astype(np.float64)
    number = np.array([column.endswith("(number)") for column in table.columns[:-1]])
    deviation = x.std(0)
    spread = np.where(number & (deviation > 0), deviation, 1)
    mean = np.where(number, x.mean(0), 0)
    return replace(table, x=((table.x - mean) / spread).astype(np.float32))


def _read(pd: Any, path: Path) -> Any:
    """A data frame whose columns have different names."""
    check_plain(path)
    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
            names = list(table.columns)
        else:
            table = pd.read_csv(path)
            # as they are written: pandas numbers names that occur twice
            names = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].tolist()
    except Exception as error:  # a parser may raise anything on damaged bytes
        raise ConfigError(f"{path}: cannot be read as a table ({error!s:.200}).") from error
    if not len(table):
        raise ConfigError(f"{path}: has no rows.")
    if len(names) != table.shape[1] or not isinstance(table.index, pd.RangeIndex):
        raise ConfigError(f"{path}: a row has more cells than the first line has names.")
    for index, name in enumerate(names):
        if pd.isna(name):
            raise ConfigError(f"{path}: column {index + 1} has no name; if it counts the rows, leave it out.")
        if name in names[:index]:
            raise ConfigError(f"{path}: has two columns {name!r}.")
    table.columns = [str(name) for name in names]
    return table


def _kind(pd: Any, path: Path, column: Any) -> str:
    """The type of a column of inputs, or a ConfigError with the first value that is no number."""
    if pd.api.types.infer_dtype(column, skipna=True) == "boolean":
        return "true/false"
    if pd.api.types.is_numeric_dtype(column):
        return "number"
    values = column[column.notna()].astype(str)
    wrong = values[pd.to_numeric(values, errors="coerce").isna()]
    first = (wrong if len(wrong) else values).iloc[:1]
    raise ConfigError(
        f"{path}: column {column.name!r}, row {int(first.index[0]) + 1}: {first.iloc[0]!r:.40} is no number; turn "
        "the column into numbers (pandas.get_dummies), or leave it out."
    )
