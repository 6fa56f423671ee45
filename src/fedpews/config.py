"""The tables of a configuration, its files, and changes by dotted keys.

Nothing here imports torch, so that `fedpews --help` is quick.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator

from fedpews.compose import METHODS, PERSONAL, SERVERS, WARMUPS, MethodName, WarmupKind
from fedpews.errors import ConfigError, nearest
from fedpews.options import (
    Count,
    Momentum,
    NotNegative,
    Positive,
    Table,
    Whole,
    field,
    option_defaults,
    option_texts,
    option_types,
)
from fedpews.outside import DEEPEST, MOST_TOML, parse_toml, read_text
from fedpews.warmup import Auto, Fixed, Learned, Random

STUDIES = "fedpews.paper.studies"
"""The package with the tables and figures of the paper."""

EITHER = {"warmup.rounds": "warmup.fraction", "train.epochs": "train.steps"}
"""Pairs of keys of which a configuration has one."""


class TrainTable(Table):
    lr: Positive = field(0.01, "local learning rate")
    batch_size: Count = field(32, "samples per local step")
    epochs: Annotated[int, Field(ge=1, le=100_000, strict=True)] | None = field(
        None, "epochs per round on a client's data; by default 1"
    )
    steps: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] | None = field(
        None, "local steps per round, instead of epochs"
    )
    optimizer: str = field(
        "sgd",
        "local optimiser: sgd, momentum, nesterov, adam, adamw, adagrad, rmsprop, yogi, or module:Class",
    )
    momentum: Momentum = field(0.0, "momentum of sgd, momentum and nesterov; 0.9 by default for the last two")
    weight_decay: NotNegative = field(0.0, "weight decay of the local steps; 0.01 by default for adamw")
    clip_norm: Positive | None = field(
        None, "maximum norm of a local gradient; larger gradients are scaled down"
    )
    server_lr: Positive | None = field(None, "global learning rate; by default set by the server optimiser")
    lr_milestones: list[Count] = field(
        [], "rounds after which the local learning rate is multiplied by lr_decay"
    )
    lr_decay: Positive = field(0.1, "factor of the local learning rate at each milestone")
    lr_schedule: Literal["constant", "cosine"] = field(
        "constant", "schedule over the rounds; cosine decreases from lr to lr_min"
    )
    lr_min: NotNegative = field(0.0, "final rate of a cosine schedule")
    lr_warmup: Whole = field(0, "number of first rounds in which the local learning rate rises to lr")
    weighting: Literal["uniform", "samples"] = field(
        "uniform", "weights of the clients in the average: equal, or by number of samples"
    )
    aggregate: Literal["mean", "median", "trimmed", "krum", "clipped"] = field(
        "mean", "aggregation of the uploads; all rules except mean tolerate a few bad clients"
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = field(
        0.2, "trimmed: share of the uploads removed at each end"
    )
    byzantine: Whole | None = field(
        None, "krum: number of bad clients; by default the largest number it tolerates"
    )
    precision: Literal["float32", "bfloat16"] = field(
        "float32",
        "bfloat16 trains in mixed precision; weights, averages and evaluation stay float32",
    )
    freeze: list[str] = field(
        [], "patterns of parameters that are neither trained nor sent, such as backbone.*"
    )
    diverged: Literal["stop", "leave-out"] = field(
        "stop", "if a client diverges: stop with a checkpoint, or exclude the client from that round"
    )

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value


class MethodTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # the method's own options, checked when it is made
    name: str = field(
        "fedavg+pews", "method, optionally + server optimiser + warmup; see `fedpews list methods`"
    )
    object: str | None = field(None, "repr of the method; written by fedpews.run(method=OBJECT)")


def _with_mask_options(table: type[WarmupTable]) -> type[WarmupTable]:
    """The table with the options of every kind of masks: their types, defaults and docstrings."""
    kinds = {"learned": Learned, "fixed": Fixed, "random": Random, "auto": Auto}
    fields: dict[str, Any] = {}
    for cls in kinds.values():
        for name in option_defaults(cls):
            owners = {kind: other for kind, other in kinds.items() if name in option_types(other)}
            defaults = {option_defaults(other)[name] for other in owners.values()}
            # None where kinds differ: each then has its own
            default = defaults.pop() if len(defaults) == 1 else None
            only = f"{next(iter(owners))} masks: " if len(owners) == 1 else ""
            hint = option_types(cls)[name] | None if default is None else option_types(cls)[name]
            fields.setdefault(name, (hint, Field(default, description=f"{only}{option_texts(cls)[name]}")))
    return create_model(table.__name__, __base__=table, __module__=__name__, **fields)


@_with_mask_options
class WarmupTable(Table):
    model_config = ConfigDict(allow_inf_nan=False)
    kind: WarmupKind | None = field(None, "kind of masks; by default set by the method's name")
    rounds: Whole | None = field(None, "number of warmup rounds, W")
    fraction: Annotated[float, Field(ge=0, le=1)] | None = field(
        None, "τ = W/T, the warmup rounds as a share of all rounds; instead of warmup.rounds"
    )
    ramp: Whole = field(0, "number of rounds after the warmup in which the local learning rate rises to lr")
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class TaskTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # the task's own options, checked when it is made
    name: str = field("classification", "task by name, or module:Task; see `fedpews list tasks`")
    metrics: list[str] = field([], "metrics, the main metric first; by default the task's first metric")


class StopTable(Table):
    patience: Count | None = field(
        None, "stop a seed after this number of rounds without improvement; warmup rounds do not count"
    )
    min_delta: NotNegative = field(0.0, "smallest change that counts as an improvement")
    on: Literal["validation", "test"] = field("validation", "data on which improvement is measured")
    best: bool = field(False, "also keep the best model; always on with stop.patience")


class PretrainTable(Table):
    data: str | None = field(None, "public data on which the server trains the model before round 1")
    train_per_class: Count | None = field(None, "number of samples of each class")
    seed: int = field(0, "seed of the public data")
    epochs: Count = field(10, "epochs on the public data")
    lr: Positive | None = field(None, "learning rate; by default that of the first round")


class FinetuneTable(Table):
    epochs: Count | None = field(
        None, "epochs of fine-tuning of the final global model on each client's data"
    )
    lr: Positive | None = field(None, "learning rate; by default that of the last round")


class PrivacyTable(Table):
    clip: Positive | None = field(
        None, "C, the maximum norm of a client's change; setting it turns on differential privacy"
    )
    noise: NotNegative = field(
        1.0, "z, the noise multiplier: noise with deviation z·C is added to the sum of the changes"
    )
    place: Literal["server", "client"] = field(
        "server", "where noise is added: server (central) or client (local)"
    )
    adaptive: bool = field(False, "adapt C to a quantile of the clients' norms")
    quantile: Annotated[float, Field(gt=0, lt=1)] = field(0.5, "quantile for privacy.adaptive")
    clip_lr: Positive = field(0.2, "learning rate of C for privacy.adaptive")
    bit_noise: Positive = field(
        1.0, "deviation of the noise on the number of unclipped changes, for privacy.adaptive"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = field(1e-5, "δ at which ε is reported")


class RuntimeTable(Table):
    engine: Literal["auto", "eager", "compiled"] = field("auto", "engine that trains the clients")
    workers: Count | None = field(None, "number of clients trained at once; by default the number of cores")
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?|mps)$")] = field(
        "cpu", "device of the tensors: auto (a GPU if there is one), cpu, cuda, cuda:1 or mps"
    )
    checkpoint_every: Count = field(5, "rounds between two checkpoints")
    evaluate_every: Count = field(
        1, "rounds between two evaluations of the global model; the last round is always evaluated"
    )
    resume: Literal["same", "changed"] = field(
        "same",
        "changed allows --resume with another engine, torch or compiler, or a lower train.lr; the run records it",
    )


class FlowerTable(Table):
    min_sites: Count = field(2, "number of accepted uploads that a round needs; a smaller cohort needs all")
    max_failures: Whole | None = field(
        None, "if more sites fail in a round, the server asks them again; by default any number may fail"
    )
    attempts: Count = field(3, "maximum number of attempts per round; then the run stops")
    round_seconds: Positive = field(3600.0, "time limit of a round, in seconds")
    join_seconds: NotNegative = field(120.0, "time to wait for all sites at the start, in seconds")
    wait_seconds: NotNegative = field(600.0, "time to wait for min_sites, in seconds; then the run stops")
    max_norm: Positive | None = field(
        None, "refuse uploads in which the norm of any part (change, controls, ...) is larger"
    )
    norm_multiple: Annotated[float, Field(gt=1)] = field(
        5.0, "refuse uploads whose norm exceeds this multiple of the round's median; inf refuses none"
    )
    max_samples: Count = field(10**9, "refuse uploads that declare more samples")
    lost_memory: Literal["refuse", "restart"] = field(
        "refuse", "if a site has lost its private memory: refuse to continue, or restart with a new one"
    )
    input_shape: list[Count] | None = field(
        None, "shape of a sample, if data.name is 'sites' and the server has no test set"
    )
    classes: Count | None = field(None, "number of classes, if data.name is 'sites'")


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
            f"{config}: there is no such recipe or file; {nearest(str(config), known)} (see `fedpews list recipes`)"
        )
    return parse_toml(read_text(path, MOST_TOML), str(path))


def config_name(config: str) -> str:
    """The name of a recipe or a file in the names of folders and pages."""
    return Path(config).stem if config.endswith(".toml") else config.replace("/", "-")


def override(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested values with dotted keys set.

    Another method removes the file's options of the first one, and its kind of warmup.

    >>> override({"train": {"lr": 1.0}}, {"train.lr": 0.1, "rounds": 5})
    {'train': {'lr': 0.1}, 'rounds': 5}
    """
    result: dict[str, Any] = {
        key: dict(value) if isinstance(value, dict) else value for key, value in values.items()
    }
    if "method.name" in changes:
        names = result.get("method", {}).get("name", ""), str(changes["method.name"])
        if "method.object" in changes or len({name.lower().split("+")[0] for name in names}) > 1:
            result["method"] = {}
        result.get("warmup", {}).pop("kind", None)
    instead = EITHER | {other: key for key, other in EITHER.items()}
    for key, value in changes.items():
        *tables, last = key.split(".")
        inner = result
        for table in tables:
            inner = inner.setdefault(table, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key}: {table} is a single value, not a table")
        if key in instead:
            inner.pop(instead[key].rpartition(".")[2], None)
        inner[last] = value
    return result


def parse_setting(text: str) -> tuple[str, Any]:
    """``key=value`` from the command line; the value as TOML has it, or else as a plain string.

    >>> parse_setting("train.lr=0.1"), parse_setting("data.name=cifar-mnist")
    (('train.lr', 0.1), ('data.name', 'cifar-mnist'))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {text!r}: write key=value, for instance --set train.lr=0.1")
    if key.count(".") >= DEEPEST:
        raise ConfigError(f"--set {key[:60]!r}...: no key has so many parts")
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
    by_method: list[dict[str, Any]] = [{} for _ in names]
    for key, value in settings.items():
        part, dot, option = key.partition(".")
        if not dot or part not in parts:
            by_method = [changes | {key: value} for changes in by_method]
        elif not any(part in table for table in tables):
            raise ConfigError(
                f"--set {key}: {part} is not part of any method of this command ({', '.join(names)})"
            )
        else:
            for changes, table in zip(by_method, tables, strict=True):
                changes |= {f"{table[part]}.{option}": value} if part in table else {}
    return by_method


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys.

    >>> flatten({"train": {"lr": 0.1}, "rounds": 5})
    {'train.lr': 0.1, 'rounds': 5}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
