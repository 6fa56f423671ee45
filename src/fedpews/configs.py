"""Configurations as nested dicts: read from recipes and TOML files, changed by dotted keys."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any

from fedpews.compose import METHODS, PERSONAL, SERVERS, WARMUPS, MethodName, method_class, takes_server
from fedpews.errors import ConfigError, nearest
from fedpews.outside import DEEPEST, MOST_TOML, parse_toml, read_text

STUDIES = "fedpews.paper.studies"
"""Where the tables and figures of the paper are."""


def recipes() -> dict[str, Any]:
    """The configurations that ship with the package, by name."""
    return shipped("fedpews.recipes")


def shipped(package: str) -> dict[str, Any]:
    """The TOML files in one of our packages, by name."""
    files = sorted(resources.files(package).iterdir(), key=lambda file: file.name)
    return {file.name.removesuffix(".toml"): file for file in files if file.name.endswith(".toml")}


def read_config(config: str | Path) -> dict[str, Any]:
    """The values in a recipe or a TOML file."""
    known = recipes()
    if str(config) in known:
        return parse_toml(known[str(config)].read_text(encoding="utf-8"), str(config))
    study = str(config).removeprefix("paper/")
    if study in shipped(STUDIES):
        raise ConfigError(f"{config} is a study of several runs; run it with: fedpews reproduce {study}")
    path = Path(config)
    if not path.is_file():
        raise ConfigError(
            f"{config}: no such recipe or file; {nearest(str(config), known)} (see `fedpews list recipes`)"
        )
    return parse_toml(read_text(path, MOST_TOML), str(path))


def override(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested values with dotted keys set.

    Another method leaves behind the file's options of the first one, and its kind of warmup.

    >>> override({"train": {"lr": 1.0}}, {"train.lr": 0.1, "rounds": 5})
    {'train': {'lr': 0.1}, 'rounds': 5}
    """
    result: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    if "method.name" in changes:
        old = result.get("method", {})
        kept = old if _base(old.get("name", "")) == _base(str(changes["method.name"])) else {}
        result["method"] = dict(kept)
        result.get("warmup", {}).pop("kind", None)
    for key, value in changes.items():
        *tables, last = key.split(".")
        place = result
        for table in tables:
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise ConfigError(f"{key}: {table} is a single value, not a table")
        if {"rounds": "fraction", "fraction": "rounds"}.get(last) and tables == ["warmup"]:
            place.pop({"rounds": "fraction", "fraction": "rounds"}[last], None)
        if {"epochs", "steps"} >= {last} and tables == ["train"]:
            place.pop({"epochs": "steps", "steps": "epochs"}[last], None)
        place[last] = value
    return result


def parse_setting(text: str) -> tuple[str, Any]:
    """``key=value`` from the command line; the value as TOML has it, or else as a plain string.

    >>> parse_setting("train.lr=0.1"), parse_setting("data.name=cifar-mnist")
    (('train.lr', 0.1), ('data.name', 'cifar-mnist'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: give it as key=value, for instance --set train.lr=0.1")
    if key.count(".") >= DEEPEST:
        raise ConfigError(f"--set {key[:60]!r}...: there is no key of so many parts")
    try:
        return key.strip(), parse_toml(f"value = {value}", f"--set {key.strip()[:60]}")["value"]
    except ConfigError as error:
        # a plain string needs no quotes; what is TOML but too large or too deep is no string
        if isinstance(error.__cause__, tomllib.TOMLDecodeError):
            return key.strip(), value.strip()
        raise


def settings_by_method(settings: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """The settings of each method in a comparison: those for all, and its own, such as ``fedprox.mu``.

    >>> settings_by_method({"rounds": 5, "fedprox.mu": 0.1}, ["fedavg", "fedprox+pews"])
    [{'rounds': 5}, {'rounds': 5, 'method.mu': 0.1}]
    """
    tables = [MethodName.parse(name).tables for name in names]
    parts = {*METHODS, *SERVERS, *WARMUPS, *PERSONAL}.union(*tables)
    found: list[dict[str, Any]] = [{} for _ in names]
    for key, value in settings.items():
        part, dot, option = key.partition(".")
        if not dot or part not in parts:
            for mine in found:
                mine[key] = value
            continue
        if not any(part in table for table in tables):
            raise ConfigError(f"--set {key}: {part} is part of no method here ({', '.join(names)})")
        for mine, table in zip(found, tables, strict=True):
            if part in table:
                mine[f"{table[part]}.{option}"] = value
    return found


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flatten({"train": {"lr": 0.1}, "rounds": 5})
    {'train.lr': 0.1, 'rounds': 5}
    """

    def walk(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    return dict(walk(values, prefix))


def _base(name: str) -> str:
    return name.lower().split("+")[0]


OPTIONS_OF_METHODS = ("optimizer", "momentum", "weight_decay", "clip_norm", "server_lr")
"""Keys under ``train`` that a method is made with."""


def fit_method(values: dict[str, Any], changes: Mapping[str, Any], config: str | Path) -> dict[str, Any]:
    """The values without the keys that only the file's own method uses, when another method is asked for."""
    if "method.object" in changes:
        return _fit_object(values, changes)
    name = MethodName.parse(str(values["method"]["name"]))
    base, warmup = name.base, values.get("warmup", {})
    if (warmup.get("kind") or name.warmup) != "learned" and "warmup.diversity" not in changes:
        # λ is chosen for learned masks; FedPeWS-Auto has its own
        warmup.pop("diversity", None)
    unused = [] if takes_server(base) else ["train.server_lr"]
    options = {field.name for field in fields(method_class(base))}
    unused += [
        f"train.{key}" for key in ("momentum", "weight_decay", "clip_norm", "optimizer") if key not in options
    ]
    for place in unused:
        table, key = place.split(".")
        if place not in changes and values.get(table, {}).pop(key, None) is not None:
            logging.getLogger("fedpews").warning(
                "%s has no use for %s, which %s sets: left out", base, place, config
            )
    if not takes_server(base) and not any(key.startswith("server") for key in changes):
        values.pop("server", None)
    if "optimizer" not in options and not any(key.startswith("optimizer") for key in changes):
        values.pop("optimizer", None)
    return values


def _fit_object(values: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values without the options of the file's method: a method object brings its own."""
    given = set(changes) | {key.split(".")[0] for key in changes}
    kept = {k: v for k, v in values.items() if k in given or k not in ("warmup", "server", "optimizer")}
    train = values.get("train", {})
    unused = [key for key in OPTIONS_OF_METHODS if f"train.{key}" not in changes]
    return kept | {
        "method": {key.split(".")[1]: value for key, value in changes.items() if key.startswith("method.")},
        "train": {key: value for key, value in train.items() if key not in unused},
    }
