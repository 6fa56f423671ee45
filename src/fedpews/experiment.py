"""An experiment as data: every choice that decides its numbers, checked once, here.

Nothing is imported here that needs torch, so that `fedpews --help` is quick.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from fedpews.compose import Kind, MethodName
from fedpews.configs import fit_method, override, read_config
from fedpews.data.table import DataTable
from fedpews.errors import ConfigError, explain
from fedpews.options import Count, NotNegative, Positive, Table
from fedpews.tables import (
    FinetuneTable,
    FlowerTable,
    ModelTable,
    PretrainTable,
    PrivacyTable,
    RuntimeTable,
    StopTable,
    TaskTable,
)
from fedpews.tasks.class_names import check_list
from fedpews.tasks.names import FIRST, Goal, short


class TrainTable(Table):
    lr: Positive = Field(0.01, description="local learning rate")
    batch_size: Count = Field(32, description="samples of a local step")
    epochs: Annotated[int, Field(ge=1, le=100_000, strict=True)] | None = Field(
        None, description="passes over its data that a client makes in a round; 1 by default"
    )
    steps: Annotated[int, Field(ge=1, le=10_000_000, strict=True)] | None = Field(
        None, description="instead of epochs: local steps in a round"
    )
    optimizer: str = Field(
        "sgd",
        description="of the local steps: sgd, momentum, nesterov, adam, adamw, adagrad, rmsprop, yogi, or module:Class",
    )
    momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="of sgd, momentum and nesterov; the last two have 0.9 by default"
    )
    weight_decay: NotNegative = Field(0.0, description="of the local steps; adamw has 0.01 by default")
    clip_norm: Positive | None = Field(
        None, description="longer local gradients are scaled down to this length"
    )
    server_lr: Positive | None = Field(
        None, description="global learning rate; by default the server optimiser's own"
    )
    lr_milestones: list[Count] = Field(
        [], description="rounds after which the local learning rate is decayed"
    )
    lr_decay: Positive = Field(0.1, description="what it is multiplied by then")
    lr_schedule: Literal["constant", "cosine"] = Field(
        "constant", description="cosine: from lr down to lr_min over the rounds"
    )
    lr_min: NotNegative = Field(0.0, description="where a cosine schedule ends")
    lr_warmup: Annotated[int, Field(ge=0, strict=True)] = Field(
        0, description="rounds in which the local learning rate rises to lr"
    )
    weighting: Literal["uniform", "samples"] = Field(
        "uniform", description="a client's weight in the average"
    )
    aggregate: Literal["mean", "median", "trimmed", "krum", "clipped"] = Field(
        "mean", description="how uploads become one; all but mean stand a few bad clients"
    )
    trim: Annotated[float, Field(ge=0, lt=0.5)] = Field(
        0.2, description="of the trimmed mean: the part left out at each end"
    )
    byzantine: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        None, description="of krum: how many clients may be bad; by default as many as it stands"
    )

    diverged: Literal["stop", "leave-out"] = Field(
        "stop",
        description="a client whose numbers break down: stop with a checkpoint, or leave it out of that round",
    )

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("give train.epochs or train.steps, not both")
        if self.lr_min > self.lr:
            raise ValueError(f"train.lr_min is {self.lr_min:g}, more than train.lr {self.lr:g}")
        return self


class MethodTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # the method's own options, checked when it is made
    name: str = Field(
        "fedavg+pews", description="a method, + a server optimiser, + a warmup; see `fedpews list methods`"
    )
    object: str | None = Field(
        None, description="written by fedpews.run(method=OBJECT): what the method was, in Python"
    )


class WarmupTable(Table):
    kind: Kind | None = Field(None, description="by default what the method's name says")
    rounds: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        None, description="W, rounds of the warmup"
    )
    fraction: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="τ = W/T, instead of rounds"
    )
    diversity: NotNegative | None = Field(None, description="λ, how strongly clients' masks are pushed apart")
    mask_lr: Positive = Field(0.1, description="η_s, learning rate of the mask scores")
    shares: list[Positive] | None = Field(None, description="fixed masks: each client's part of every layer")
    upload: Literal["probabilities", "masks"] = Field(
        "probabilities",
        description="learned masks: what a client uploads of θ, all of it or only the mask drawn",
    )
    gradient: Literal["theta", "open", "gate"] = Field(
        "theta",
        description="of a score: the gate's gradient times θ, only of neurons open in the draw, or the gate's itself",
    )
    start: Annotated[float, Field(allow_inf_nan=False)] = Field(
        0.0, description="mean of the mask scores before a client's first round; θ is their sigmoid"
    )
    start_spread: NotNegative = Field(1.0, description="their standard deviation; 0 starts all neurons alike")
    start_common: bool = Field(False, description="one random start for all clients, not one for each")
    newcomer: Literal["mean", "start"] = Field(
        "mean",
        description="θ of a client that has not uploaded yet: σ of the start's mean, or of its own start",
    )
    upload_mask: Literal["drawn", "thresholded"] = Field(
        "thresholded",
        description="neurons that a client uploads: those with θ of a half or more, or drawn once more",
    )
    draw: Literal["step", "round"] = Field("step", description="when learned masks are drawn")
    density: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None,
        description="random masks: the part of every layer a client draws; by default layers are dealt out",
    )
    redraw: bool = Field(False, description="random masks: draw anew in every round")
    evaluate: Literal["owned", "all"] = Field(
        "owned",
        description="in the warmup, evaluate the global model with what a client owned in that round, or all of it",
    )
    unowned: Literal["keep", "zero"] = Field(
        "keep", description="in the warmup, weights that no client owns: keep them, or move them to zero"
    )
    agree_at: Annotated[float, Field(ge=-1, le=1)] = Field(
        0.1, description="auto: no warmup if the first updates have this mean cosine or a higher one"
    )
    flat_at: Annotated[float, Field(gt=0, le=1)] = Field(
        0.2,
        description="auto: the warmup ends when the loss falls by less than this part of its steepest fall",
    )
    learnt_at: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="auto: the part of its first value that the loss must have lost before the end"
    )

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.rounds is not None and self.fraction is not None:
            raise ValueError("give warmup.rounds or warmup.fraction, not both")
        return self


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
        metric = self.target_metric or (named[0] if named else FIRST.get(self.task.name, "accuracy"))
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

        Where the changes name another method, what the file sets for its own method and this one has no use for is
        left out, and said.
        """
        changes = overrides or {}
        values = override(read_config(config), changes)
        return cls(**(fit_method(values, changes, config) if "method.name" in changes else values))


def known_keys() -> dict[str, str]:
    """Every key of a configuration with its description."""
    keys: dict[str, str] = {}
    for name, field in Experiment.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        if inner is None:
            keys[name] = field.description or ""
        else:
            keys |= {f"{name}.{key}": value.description or "" for key, value in inner.items()}
    return keys
