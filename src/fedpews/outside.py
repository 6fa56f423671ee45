"""Input from outside: files and their text, read within limits and checked against a schema.

Every function returns a value of the expected shape, or raises an error of one line that names the file and, if it
can, the line in it. Nothing is executed or unpacked.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedpews.errors import ConfigError, explain

MEGABYTE = 2**20

MOST_TOML = MEGABYTE
"""Bytes of a configuration; the largest that is shipped has 4,000."""

DEEPEST = 32
"""Tables and lists inside each other; ours go three deep."""

# the time and memory that tomllib takes grow with the square of a key's parts: 30,000 take a minute
_LONG_KEY = re.compile(
    r"""(?<![\w-])(?:(?:[\w-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')[ \t]*\.[ \t]*){%d}""" % (DEEPEST + 1)  # noqa: UP031
)


def check_plain(path: Path) -> Path:
    """The path, if it is a plain file or a link to one: opening a pipe or a device may never return."""
    try:
        mode = path.stat().st_mode
    # RuntimeError: links that lead to each other
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is not a plain file")
    return path


def read_bytes(path: Path, most: int, *, follow: bool = True) -> bytes:
    """All bytes of a plain file: no device, no pipe, nothing that blocks or never ends.

    Args:
        most: a file with more bytes is refused.
        follow: whether the path may be a link.

    >>> read_bytes(Path("/dev/zero"), 10)
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: /dev/zero is not a plain file
    """
    # without waiting: opening a pipe that nothing writes to would never return
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    flags |= 0 if follow else getattr(os, "O_NOFOLLOW", 0)
    try:
        if not follow and path.is_symlink():
            raise ConfigError(f"{path} is a link; a run's folder holds plain files only")
        with open(os.open(path, flags), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{path} is not a plain file")
            if state.st_size > most:
                raise ConfigError(f"{path} has {state.st_size:,} bytes, more than the {most:,} that are read")
            # no more than that, even if it grows meanwhile
            return file.read(state.st_size)
    except IsADirectoryError:
        raise ConfigError(f"{path} is not a plain file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def read_text(path: Path, most: int) -> str:
    """The text of a plain file; see ``read_bytes``."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text: {error}") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text.

    >>> parse_toml("rounds = ", "my.toml")
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: my.toml is not valid TOML: Invalid value (at end of document)
    """
    long_key = _LONG_KEY.search(text)
    if long_key is not None:
        line = text.count("\n", 0, long_key.start()) + 1
        raise ConfigError(f"{where}, line {line}: a key of more than {DEEPEST} parts")
    try:
        values = tomllib.loads(text)
    # not only tomllib's own error: a number of 5,000 digits is a ValueError, a date such as 2025-02-30 too
    except ValueError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where}: tables and lists are nested too deeply") from None
    _check_depth(values, where)
    return values


def parse_json(text: str, where: str) -> Any:
    """A JSON value whose numbers are all finite.

    >>> parse_json('{"loss": 1e999}', "rounds.jsonl, line 3")
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: rounds.jsonl, line 3 is damaged: 1e999 is not a finite number
    """
    try:
        value = json.loads(text, parse_float=_finite, parse_constant=_finite)
    except ValueError as error:
        raise ConfigError(f"{where} is damaged: {error}") from error
    except RecursionError:
        raise ConfigError(f"{where} is damaged: lists are nested too deeply") from None
    try:
        # half a character, which cannot be written to a file
        if "\\ud" in text.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where} is damaged: a text in it is not Unicode") from None
    # few brackets cannot be deep, and most lines have few
    if text.count("[") + text.count("{") > DEEPEST:
        _check_depth(value, where)
    return value


def json_lines(text: str, where: str) -> Iterator[tuple[str, Any]]:
    """Each whole line of a text, after its file and number; a last line that a kill cut off is skipped."""
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        named = f"{where}, line {number}"
        yield named, parse_json(line, named)


def shaped(schema: Any, value: Any, where: str) -> Any:
    """The value, unchanged, if it has the shape of a schema (such as a TypedDict)."""
    try:
        _adapter(schema).validate_python(value, strict=True)
    except ValidationError as error:
        raise ConfigError(f"{where} is damaged: {explain(error)}") from error
    return value


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def _finite(text: str) -> float:
    value = float(text)
    if value - value != 0:
        raise ValueError(f"{text} is not a finite number")
    return value


def _check_depth(value: Any, where: str) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, Mapping | list)
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
        ]
        if not level:
            return
    raise ConfigError(f"{where}: tables and lists are nested too deeply")


@contextmanager
def offline() -> Iterator[None]:
    """Make the libraries of Hugging Face that are imported use local files only."""
    names = ("huggingface_hub.constants", "datasets.config")
    modules: list[Any] = [sys.modules[name] for name in names if name in sys.modules]
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
