"""From an experiment to what runs it: data, network, method and engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedpews import compose, data, models
from fedpews.config import flatten
from fedpews.data.federation import Federation, digest, from_clients, number_classes
from fedpews.data.inputs import Samples, take
from fedpews.data.loading import hold_out_and_scale, load_table
from fedpews.data.table import FEDERATED
from fedpews.engines.augment import make_augment
from fedpews.engines.choose import choose_engine
from fedpews.engines.engine import Engine, Schedule
from fedpews.engines.hardware import available_cores, find_device
from fedpews.errors import ConfigError, first_line, nearest
from fedpews.experiment import Experiment
from fedpews.given import check_given
from fedpews.methods.contract import Method
from fedpews.methods.private import Private, epsilon
from fedpews.models.adapters import add_lora, freeze, matching
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.modules import CHECKPOINTING, batch_counters, prepared
from fedpews.neurons.network import Network
from fedpews.neurons.structure import Structure, structure
from fedpews.options import option_types
from fedpews.results.files import read_tensors
from fedpews.results.schema import GIVEN
from fedpews.seeds import fold, global_generator
from fedpews.tasks import Task, make
from fedpews.tasks.names import short
from fedpews.torch_private import tree_leaves
from fedpews.trees import Tree
from fedpews.warmup.ranks import Ranks

Model = nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True)
class Setup:
    """An experiment with everything it needs, ready to run."""

    experiment: Experiment
    data: Federation
    net: Network
    starts: Mapping[int, Tree]
    """The global model of each seed before round 1."""
    method: Method
    public: Federation | None = None
    """The data that the server pretrains on, as one client's."""

    @cached_property
    def data_hash(self) -> str:
        """A digest of all samples and of the client of each."""
        return digest(self.data)

    @cached_property
    def structure(self) -> Structure:
        """What the model is, apart from its weights."""
        return structure(self.net)


def build(
    experiment: Experiment,
    *,
    model: Model | None = None,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | Sequence[Samples] | None = None,
    graph: NeuronGraph | None = None,
    data_dir: str | Path | None = None,
    method: Method | None = None,
    task: Task | None = None,
) -> Setup:
    """Everything an experiment needs; the arguments are those of `fedpews.run`."""
    check_given(experiment, model, clients)
    if clients is None and test is not None:
        raise ConfigError("clients and test must be given together, or neither with data.name")
    federation = load_data(experiment, clients, test, data_dir, task)
    net, starts = build_network(experiment, federation, model, graph)
    public = load_public(experiment, federation, data_dir)
    if method is None:
        method = build_method(experiment)
    else:
        keys = flatten(experiment.model_dump(exclude_defaults=True))
        allowed = ("method.name", "method.object")
        unused = [
            key for key in keys if key.startswith((*compose.METHOD_KEYS, "method.")) and key not in allowed
        ]
        if unused:
            raise ConfigError(
                f"a method object already has its options; {', '.join(unused)} would be ignored"
            )
    return Setup(experiment, federation, net, starts, method, public)


def load_data(
    experiment: Experiment,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | Sequence[Samples] | None = None,
    data_dir: str | Path | None = None,
    task: Task | None = None,
) -> Federation:
    """The data given, or else what the experiment names."""
    check_given(experiment, GIVEN, clients)
    task, table = build_task(experiment) if task is None else task, experiment.data
    if clients is None:
        federation = load_table(table, data_dir, task)
    else:
        if not isinstance(clients, Federation):
            federation = from_clients(clients, test, task=task, lazy=table.lazy)
        elif type(task) is type(clients.task):
            federation = replace(clients, task=task)
        else:
            raise ConfigError(
                f"the data are for the task {clients.task.name}, but the experiment has the task {task.name}"
            )
        if table.classes:
            federation = number_classes(federation, table.classes)
        federation = hold_out_and_scale(federation, table)
    device = find_device(experiment.runtime.device)
    return federation if device.type == "cpu" else federation.to(device)


