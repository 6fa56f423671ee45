"""The tables of clients (CSV, Parquet): columns matched by name, missing values refused or filled."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedpews.data.client_files import natural
from fedpews.errors import ConfigError, nearest, need_extra
from fedpews.outside import check_plain

LABELS = ("label", "target", "y", "class")
"""A column of one of these names is the label when none is named."""


@dataclass(frozen=True)
class Table:
    """Inputs and labels; the columns are in the order of their names, so that all clients have the same order."""

    path: Path
    x: NDArray[np.float32]  # (rows, columns); NaN is a missing value
    y: NDArray[Any]  # text labels stay text
    columns: tuple[str, ...]
    """Each column and its type, the label's at the end: ``age (number)``."""


Groups = Sequence[tuple[Sequence[Table], Sequence[Table]]]
"""Tables whose training rows tell means and deviations, and the tables these are for."""


def read_table(path: Path, label: str | None = None, missing: str = "refuse") -> Table:
    """A table; every column but the label is an input and must hold numbers, or true and false.

    Args:
        label: the column that holds the label; by default the one called label, target, y or class.
        missing: ``mean`` leaves missing inputs to ``fill``.
    """
    table, pd = _read(path)
    label = _label(path, list(table.columns), label)
    y = table.pop(label)
    names = sorted(table.columns, key=lambda name: (natural(name), name))
    if not names:
        raise ConfigError(f"{path}: has no column beside the label.")
    kinds = {name: _kind(path, table[name]) for name in names}
    for name, column in [(label, y), *((name, table[name]) for name in names)]:
        gaps = column.isna().to_numpy()
        if gaps.any() and (missing == "refuse" or name == label):
            fill = "every row needs a label" if name == label else 'fill them, or set data.missing = "mean"'
            raise ConfigError(
                f"{path}: column {name!r} lacks a value in {gaps.sum()} of {len(gaps)} rows, first in row "
                f"{gaps.argmax() + 1}; {fill}."
            )
    labels = y.to_numpy() if pd.api.types.is_numeric_dtype(y) else y.astype(str).to_numpy(dtype=str)
    columns = (*(f"{name} ({kind})" for name, kind in kinds.items()), f"{label} (label)")
    return Table(path, table[names].to_numpy(dtype=np.float32, na_value=np.nan), labels, columns)


def compare_columns(own: Collection[str], reference: Sequence[str]) -> str:
    """How a table's columns differ from the reference; "" if they do not.

    >>> compare_columns(["age (number)", "hb (number)"], ["age (number)", "bmi (number)"])
    'lacks bmi (number) and has hb (number) in addition'
    """
    mine, theirs = set(own), set(reference)
    lacking = ", ".join(name for name in reference if name not in mine)
    more = ", ".join(name for name in own if name not in theirs)
    words = [f"lacks {lacking}" if lacking else "", f"has {more} in addition" if more else ""]
    return " and ".join(filter(None, words))


def check_columns(tables: Sequence[Table]) -> None:
    """Refuse a table whose columns are not those of the first."""
    first = tables[0]
    for table in tables:
        difference = compare_columns(table.columns, first.columns)
        if difference:
            raise ConfigError(f"{table.path}: {difference}; {first.path} has {', '.join(first.columns)}.")


def fill(groups: Groups) -> dict[Path, Table]:
    """Every missing value replaced by its column's mean over the sources."""
    return {table.path: table for sources, targets in groups for table in _filled(sources, targets)}


def standardize(groups: Groups) -> dict[Path, Table]:
    """Numbers brought to mean 0 and deviation 1 over the sources; true and false stay 1 and 0."""
    scaled: dict[Path, Table] = {}
    for sources, targets in groups:
        x = np.concatenate([table.x for table in sources]).astype(np.float64)
        number = np.array([column.endswith("(number)") for column in sources[0].columns[:-1]])
        deviation = x.std(0)
        spread = np.where(number & (deviation > 0), deviation, 1)
        mean = np.where(number, x.mean(0), 0)
        scaled |= {t.path: replace(t, x=((t.x - mean) / spread).astype(np.float32)) for t in targets}
    return scaled


