"""A method's options: what they may be, and what to say when they are something else."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedpews.errors import ConfigError


def option(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    choices: Iterable[str] = (),
) -> Any:
    """A dataclass field with a range; for a tuple of numbers the range holds for each."""
    limits = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    given = {words: limit for words, limit in limits.items() if limit is not None}
    return dataclasses.field(default=default, metadata={"limits": given, "choices": tuple(choices)})


def defaults(cls: type) -> dict[str, Any]:
    """Every option of a class and its default."""
    return {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if isinstance(field.default, bool | int | float | str | tuple)
    }


def check(cls: type, given: Mapping[str, Any], owner: str, prefix: str = "method") -> dict[str, Any]:
    """The options in the types the class wants, or a ConfigError that says what is allowed.

    >>> from fedpews.methods.fedprox import FedProx
    >>> check(FedProx, {"mu": 1}, "fedprox")
    {'mu': 1.0}
    """
    known = defaults(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    checked = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{owner} has no option {prefix}.{name}; {nearest(name, known)}")
        checked[name] = _convert(value, known[name], f"{prefix}.{name}")
        _check_range(checked[name], fields[name].metadata, f"{prefix}.{name}")
    return checked


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a name that does not exist: the one meant, or all there are."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"there is {', '.join(names)}." if names else "there are none."


def _convert(value: Any, default: Any, name: str) -> Any:
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ConfigError(f"{name} must be true or false, got {value!r}.")
    if isinstance(default, tuple):
        if isinstance(value, list | tuple):
            return tuple(_number(item, f"each of {name}") for item in value)
        raise ConfigError(f"{name} must be a list of numbers such as {list(default)}, got {value!r}.")
    if isinstance(default, str):
        if isinstance(value, str):
            return value
        raise ConfigError(f"{name} must be a word such as {default!r}, got {value!r}.")
    number = _number(value, name)
    if isinstance(default, int):
        if number != int(number):
            raise ConfigError(f"{name} must be a whole number, got {value!r}.")
        return int(number)
    return number


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a number, got {value!r}.")
    return float(value)


def _check_range(value: Any, metadata: Mapping[str, Any], name: str) -> None:
    limits, choices = metadata.get("limits", {}), metadata.get("choices", ())
    if choices and value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}.")
    if isinstance(value, tuple) and not value:
        raise ConfigError(f"{name} must not be empty.")
    tests = {
        "at least": lambda item, limit: item >= limit,
        "above": lambda item, limit: item > limit,
        "at most": lambda item, limit: item <= limit,
        "below": lambda item, limit: item < limit,
    }
    for item in value if isinstance(value, tuple) else (value,):
        if not all(tests[words](item, limit) for words, limit in limits.items()):
            allowed = " and ".join(f"{words} {limit:g}" for words, limit in limits.items())
            raise ConfigError(f"{name} must be {allowed}, got {item!r}.")