def load_public(
    experiment: Experiment, federation: Federation, data_dir: str | Path | None = None
) -> Federation | None:
    """The data that ``pretrain.data`` names, which must be of the clients' kind."""
    table = experiment.pretrain
    if table.data is None:
        return None
    if experiment.data.scaling == FEDERATED:
        raise ConfigError("pretrain.data cannot be scaled by the clients' statistics: leave data.scaling out")
    public = data.load(
        table.data,
        data_dir=data_dir,
        task=federation.task,
        partition="iid",
        clients=1,
        pool=":" in table.data,
        seed=table.seed,
        train_per_class=table.train_per_class,
        scaling=experiment.data.scaling,
    )
    if (public.shape, public.classes) != (federation.shape, federation.classes):
        raise ConfigError(
            f"pretrain.data: {table.data} has inputs of shape {public.shape} and {public.classes} classes, the "
            f"clients' data {federation.shape} and {federation.classes}"
        )
    return public.to(federation.device)


def build_network(
    experiment: Experiment,
    federation: Federation,
    model: Model | None = None,
    graph: NeuronGraph | None = None,
) -> tuple[Network, dict[int, Tree]]:
    """The network, and each seed's start. torch's global generator is left as it was."""
    check_given(experiment, model, federation)
    modules = {}
    # before seeding: reading a sample may run code that draws numbers itself
    shape, example = federation.shape, take(federation.x, slice(0, 1))
    for seed in experiment.seeds:
        with global_generator(fold(seed, "model")):
            if isinstance(model, nn.Module):
                module = model
            elif model is not None:
                module = model()
            else:
                table = experiment.model
                module = models.build(table.name, shape, federation.classes, table.model_extra or {})
        modules[seed] = _prepared(module.to(federation.device), experiment, seed, example)
    task = federation.task
    label = next((y[:1] for y in (federation.y, federation.test_y) if len(y)), None)
    net = Network.of_seeds(
        modules,
        example,
        sample_loss=task.sample_loss,
        sample_weight=task.weigh,
        label=label,
        graph=graph,
        precision=experiment.train.precision,
    )
    try:
        with torch.no_grad():
            outputs = net.predict(net.initial(), take(federation.x, slice(0, 2)))
    except (RuntimeError, TypeError, ValueError) as error:
        whole = any(leaf.dtype == torch.int64 for leaf in tree_leaves(example))
        hint = "; inputs are whole numbers: make them floating point if they are quantities" if whole else ""
        if "same dtype" in str(error):
            hint += "; inputs are float32: give model.float(), or cast them in forward"
        raise ConfigError(
            f"the model cannot take inputs of shape {shape}: {first_line(error)}{hint}"
        ) from error
    try:
        net.try_step(net.initial(), net.two_samples())
    except (RuntimeError, ValueError) as error:
        reason = CHECKPOINTING if "checkpoint" in str(error) else first_line(error)
        raise ConfigError(f"the model cannot be trained: {reason}") from error
    wrong = task.misfit(tuple(outputs.shape[1:]), tuple(federation.y.shape[1:]), federation.classes)
    if wrong:
        raise ConfigError(wrong)
    if task.criterion is not None and len(federation.y):
        _try_loss(task, outputs, federation.y[: len(outputs)])
    return net, {seed: net.at(seed).initial() for seed in modules}


def _prepared(module: nn.Module, experiment: Experiment, seed: int, example: Any) -> nn.Module:
    """A seed's module with the weights that it starts from, its adapters and its frozen parameters."""
    table, frozen = experiment.model, experiment.train.freeze
    if table.start is None and table.lora is None and not frozen:
        return module
    module = prepared(module, example)
    if table.start is not None:
        values = dict(module.named_parameters()) | dict(module.named_buffers())
        fresh, counted = matching(values, table.fresh, "model.fresh"), batch_counters(module)
        wanted = {
            name: value.detach()
            for name, value in values.items()
            if name not in fresh and (value.is_floating_point() or name in counted)
        }
        with torch.no_grad():
            for name, value in read_start(table.start, seed, wanted).items():
                values[name].copy_(value)
    if table.lora is not None:
        try:
            head = Network(module, example).classifier
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError(f"the model cannot take the data's inputs: {first_line(error)}") from error
        with global_generator(fold(seed, "adapters")):
            add_lora(module, table.lora, head)
    if frozen:
        freeze(module, frozen)
    return module.to(tree_leaves(example)[0].device)


def read_start(file: str, seed: int, like: Tree) -> Tree:
    """The weights in a file, which must be all of the model's and fit it."""
    path = Path(file.replace("{seed}", str(seed)))
    try:
        weights = read_tensors(path, follow=True)
    except ConfigError as error:
        raise ConfigError(f"model.start: {error}") from error
    for name, value in like.items():
        if name not in weights:
            raise ConfigError(f"model.start: {path} has no {name}; {nearest(name, weights)}")
        if weights[name].shape != value.shape:
            raise ConfigError(
                f"model.start: {name} has shape {tuple(weights[name].shape)} in {path} and {tuple(value.shape)} here"
            )
    return {name: weights[name].to(value) for name, value in like.items()}


