"""An experiment as data: every choice that decides its numbers, checked once, here; and every key in words.

Nothing here imports torch, so that `fedpews --help` is quick.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

import tomli_w
from pydantic import Field, ValidationError, create_model, model_validator

from fedpews.compose import (
    METHOD_KEYS,
    METHODS,
    OPTIMIZERS,
    PERSONAL,
    SERVERS,
    Kind,
    MethodName,
    method_class,
    optimizer_class,
    personal_class,
    server_class,
    unused_keys,
)
from fedpews.config import (
    FinetuneTable,
    FlowerTable,
    MethodTable,
    ModelTable,
    PretrainTable,
    PrivacyTable,
    RuntimeTable,
    StopTable,
    TaskTable,
    TrainTable,
    WarmupTable,
    override,
    read_config,
)
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, explain
from fedpews.models import FROM_DATA, MODELS, model_class
from fedpews.options import Count, Table, option_texts, option_types
from fedpews.tasks.class_names import check_list
from fedpews.tasks.names import TASKS, Goal, short


class Experiment(Table):
    """Everything that decides a run. Make one from a recipe, a file, or in Python.

    >>> Experiment(rounds=200, warmup={"fraction": 0.125}).warmup_rounds
    25
    >>> Experiment(rounds=10, warmup={"rounds": 20})
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: warmup.rounds is 20 but there are only 10 rounds; make it at most rounds
    """

    rounds: Count = Field(100, description="T, communication rounds")
    seeds: list[Annotated[int, Field(ge=0, le=10**18, strict=True)]] = Field(
        [0], min_length=1, description="one run for each"
    )
    target_accuracy: Annotated[float, Field(gt=0, le=1)] = Field(
        0.99, description="rounds to reach it are counted"
    )
    target_metric: str | None = Field(
        None, description="the metric that has a target; by default the first of task.metrics"
    )
    target: Annotated[float, Field(allow_inf_nan=False)] | None = Field(
        None, description="what target_metric is to reach; by default target_accuracy where that makes sense"
    )
    participation: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="part of the clients in each round"
    )
    data: DataTable = DataTable()
    task: TaskTable = TaskTable()
    model: ModelTable = ModelTable()
    train: TrainTable = TrainTable()
    method: MethodTable = MethodTable()
    optimizer: dict[str, float] = Field({}, description="the local optimiser's own options")
    server: dict[str, float] = Field({}, description="the server optimiser's own options")
    warmup: WarmupTable = WarmupTable()
    stop: StopTable = StopTable()
    pretrain: PretrainTable = PretrainTable()
    finetune: FinetuneTable = FinetuneTable()
    privacy: PrivacyTable = PrivacyTable()
    runtime: RuntimeTable = RuntimeTable()
    flower: FlowerTable = FlowerTable()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, known=known_keys())) from None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds are given twice: {self.seeds}")
        named, kind = self._parsed.warmup, self.warmup.kind
        if named != "none" and kind not in (None, named):
            raise ValueError(
                f"method.name {self.method.name!r} asks for the {named} warmup, warmup.kind for {kind!r}; "
                "leave one of them out"
            )
        if self.data.classes is not None:
            own = {"task": (self.task.model_extra or {}).get("classes"), "flower": self.flower.classes}
            check_list(self.data.classes, own)
        twice = self._said_twice()
        if twice:
            raise ValueError(twice)
        if self.privacy.clip is not None and (self.train.weighting, self.train.aggregate) != (
            "uniform",
            "mean",
        ):
            raise ValueError(
                "with privacy.clip, train.weighting must be 'uniform' and train.aggregate 'mean'"
            )
        if self.warmup_kind != "none" and self.warmup_rounds > self.rounds:
            raise ValueError(
                f"warmup.rounds is {self.warmup_rounds} but there are only {self.rounds} rounds; make it at most rounds"
            )
        return self

    def _said_twice(self) -> str:
        """What is wrong where a key is given in two places, of which one would be ignored."""
        own, names = self.method.model_extra or {}, ("momentum", "weight_decay", "clip_norm")
        given = {f"method.{key}": f"train.{key}" for key in names if key in own and getattr(self.train, key)}
        if "lr" in self.server and self.train.server_lr is not None:
            given["server.lr"] = "train.server_lr"
        for one, other in given.items():
            return f"{one} and {other} are the same; give one of them"
        strange = [f"method.{key}" for key in ("optimizer", "server", "warmup") if key in own]
        strange += [f"{table}.name" for table in ("server", "optimizer") if "name" in getattr(self, table)]
        return f"there is no key {strange[0]}; see `fedpews list keys`" if strange else ""

    @property
    def _parsed(self) -> MethodName:
        return (
            MethodName.parse(self.method.name) if self.method.object is None else MethodName(self.method.name)
        )

    @property
    def method_name(self) -> MethodName:
        """The method's name taken apart, whichever key asked for the warmup."""
        named = self._parsed
        return named if named.warmup != "none" else replace(named, warmup=self.warmup.kind or "none")

    @property
    def warmup_kind(self) -> Kind:
        return self.method_name.warmup

    @property
    def warmup_rounds(self) -> int:
        """W; for FedPeWS-Auto the most it may take."""
        if self.warmup_kind == "none":
            return 0
        if self.warmup.rounds is not None:
            return self.warmup.rounds
        fraction = self.warmup.fraction
        if fraction is None:
            fraction = 0.5 if self.warmup_kind == "auto" else 0.125
        return int(fraction * self.rounds + 0.5)

    @property
    def method_label(self) -> str:
        """The method's full name."""
        return str(self.method_name)

    @property
    def goal(self) -> Goal:
        """What a run is to reach."""
        named = [short(metric) for metric in self.task.metrics]
        metric = self.target_metric or (named[0] if named else TASKS.get(self.task.name, "accuracy"))
        value = self.target
        if value is None and metric == "accuracy":
            value = self.target_accuracy
        return Goal(metric, value)

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    def fingerprint(self) -> str:
        """A hash of all that decides the numbers; how often to save and how many workers do not.

        Only what is not a default counts, so that a key that a later version adds changes no fingerprint.
        """
        values = self.model_dump(exclude_defaults=True)
        # of a model and data given in Python a checkpoint says more; [flower] is what a deployment tolerates
        free = {"runtime": ("workers", "checkpoint_every", "resume"), "data": ("fingerprint",)}
        for table, keys in (free | {"model": ("fingerprint", "code")}).items():
            values[table] = {key: v for key, v in values.get(table, {}).items() if key not in keys}
        values.pop("flower", None)
        values = {key: value for key, value in values.items() if value != {}}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, config: str | Path, overrides: Mapping[str, Any] | None = None) -> Experiment:
        """A recipe by name or a TOML file, with dotted keys changed: ``{"train.lr": 0.1}``.

        Where the changes name another method, the keys of the file that this method does not use are left out, with
        a warning.
        """
        changes = overrides or {}
        values = override(read_config(config), changes)
        if "method.object" in changes:
            values["method"] = {
                key.removeprefix("method."): v for key, v in changes.items() if key.startswith("method.")
            }
            return cls(**_without(values, METHOD_KEYS, changes))
        if "method.name" in changes:
            name, kind = MethodName.parse(str(changes["method.name"])), values.get("warmup", {}).get("kind")
            unused = unused_keys(replace(name, warmup=kind or name.warmup))
            kept = _without(values, unused, changes)
            for key in values.get("train", {}).keys() - kept["train"].keys():
                logging.getLogger("fedpews").warning(
                    "%s has no use for train.%s, which %s sets: left out", name.base, key, config
                )
            return cls(**kept)
        return cls(**values)


