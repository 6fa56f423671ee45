"""Every key of a configuration: its type, default, range and meaning, read off the classes that check it."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import create_model

from fedpews.compose import (
    METHODS,
    OPTIMIZERS,
    PERSONAL,
    SERVERS,
    MethodName,
    method_class,
    optimizer_class,
    personal_class,
    server_class,
)
from fedpews.configs import read_config
from fedpews.experiment import Experiment
from fedpews.models import FROM_DATA, MODELS, model_class
from fedpews.tasks.names import TASKS

TRAIN_KEYS = ("momentum", "weight_decay", "clip_norm")
"""Options of most methods that a configuration has under ``train``."""


@dataclass(frozen=True)
class Key:
    """One key, in words."""

    name: str
    type: str
    default: str
    text: str
    value: Any = None
    """The default itself."""


def config_keys() -> Iterator[Key]:
    """The keys that every experiment has."""
    schema = Experiment.model_json_schema()
    for name, entry in schema["properties"].items():
        table = schema["$defs"].get(entry.get("$ref", "").rpartition("/")[2])
        if table is None:
            yield _key(name, entry)
        else:
            yield from (_key(f"{name}.{inner}", value) for inner, value in table["properties"].items())


def option_keys() -> Iterator[Key]:
    """The options of each task, model, method and optimiser, whose names follow in brackets; all are imported."""
    from fedpews.options import option_types
    from fedpews.tasks.task import task_class

    for name in TASKS:
        yield from _options("task", name, task_class(name), without={"metrics", "criterion"})
    for name in MODELS:
        yield from _options("model", name, model_class(name), without=FROM_DATA)
    for table, names, find in (
        ("method", METHODS, method_class),
        ("server", SERVERS, server_class),
        ("method", PERSONAL, personal_class),
        ("optimizer", OPTIMIZERS, optimizer_class),
    ):
        for name in names:
            cls = find(name)
            others = {field.name for field in dataclasses.fields(cls)} - set(option_types(cls))
            yield from _options(table, name, cls, others.union(TRAIN_KEYS if names is METHODS else ()))


def commented_toml(
    recipe: str, path: str = "my.toml", tables: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """A recipe as a file to change: its values, and every other key with its default as a comment.

    Options of tasks, models, methods and optimisers are all there, since it depends on the names which are read.

    Args:
        tables: in the place of the recipe's.
    """
    values, defaults = {**read_config(recipe), **(tables or {})}, Experiment().model_dump()
    words = {key.name: key for key in config_keys()}
    options: dict[str, list[Key]] = {}
    for key in option_keys():
        options.setdefault(key.name.partition(".")[0], []).append(key)
    used = _used(Experiment(**values))
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
            given = dict(values.get(table, {}))
            lines += ["", f"[{table}]"]
            mine = list(_options_commented(given, options.get(table, []), used))
            lines += [*_commented(f"{table}.", given, inner, words), *mine]
    return "\n".join(lines) + "\n"


def _used(experiment: Experiment) -> set[str]:
    """The names whose options the experiment reads."""
    named = MethodName.parse(experiment.method.name)
    return {experiment.task.name, experiment.model.name, experiment.train.optimizer, *named.tables}


def _options_commented(given: dict[str, Any], options: Sequence[Key], used: set[str]) -> Iterator[str]:
    """Each option below its owner and meaning; one that is given is moved here."""
    for key in options:
        name, _, owner = key.name.partition(".")[2].partition(" ")
        owner = owner.strip("()")
        yield f"# {owner}: {key.text} ({key.type})"
        if name in given and owner in used:
            yield f"{name} = {_toml(given.pop(name))}"
        else:
            yield f"# {name} = {_toml(key.value)}".rstrip()


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


def _options(table: str, owner: str, cls: type[Any], without: Set[str]) -> Iterator[Key]:
    hints = get_type_hints(cls if dataclasses.is_dataclass(cls) else cls.__init__, include_extras=True)
    defaults = {name: given.default for name, given in inspect.signature(cls).parameters.items()}
    names = [name for name in defaults if name not in without]
    fields: dict[str, Any] = {name: (hints[name], None) for name in names}
    model: Any = create_model(owner, **fields)
    schema, texts = model.model_json_schema(), _arguments(cls)
    for name in names:
        shown = schema["properties"][name] | {"default": defaults[name], "description": texts.get(name, "")}
        yield _key(f"{table}.{name} ({owner})", shown)


def _arguments(cls: type[Any]) -> dict[str, str]:
    """What the docstrings of a class and its bases say of its options, under Args."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        part = (inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]).partition("\n\n")[0]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", part, re.MULTILINE):
            found[name] = " ".join(text.split()).removesuffix(".").replace("``", "`")
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
    return Key(name, _type(entry), shown, entry.get("description", ""), default)


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
