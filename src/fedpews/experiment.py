"""An experiment as data: every choice that decides its numbers, checked once, here; and every key in words.

Nothing here imports torch, so that `fedpews --help` is quick.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, get_type_hints

import tomli_w
from pydantic import Field, ValidationError, create_model, model_validator

from fedpews import compose, config
from fedpews.compose import MethodName, find_class
from fedpews.config import flatten, override, read_config
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, explain
from fedpews.models import FROM_DATA, MODELS, model_class
from fedpews.models.table import ModelTable
from fedpews.options import Count, Table, field, option_texts, option_types
from fedpews.registry import Kind, registered
from fedpews.tasks.names import TASKS, Goal, check_list, short

FREE = (
    *("runtime.workers", "runtime.checkpoint_every", "runtime.resume", "flower."),
    *("data.fingerprint", "model.fingerprint", "model.code"),
)
"""Keys that do not decide the numbers: a resumed run may change them. Data and model are compared themselves."""


class Experiment(Table):
    """The complete configuration of a run. Make one from a recipe, a file, or in Python.

    >>> Experiment(rounds=200, warmup={"fraction": 0.125}).warmup_rounds
    25
    >>> Experiment(rounds=10, warmup={"rounds": 20})
    Traceback (most recent call last):
    ...
    fedpews.errors.ConfigError: warmup.rounds is 20, but rounds is 10; set warmup.rounds to at most 10
    """

    rounds: Count = field(100, "number of communication rounds, T")
    seeds: list[Annotated[int, Field(ge=0, le=10**18, strict=True)]] = field(
        [0], "random seeds; each seed is a separate run", min_length=1
    )
    target_accuracy: Annotated[float, Field(gt=0, le=1)] = field(
        0.99, "target accuracy; the report counts the rounds to reach it"
    )
    target_metric: str | None = field(
        None, "the metric that should reach target; by default the first of task.metrics"
    )
    target: Annotated[float, Field(allow_inf_nan=False)] | None = field(
        None, "value of target_metric to reach; for accuracy the default is target_accuracy"
    )
    participation: Annotated[float, Field(gt=0, le=1)] = field(
        1.0, "share of the clients that take part in each round"
    )
    data: DataTable = DataTable()
    task: config.TaskTable = config.TaskTable()
    model: ModelTable = ModelTable()
    train: config.TrainTable = config.TrainTable()
    method: config.MethodTable = config.MethodTable()
    optimizer: dict[str, float] = field({}, "options of the local optimiser")
    server: dict[str, float] = field({}, "options of the server optimiser")
    warmup: config.WarmupTable = config.WarmupTable()
    stop: config.StopTable = config.StopTable()
    pretrain: config.PretrainTable = config.PretrainTable()
    finetune: config.FinetuneTable = config.FinetuneTable()
    privacy: config.PrivacyTable = config.PrivacyTable()
    runtime: config.RuntimeTable = config.RuntimeTable()
    flower: config.FlowerTable = config.FlowerTable()

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(explain(error, known=known_keys())) from None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        if len(set(self.seeds)) < len(self.seeds):
            yield f"seeds contains the same seed twice: {self.seeds}"
        named, kind = self._parsed.warmup, self.warmup.kind
        if named != "none" and kind not in (None, named):
            yield (
                f"method.name {self.method.name!r} sets the {named} warmup, and warmup.kind sets {kind!r}; "
                "remove one of them"
            )
        if self.data.classes is not None:
            own = {"task": (self.task.model_extra or {}).get("classes"), "flower": self.flower.classes}
            check_list(self.data.classes, own)
        train, values = self.train, self.model_dump(exclude_none=True)
        given = flatten(values)
        for key, other in config.EITHER.items():
            if key in given and other in given:
                yield f"set {key} or {other}, not both"
        # a key that is given in two tables: one of them would be ignored
        twice = {f"method.{key}": f"train.{key}" for key in compose.TRAIN_KEYS if getattr(train, key)}
        for key, other in (twice | {"server.lr": "train.server_lr"}).items():
            if key in given and other in given:
                yield f"{key} and {other} mean the same; set only one of them"
        for key in ("method.optimizer", "method.server", "method.warmup", "server.name", "optimizer.name"):
            table, _, name = key.partition(".")
            if name in values[table]:
                yield f"there is no key {key}; see `fedpews list keys`"
        if self.warmup.ramp and self.warmup_kind == "auto":
            yield "warmup.ramp needs a warmup of fixed length, but +pews-auto ends it automatically; remove warmup.ramp"
        if train.lr_min > train.lr:
            yield f"train.lr_min ({train.lr_min:g}) is larger than train.lr ({train.lr:g})"
        if self.privacy.clip is not None and (train.weighting, train.aggregate) != ("uniform", "mean"):
            yield "with privacy.clip, train.weighting must be 'uniform' and train.aggregate 'mean'"
        if self.warmup_rounds > self.rounds:
            yield (
                f"warmup.rounds is {self.warmup_rounds}, but rounds is {self.rounds}; "
                f"set warmup.rounds to at most {self.rounds}"
            )

    @property
    def _parsed(self) -> MethodName:
        name = self.method.name
        return MethodName.parse(name) if self.method.object is None else MethodName(name)

    @property
    def method_name(self) -> MethodName:
        """The method's name split into its parts, whichever key asked for the warmup."""
        named = self._parsed
        return named if named.warmup != "none" else replace(named, warmup=self.warmup.kind or "none")

    @property
    def warmup_kind(self) -> compose.WarmupKind:
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

    def lr_at(self, round: int) -> float:
        """The local learning rate: multiplied by ``lr_decay`` after each milestone.

        It rises linearly in the first ``lr_warmup`` rounds; a cosine begins after them. After a warmup it rises again,
        in ``warmup.ramp`` rounds: the clients then train neurons that they have not seen, and their first gradients
        are large.

        >>> experiment = Experiment(rounds=6, train={"lr": 1.0, "lr_warmup": 2, "lr_schedule": "cosine"})
        >>> [round(experiment.lr_at(t), 3) for t in range(1, 7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        >>> experiment = Experiment(rounds=6, train={"lr": 1.0}, warmup={"rounds": 2, "ramp": 3})
        >>> [experiment.lr_at(t) for t in range(1, 7)]
        [1.0, 1.0, 0.25, 0.5, 0.75, 1.0]
        """
        train, after = self.train, round - self.warmup_rounds
        lr = train.lr * train.lr_decay ** sum(round > milestone for milestone in train.lr_milestones)
        if self.warmup_rounds and 0 < after <= self.warmup.ramp:
            lr *= after / (self.warmup.ramp + 1)
        if round <= train.lr_warmup:
            return lr * round / train.lr_warmup
        if train.lr_schedule != "cosine":
            return lr
        progress = (round - train.lr_warmup - 1) / (self.rounds - train.lr_warmup)
        return train.lr_min + (lr - train.lr_min) * (1 + math.cos(math.pi * progress)) / 2

    def cohort_size(self, clients: int) -> int:
        """How many clients take part in a round: at least one, halves rounded up."""
        return max(1, math.floor(self.participation * clients + 0.5))

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(exclude_none=True)

    def to_toml(self) -> str:
        return tomli_w.dumps(self.to_dict())

    def fingerprint(self) -> str:
        """A hash of all that decides the numbers; how often to save and how many workers do not.

        Only what is not a default counts, so that a key that a later version adds changes no fingerprint.
        """
        values = self.model_dump(exclude_defaults=True)
        for table, inner in values.items():
            if isinstance(inner, dict):
                values[table] = {k: v for k, v in inner.items() if not f"{table}.{k}".startswith(FREE)}
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
        if "method.name" not in changes:
            return cls(**values)
        name, unused = str(changes["method.name"]), [*compose.METHOD_KEYS]
        if "method.object" not in changes:
            parsed, kind = MethodName.parse(name), values.get("warmup", {}).get("kind")
            unused, name = compose.unused_keys(replace(parsed, warmup=kind or parsed.warmup)), parsed.base
        # what is changed beside the method stays
        unused = [key for key in unused if not any(f"{change}.".startswith(f"{key}.") for change in changes)]
        for key in unused:
            table, _, inner = key.rpartition(".")
            removed = values.get(table, {}).pop(inner, None) if table else values.pop(inner, None)
            if removed is not None and table == "train" and "method.object" not in changes:
                logging.getLogger("fedpews").warning(
                    "%s does not use %s, which %s sets; it is ignored", name, key, config
                )
        return cls(**values)


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

    classes: list[tuple[str, str, type[Any]]] = [("task", name, task_class(name)) for name in TASKS]
    classes += [("model", name, model_class(name)) for name in MODELS]
    kinds: tuple[Kind, ...] = ("method", "server", "personal", "optimizer")
    for kind in kinds:
        section = "method" if kind == "personal" else kind
        classes += [(section, name, find_class(kind, name)) for name in registered(kind)]
    for table, owner, cls in classes:
        defaults = {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        if dataclasses.is_dataclass(cls):
            hints = option_types(cls)
            elsewhere = {"task": {"metrics"}, "method": set(compose.TRAIN_KEYS)}.get(table, set())
        else:
            hints, elsewhere = get_type_hints(cls.__init__, include_extras=True), FROM_DATA
        names = [name for name in defaults if name in hints and name not in elsewhere]
        fields: dict[str, Any] = {name: (hints[name], None) for name in names}
        schema, texts = create_model(owner, **fields).model_json_schema(), option_texts(cls)
        for name in names:
            shown = {"default": defaults[name], "description": texts.get(name, "")}
            yield _key(f"{table}.{name} ({owner})", schema["properties"][name] | shown)


def commented_toml(
    recipe: str, path: str = "my.toml", tables: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """A recipe as a file to change: its values, and every other key with its default as a comment.

    The options of all tasks, models, methods and optimisers are there, each with the name that it belongs to.

    Args:
        tables: replace those of the recipe.
    """
    values = {**read_config(recipe), **(tables or {})}
    given, experiment = flatten(values), Experiment(**values)
    used = {"", experiment.task.name, experiment.model.name, experiment.train.optimizer}
    used |= experiment.method_name.tables.keys()
    sections = {
        "": [
            f"# fedpews run {path}",
            f"# The recipe {recipe}, with all other keys as comments. Remove the # to set a key.",
            "# Names such as module:Class run code, so read a file from someone else before you use it.",
        ]
    }

    def section(table: str) -> list[str]:
        is_given = "." not in table or any(name.startswith(f"{table}.") for name in given)
        return sections.setdefault(table, [f"[{table}]" if is_given else f"# [{table}]"])

    sections[""].append("")
    for key in (*config_keys(), *option_keys()):
        name, _, owner = key.name.partition(" ")
        table, _, last = name.rpartition(".")
        owner = owner.strip("()")
        if name in ("optimizer", "server"):
            section(name)
        # what real sites need is written by: fedpews flower new
        elif table != "flower":
            section(table).append(f"# {owner}: {key.text} ({key.type})".replace("# : ", "# "))
            is_set = name in given and owner in used
            line = f"{last} = {_toml(given.pop(name) if is_set else key.value)}"
            section(table).append(line if is_set else f"# {line}".rstrip())
    for name, value in given.items():
        table, _, last = name.rpartition(".")
        section(table).append(f"{last} = {_toml(value)}")
    return "\n\n".join("\n".join(lines) for lines in sections.values()) + "\n"


def _toml(value: Any) -> str:
    """Text, numbers and lists read the same in JSON and in TOML; no default is nothing at all."""
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _key(name: str, entry: Mapping[str, Any]) -> Key:
    default = entry.get("default")
    shown = ", ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    shown = shown.lower() if isinstance(default, bool) else shown
    return Key(name, _type(entry), "" if default is None else shown, entry.get("description", ""), default)


def _type(entry: Mapping[str, Any]) -> str:
    """A JSON schema's type and limits in a few words.

    >>> _type({"type": "number", "minimum": 0, "exclusiveMaximum": 1}), _type({"type": "integer", "minimum": 1})
    ('number, 0 ≤ x < 1', 'integer, ≥ 1')
    >>> _type({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}})
    'list of lists of integers'
    """
    if "anyOf" in entry:
        return _type(next(one for one in entry["anyOf"] if one.get("type") != "null"))
    if "enum" in entry or "const" in entry:
        return " | ".join(map(str, entry.get("enum", [entry.get("const")])))
    kind = str(entry.get("type", "table"))
    if kind == "array":
        inner, _, rest = _type(entry.get("items", {"type": "value"})).partition(" of ")
        inner, comma, limit = inner.partition(",")
        return f"list of {inner}s{comma}{limit}" + (f" of {rest}" if rest else "")
    names = {"boolean": "true | false", "object": "table"}
    low = {"minimum": "≥", "exclusiveMinimum": ">"}
    high = {"maximum": "≤", "exclusiveMaximum": "<"}
    above = [(entry[key], sign) for key, sign in low.items() if key in entry]
    below = [f"{sign} {entry[key]:g}" for key, sign in high.items() if key in entry]
    if above and below:
        limits = [f"{above[0][0]:g} {'≤' if above[0][1] == '≥' else '<'} x {below[0]}"]
    else:
        limits = below or [f"{sign} {value:g}" for value, sign in above]
    return ", ".join([names.get(kind, kind), *limits])
