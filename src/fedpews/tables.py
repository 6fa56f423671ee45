"""The tables of a configuration for the task, the model and what is around the rounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedpews.options import Count, NotNegative, Positive, Table


class TaskTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # the task's own options, checked when it is made
    name: str = Field(
        "classification", description="a task by name, or module:Task; see `fedpews list tasks`"
    )
    metrics: list[str] = Field(
        [], description="what to measure, the one that counts first; by default the task's own first"
    )


class ModelTable(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")  # the model's own options, checked when it is built
    name: str = Field("mlp", description="a model by name, or module:Class; see `fedpews list models`")
    start: str | None = Field(
        None,
        description="a safetensors file with the weights to start from; {seed} in it stands for the seed",
    )


class StopTable(Table):
    patience: Count | None = Field(
        None, description="end a seed after so many rounds without improvement; warmup rounds do not count"
    )
    min_delta: NotNegative = Field(0.0, description="what counts as an improvement")
    on: Literal["validation", "test"] = Field("validation", description="the data that choose")
    best: bool = Field(False, description="keep the best model too; with patience it is kept anyway")


class PretrainTable(Table):
    data: str | None = Field(
        None, description="public data by name: the server trains the model on it before round 1"
    )
    train_per_class: Count | None = Field(None, description="take so many samples of each of its classes")
    seed: int = Field(0, description="of the draw of these")
    epochs: Count = Field(10, description="passes over them")
    lr: Positive | None = Field(None, description="for that; by default the first round's")


class FinetuneTable(Table):
    epochs: Count | None = Field(
        None, description="after the last round every client trains the global model so long on its own data"
    )
    lr: Positive | None = Field(None, description="for that; by default the last round's")


class PrivacyTable(Table):
    clip: Positive | None = Field(
        None, description="C, the longest change a client may send; turns differential privacy on"
    )
    noise: NotNegative = Field(
        1.0, description="z, the noise multiplier: deviation z·C on the sum of the changes"
    )
    place: Literal["server", "client"] = Field("server", description="where noise is added: central or local")
    adaptive: bool = Field(False, description="let C follow a quantile of the clients' lengths")
    quantile: Annotated[float, Field(gt=0, lt=1)] = Field(0.5, description="which quantile")
    clip_lr: Positive = Field(0.2, description="how fast C follows")
    bit_noise: Positive = Field(1.0, description="deviation of the noise on how many changes were not cut")
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(1e-5, description="δ at which ε is reported")


class RuntimeTable(Table):
    engine: Literal["auto", "eager", "compiled"] = Field("auto", description="who trains the clients")
    workers: Count | None = Field(
        None, description="clients trained at once; by default as many as there are cores"
    )
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,2})?|mps)$")] = Field(
        "cpu", description="where tensors live: auto (a GPU if there is one), cpu, cuda, cuda:1 or mps"
    )
    checkpoint_every: Count = Field(5, description="rounds between two checkpoints")
    evaluate_every: Count = Field(
        1, description="rounds between two evaluations of the global model; the last round always has one"
    )
    resume: Literal["same", "changed"] = Field(
        "same",
        description="changed: go on with another engine, torch or compiler, or a lower train.lr; the record says so",
    )


class FlowerTable(Table):
    min_sites: Count = Field(2, description="good uploads that a round needs; a smaller cohort needs all")
    max_failures: Annotated[int, Field(ge=0, strict=True)] | None = Field(
        None,
        description="more failed sites than this in a round, and they are asked again; by default any number",
    )
    attempts: Count = Field(3, description="how often a round is tried before the run stops")
    round_seconds: Positive = Field(3600.0, description="time limit of a round")
    join_seconds: NotNegative = Field(120.0, description="at the start, how long to wait for all sites")
    wait_seconds: NotNegative = Field(
        600.0, description="how long to wait for min_sites before the run stops"
    )
    max_norm: Positive | None = Field(
        None, description="refuse an upload of which any part (change, controls, ...) is larger than this"
    )
    norm_multiple: Annotated[float, Field(gt=1)] = Field(
        5.0, description="refuse an upload larger than so many medians of its round; inf refuses none"
    )
    max_samples: Count = Field(10**9, description="refuse an upload that claims more samples")
    lost_memory: Literal["refuse", "restart"] = Field(
        "refuse", description="what a site does that lost its private memory"
    )
    input_shape: list[Count] | None = Field(
        None, description="of one sample, when data.name is 'sites' and the server has no test set"
    )
    classes: Count | None = Field(None, description="how many, when data.name is 'sites'")