def group(clients: Sequence[Mapping[str, Table]], common: Table | None) -> Groups:
    """Which training rows tell the means of which tables: a client's own those of all its parts; those of all clients
    that of a common test set."""
    groups = [([parts["train"]], list(parts.values())) for parts in clients]
    if common is not None:
        groups.append(([parts["train"] for parts in clients], [common]))
    return groups


def _filled(sources: Sequence[Table], targets: Sequence[Table]) -> list[Table]:
    if not any(np.isnan(table.x).any() for table in targets):
        return list(targets)
    x = np.concatenate([table.x for table in sources]).astype(np.float64)
    count = (~np.isnan(x)).sum(0)
    if not count.all():
        name = sources[0].columns[int(count.argmin())].rpartition(" (")[0]
        raise ConfigError(f"{sources[0].path}: column {name!r} has no value at all, and so no mean.")
    mean = np.nansum(x, axis=0) / count
    return [replace(t, x=np.where(np.isnan(t.x), mean, t.x).astype(np.float32)) for t in targets]


def _read(path: Path) -> tuple[Any, Any]:
    """A data frame whose columns have different names, and pandas."""
    pd = need_extra("pandas", "pandas", f"{path}, a table,")
    check_plain(path)
    try:
        if path.suffix == ".parquet":
            table = pd.read_parquet(path)
            names = list(table.columns)
        else:
            table = pd.read_csv(path)
            # as they are written: pandas numbers names that are there twice
            names = pd.read_csv(path, header=None, nrows=1, dtype=str).iloc[0].tolist()
    except Exception as error:  # whatever a parser makes of foreign bytes
        raise ConfigError(f"{path}: cannot be read as a table ({error!s:.200}).") from error
    if not len(table):
        raise ConfigError(f"{path}: has no rows.")
    if len(names) != table.shape[1] or not isinstance(table.index, pd.RangeIndex):
        raise ConfigError(f"{path}: a row has more cells than the first line has names.")
    for place, name in enumerate(names):
        if pd.isna(name):
            raise ConfigError(
                f"{path}: column {place + 1} has no name; if it counts the rows, write the table without it."
            )
        if name in names[:place]:
            raise ConfigError(f"{path}: has two columns {name!r}.")
    table.columns = [str(name) for name in names]
    return table, pd


def _label(path: Path, columns: Sequence[str], label: str | None) -> str:
    if label is not None and label not in columns:
        raise ConfigError(
            f"{path}: has no column {label!r}; {nearest(label, columns)}. Say which holds the label: data.label = ..."
        )
    likely = [column for column in columns if column.lower() in LABELS] if label is None else [label]
    if not likely:
        raise ConfigError(f"{path}: has no column called label. Say which holds the label: data.label = ...")
    if len(likely) > 1:
        raise ConfigError(f"{path}: {', '.join(likely)} may each be the label; say which: data.label = ...")
    return likely[0]


def _kind(path: Path, column: Any) -> str:
    """What a column of inputs holds, or a ConfigError with the first value that is no number."""
    import pandas as pd

    if pd.api.types.infer_dtype(column, skipna=True) == "boolean":
        return "true/false"
    if pd.api.types.is_numeric_dtype(column):
        return "number"
    there = column[column.notna()].astype(str)
    wrong = there[pd.to_numeric(there, errors="coerce").isna()]
    value = (wrong if len(wrong) else there).iloc[:1]
    raise ConfigError(
        f"{path}: column {column.name!r}, row {int(value.index[0]) + 1}: {value.iloc[0]!r:.40} is no number; turn the "
        "column into numbers (pandas.get_dummies), or leave it out."
    )
