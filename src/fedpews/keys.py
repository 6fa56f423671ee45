"""Every key of a configuration: its type, default, range and meaning, read off the classes that check it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fedpews.compose import (
    METHODS,
    OPTIMIZERS,
    PERSONAL,
    SERVERS,
    method_class,
    optimizer_class,
    personal_class,
    server_class,
)
from fedpews.configs import read_config
from fedpews.experiment import Experiment

TRAIN_KEYS = ("momentum", "weight_decay", "clip_norm")
"""Options of most methods that a configuration has under ``train``."""


@dataclass(frozen=True)
class Key:
    """One key, in words."""

    name: str
    type: str
    default: str
    text: str


def config_keys() -> Iterator[Key]:
    """The keys that every experiment has."""
    schema = Experiment.model_json_schema()
    for name, entry in schema["properties"].items():
        table = schema["$defs"].get(entry.get("$ref", "").rpartition("/")[2])
        if table is None:
            yield _key(name, entry)
        else:
            yield from (_key(f"{name}.{inner}", value) for inner, value in table["properties"].items())


def method_keys() -> Iterator[Key]:
    """The options of each method and optimiser; these classes are imported."""
    for name in METHODS:
        yield from _options(method_class(name), f"method.{{}} ({name})", TRAIN_KEYS)
    for name in SERVERS:
        yield from _options(server_class(name), f"server.{{}} ({name})", ())
    for name in PERSONAL:
        yield from _options(personal_class(name), f"method.{{}} ({name})", ())
    for name in OPTIMIZERS:
        yield from _options(optimizer_class(name), f"optimizer.{{}} ({name})", ())


def commented_toml(recipe: str, path: str = "my.toml") -> str:
    """A recipe as a file to change: its values, and every other key with its default as a comment."""
    values, defaults = read_config(recipe), Experiment().model_dump()
    words = {key.name: key for key in config_keys()}
    lines = [
        f"# fedpews run {path}",
        f"# The recipe {recipe}, with every other key as a comment: take the # away to set it.",
        "# Names such as module:Class are code, which runs: read a file that somebody else wrote first.",
        "",
    ]
    plain = {name: default for name, default in defaults.items() if not isinstance(default, dict)}
    lines += _commented("", values, plain, words)
    for table, inner in defaults.items():
        # what real sites need is another file's matter: fedpews flower new
        if isinstance(inner, dict) and table != "flower":
            lines += ["", f"[{table}]", *_commented(f"{table}.", values.get(table, {}), inner, words)]
    return "\n".join(lines) + "\n"


def _commented(
    prefix: str, values: Mapping[str, Any], defaults: Mapping[str, Any], words: Mapping[str, Key]
) -> Iterator[str]:
    own = [name for name, value in values.items() if not isinstance(value, dict) and name not in defaults]
    for name in (*defaults, *own):
        key = words.get(prefix + name)
        if key is not None:
            yield f"# {key.text} ({key.type})" if key.text else f"# {key.type}"
        if name in values:
            yield f"{name} = {_toml(values[name])}"
        else:
            yield f"# {name} = {_toml(defaults[name])}".rstrip()


def _toml(value: Any) -> str:
    """Text, numbers and lists read the same in JSON and in TOML; no default is nothing at all."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _options(cls: type[Any], pattern: str, without: tuple[str, ...]) -> Iterator[Key]:
    from fedpews.methods.options import option_schema

    texts = _arguments(cls)
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    for name, entry in option_schema(cls).items():
        if name not in without:
            shown = dict(entry) | {"default": defaults[name], "description": texts.get(name, "")}
            yield _key(pattern.format(name), shown)


def _arguments(cls: type[Any]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of its options, under Args."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        part = (inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]).partition("\n\n")[0]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", part, re.MULTILINE):
            found[name] = " ".join(text.split())
    return found


def _key(name: str, entry: Mapping[str, Any]) -> Key:
    default = entry.get("default")
    shown = (
        ""
        if default is None
        else ", ".join(map(str, default))
        if isinstance(default, tuple)
        else str(default)
    )
    return Key(name, _type(entry), shown, entry.get("description", ""))


_LOW = {"minimum": "≤", "exclusiveMinimum": "<"}
_HIGH = {"maximum": "≤", "exclusiveMaximum": "<"}


def _type(entry: Mapping[str, Any]) -> str:
    """A JSON schema's type and limits in a few words.

    >>> _type({"type": "number", "minimum": 0, "exclusiveMaximum": 1}), _type({"type": "integer", "minimum": 1})
    ('number, 0 ≤ · < 1', 'whole number, ≥ 1')
    """
    if "anyOf" in entry:
        return _type(next(one for one in entry["anyOf"] if one.get("type") != "null"))
    if "enum" in entry:
        return " | ".join(map(str, entry["enum"]))
    if "const" in entry:
        return str(entry["const"])
    kind = str(entry.get("type", "table"))
    if kind == "array":
        return f"list of {_type(entry.get('items', {'type': 'value'}))}"
    low = next((f"{entry[key]:g} {sign} " for key, sign in _LOW.items() if key in entry), "")
    high = next((f" {sign} {entry[key]:g}" for key, sign in _HIGH.items() if key in entry), "")
    words = f"{low}·{high}" if low and high else high.strip() or _turned(low)
    names = {"integer": "whole number", "string": "text", "boolean": "true | false", "object": "table"}
    return ", ".join(filter(None, (names.get(kind, kind), words)))


def _turned(low: str) -> str:
    """A lower limit by itself, read from the value: ``1 ≤`` is ``≥ 1``."""
    return " ".join(reversed(low.split())).replace("≤", "≥").replace("<", ">")