def _try_loss(task: Task, outputs: torch.Tensor, labels: torch.Tensor) -> None:
    """Try a user's own loss before the first round, to see that it returns what is needed."""
    try:
        losses: Any = task.sample_loss(outputs, labels)
    except Exception as error:
        shapes = f"{tuple(outputs.shape)} and {tuple(labels.shape)}"
        raise ConfigError(
            f"the loss fails on outputs and labels of shape {shapes}: {first_line(error)}"
        ) from error
    if not isinstance(losses, torch.Tensor) or losses.shape != labels.shape[:1]:
        raise ConfigError("the loss must return one number per sample, or their mean")


def build_task(experiment: Experiment, given: Task | None = None, loss: Any = None) -> Task:
    """The task an experiment names, or the one given."""
    table, target = experiment.task, experiment.target_metric
    task = make(
        table.name if given is None else given, metrics=table.metrics, loss=loss, options=table.model_extra
    )
    # what has a target is measured, also where it is not listed
    if target is None or target in (*map(short, task.metrics), "loss", "train_loss"):
        return task
    return make(task, metrics=(*task.metrics, target))


def build_method(experiment: Experiment) -> Method:
    """The method an experiment names, with its optimisers and its warmup around it."""
    if experiment.method.object is not None:
        raise ConfigError(
            f"this experiment's method was made in Python: {experiment.method.object}. Pass it to "
            "fedpews.run(method=…), or name it as module:Class."
        )
    name, train, lora = experiment.method_name, experiment.train, experiment.model.lora
    options = {key: getattr(train, key) for key in compose.TRAIN_KEYS if getattr(train, key)}
    local: dict[str, Any] = dict(experiment.optimizer)
    if train.optimizer != "sgd":
        local["name"] = train.optimizer
        local |= {"momentum": options.pop("momentum")} if "momentum" in options else {}
    warmup: dict[str, Any] = {}
    if name.warmup != "none":
        # a recipe may have the settings of other kinds of warmup beside those of this one
        read, settings = option_types(compose.find_class("masks", name.warmup)), experiment.warmup
        warmup = settings.model_dump(exclude_none=True, include=set(read)) | {
            "rounds": experiment.warmup_rounds
        }
    method = compose.method(
        name,
        warmup=warmup,
        server=({} if train.server_lr is None else {"lr": train.server_lr}) | experiment.server,
        optimizer=local,
        **(experiment.method.model_extra or {}),
        **options,
    )
    privacy = experiment.privacy.model_dump(exclude={"delta"})
    if lora is not None and lora.ranks is not None:
        if privacy["clip"] is not None:
            raise ConfigError(
                "model.lora.ranks and privacy.clip cannot be combined; give all clients the same rank"
            )
        method = Ranks(method, tuple(lora.ranks), lora.padding)
    return method if privacy["clip"] is None else Private(method, **privacy)


def schedule(experiment: Experiment) -> Schedule:
    """How every client trains in a round."""
    train = experiment.train
    return Schedule(train.batch_size, train.epochs, train.steps, make_augment(experiment.data.augment))


def build_engine(setup: Setup) -> tuple[Engine, str]:
    """The engine that trains the clients on this machine, and why it was chosen."""
    experiment = setup.experiment
    return choose_engine(
        experiment.runtime.engine,
        setup.net,
        setup.data,
        schedule(experiment),
        experiment.runtime.workers or available_cores(),
        rounds=experiment.rounds,
        jobs=len(experiment.seeds) * experiment.cohort_size(len(setup.data)),
        warmup_rounds=experiment.warmup_rounds,
    )


def privacy_spent(setup: Setup) -> dict[str, Any] | None:
    """The ε and δ of a run, known before it begins; None without differential privacy."""
    experiment, table, clients = setup.experiment, setup.experiment.privacy, len(setup.data)
    if table.clip is None:
        return None
    cohort = experiment.cohort_size(clients)
    spent = epsilon(table.noise, experiment.rounds, table.delta, clients, cohort, table.place)
    return {"epsilon": spent if math.isfinite(spent) else None, "delta": table.delta, "place": table.place}
