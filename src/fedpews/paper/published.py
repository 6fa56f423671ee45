"""Every run of a study in compact form: one small file per cell, from which its page can be computed again.

A file holds what the cell changes from the defaults and, for every seed, the columns of its records: numbers to five
digits, repeated values as value and count. It is JSON, compressed with gzip.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, NotRequired
from zlib import error as ZlibError

from pydantic import Field
from typing_extensions import TypedDict

from fedpews.errors import ConfigError
from fedpews.outside import MEGABYTE, parse_json, read_bytes, shaped
from fedpews.paper.study import Cell
from fedpews.results.files import write_atomically
from fedpews.results.records import Record
from fedpews.results.schema import Machines

DIGITS = 5
MOST_BYTES = 256 * MEGABYTE
"""Of a cell's runs when unpacked; 10 seeds of 500 rounds have one million."""
MOST_ROUNDS = 10**6
MOST_CHARACTERS = 1000
"""Characters of the message of a cell that diverged."""
CLIENTS = 10
"""Lists with a number per client are kept up to this many clients."""


class CellShape(TypedDict):
    """What a file holds."""

    row: str
    column: str
    draws: Any
    experiment: dict[str, Any]
    runs: dict[Annotated[str, Field(pattern=r"^\d{1,20}$")], dict[str, list[Any]]]
    diverged: NotRequired[Annotated[str, Field(max_length=MOST_CHARACTERS)]]
    machines: NotRequired[Machines]


@dataclass(frozen=True)
class Published:
    """What the file of a cell holds."""

    runs: dict[int, list[Record]] = field(default_factory=dict)
    diverged: str = ""
    """Why some seeds have no run; empty where none diverged."""
    machines: Sequence[str] = ()


def publish(cell: Cell, finished: Published, folder: Path) -> None:
    """Write a cell's finished seeds beside those that its file already has, and why others diverged."""
    every = {**read_published(folder, cell).runs, **finished.runs}
    content = {
        "row": cell.row,
        "column": cell.column,
        "draws": cell.draws,
        "experiment": cell.changes(),
        "runs": {str(seed): _pack(records) for seed, records in sorted(every.items())},
        **({"diverged": finished.diverged[:MOST_CHARACTERS]} if finished.diverged else {}),
        **({"machines": list(finished.machines)} if finished.machines else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    # no time of day in the file: the same runs give the same bytes
    write_atomically(_path(folder, cell), gzip.compress(text.encode(), mtime=0))


def read_published(folder: Path | None, cell: Cell) -> Published:
    """What was published of a cell; nothing if there is no file of this experiment."""
    if folder is None or not (path := _path(folder, cell)).exists():
        return Published()
    content = _read(path)
    if content["experiment"] != cell.changes() or content["draws"] != cell.draws:
        return Published()
    try:
        runs = {int(seed): _unpack(columns) for seed, columns in content["runs"].items()}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    return Published(runs, content.get("diverged", ""), content.get("machines", []))


def _read(path: Path) -> CellShape:
    """The content of a file, unpacked up to the size that a cell's runs can have."""
    try:
        with gzip.open(BytesIO(read_bytes(path, MOST_BYTES))) as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes when unpacked")
        content: CellShape = shaped(CellShape, parse_json(text.decode(), str(path)), str(path))
    except (OSError, EOFError, ValueError, ZlibError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    return content


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.name}.json.gz"


def _pack(records: Sequence[Record]) -> dict[str, Any]:
    """Records as columns, without long lists. Rounds without an evaluation lack some of the keys."""
    columns: dict[str, Any] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        rows = [row for row, record in enumerate(records) if key in record]
        if not all(_is_kept(records[row][key]) for row in rows):
            continue
        column = _column([records[row][key] for row in rows])
        columns[key] = column if len(rows) == len(records) else ["at", rows, column]
    return columns


def _is_kept(value: Any) -> bool:
    return not isinstance(value, list) or (
        len(value) <= CLIENTS and not any(isinstance(v, list) for v in value)
    )


def _column(values: list[Any]) -> list[Any]:
    """[value, count] for each run of equal values where that is shorter, else the values."""
    short = [_short(value) for value in values]
    runs = [[value, len(list(same))] for value, same in groupby(short)]
    return ["runs", *runs] if 2 * len(runs) < len(short) else short


def _short(value: Any) -> Any:
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _unpack(columns: Mapping[str, list[Any]]) -> list[Record]:
    whole = {key: _values(column) for key, column in columns.items() if column[:1] != ["at"]}
    records: list[Record] = [dict(zip(whole, row, strict=True)) for row in zip(*whole.values(), strict=True)]
    for key, column in columns.items():
        if column[:1] == ["at"]:
            _, rows, values = column
            for row, value in zip(rows, _values(values), strict=True):
                if not 0 <= row < len(records):
                    raise ValueError(f"{key} has no round {row}")
                records[row][key] = value
    return records


def _values(column: list[Any]) -> list[Any]:
    if column[:1] != ["runs"]:
        return column
    if sum(count for _, count in column[1:]) > MOST_ROUNDS:
        raise ValueError(f"more than {MOST_ROUNDS:,} rounds")
    return [value for value, count in column[1:] for _ in range(count)]