def _without(values: dict[str, Any], keys: Sequence[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The values without these keys or tables, except those that are changed."""
    unused = {key for key in keys if not any(f"{change}.".startswith(f"{key}.") for change in changes)}
    return {
        table: {key: value for key, value in inner.items() if f"{table}.{key}" not in unused}
        if isinstance(inner, dict)
        else inner
        for table, inner in values.items()
        if table not in unused
    }


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

    def walk(prefix: str, table: Mapping[str, Any]) -> Iterator[Key]:
        for name, entry in table["properties"].items():
            references = [one["$ref"] for one in (entry, *entry.get("anyOf", ())) if "$ref" in one]
            if references:
                yield from walk(f"{prefix}{name}.", schema["$defs"][references[0].rpartition("/")[2]])
            else:
                yield _key(prefix + name, entry)

    return walk("", schema)


def known_keys() -> dict[str, str]:
    """Every key of a configuration with its description."""
    return {key.name: key.text for key in config_keys()}


def option_keys() -> Iterator[Key]:
    """The options of each task, model, method and optimiser, whose names follow in brackets; all are imported."""
    from fedpews.tasks.task import task_class

    for table, names, find in (
        ("task", TASKS, task_class),
        ("model", MODELS, model_class),
        ("method", METHODS, method_class),
        ("server", SERVERS, server_class),
        ("method", PERSONAL, personal_class),
        ("optimizer", OPTIMIZERS, optimizer_class),
    ):
        for name in names:
            yield from _options(table, name, find(name))


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
            nested = {name: [word for word in words if word.startswith(f"{table}.{name}.")] for name in inner}
            flat = {name: default for name, default in inner.items() if not nested[name]}
            lines += [*_commented(f"{table}.", given, flat, words), *mine]
            for name, keys in nested.items():
                inside = {key.rpartition(".")[2]: words[key].value for key in keys}
                below = list(_commented(f"{table}.{name}.", {}, inside, words))
                lines += ["", f"# [{table}.{name}]", *below] if keys else []
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


def _options(table: str, owner: str, cls: type[Any]) -> Iterator[Key]:
    defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
    if dataclasses.is_dataclass(cls):
        hints = option_types(cls)
        elsewhere = {"task": {"metrics"}, "method": set(TRAIN_KEYS)}.get(table, set())
    else:
        hints, elsewhere = get_type_hints(cls.__init__, include_extras=True), FROM_DATA
    names = [name for name in defaults if name in hints and name not in elsewhere]
    fields: dict[str, Any] = {name: (hints[name], None) for name in names}
    schema, texts = create_model(owner, **fields).model_json_schema(), option_texts(cls)
    for name in names:
        shown = schema["properties"][name] | {"default": defaults[name], "description": texts.get(name, "")}
        yield _key(f"{table}.{name} ({owner})", shown)


def _key(name: str, entry: Mapping[str, Any]) -> Key:
    default = entry.get("default")
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    shown = "" if default is None else shown
    return Key(name, _type(entry), shown, entry.get("description", ""), default)


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
    low = next(((entry[key], sign) for key, sign in _LOW.items() if key in entry), None)
    high = next((f"{sign} {entry[key]:g}" for key, sign in _HIGH.items() if key in entry), "")
    if low is not None:
        high = f"{low[0]:g} {low[1]} · {high}" if high else f"{'≥' if low[1] == '≤' else '>'} {low[0]:g}"
    names = {"integer": "whole number", "string": "text", "boolean": "true | false", "object": "table"}
    return ", ".join(filter(None, (names.get(kind, kind), high)))


_LOW = {"minimum": "≤", "exclusiveMinimum": "<"}
_HIGH = {"maximum": "≤", "exclusiveMaximum": "<"}
