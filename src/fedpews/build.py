"""From an experiment to what runs it: data, network, method and engine."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedpews import compose, data, models
from fedpews.config import override
from fedpews.data.federation import Federation, digest, number_classes
from fedpews.data.inputs import take
from fedpews.data.loading import hold_out_and_scale, load_table
from fedpews.data.samples import Samples, from_clients
from fedpews.data.table import FEDERATED
from fedpews.engines.augment import make_augment
from fedpews.engines.choose import choose_engine
from fedpews.engines.engine import Engine, Schedule
from fedpews.engines.hardware import available_cores, find_device
from fedpews.errors import ConfigError, first_line, nearest
from fedpews.experiment import Experiment
from fedpews.methods.contract import Method, Wrapper
from fedpews.methods.private import Private, epsilon
from fedpews.methods.robust import Aggregate
from fedpews.models.adapters import add_lora, freeze, matching
from fedpews.neurons.functional import CHECKPOINTING
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.modules import batch_counters, prepared
from fedpews.neurons.network import Network
from fedpews.neurons.structure import Structure, structure
from fedpews.options import option_types
from fedpews.results.schema import GIVEN
from fedpews.results.tensors import read_tensors
from fedpews.seeds import fold, global_generator
from fedpews.server import Rules, cohort_size
from fedpews.tasks import Classification, Task, make
from fedpews.tasks.names import TASKS, short
from fedpews.torch_private import tree_leaves
from fedpews.trees import Tree
from fedpews.warmup.ranks import Ranks

RECORDED = ("loss", "train_loss")
"""What every record has, whatever the metrics."""

_STILL_USED = ("classes", "seed", "validation", "augment", "lazy")
"""Keys of ``[data]`` that matter for clients that are given, too."""

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
    """What the server pretrains on, as one client's."""

    @cached_property
    def data_hash(self) -> str:
        """A digest of all samples and of who holds which."""
        return digest(self.data)

    @cached_property
    def structure(self) -> Structure:
        """What the model is, apart from its weights."""
        return structure(self.net)

    @property
    def rules(self) -> Rules:
        """What holds in every round."""
        train = self.experiment.train
        return Rules(
            self.experiment.participation,
            train.weighting,
            train.lr,
            tuple(train.lr_milestones),
            train.lr_decay,
            train.lr_warmup,
            train.lr_schedule,
            train.lr_min,
            train.diverged,
            Aggregate(train.aggregate, train.trim, train.byzantine),
            self.experiment.runtime.evaluate_every,
            self.experiment.rounds,
        )


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
        raise ConfigError("clients and test belong together: give both, or a data.name")
    held = load_data(experiment, clients, test, data_dir, task)
    net, starts = build_network(experiment, held, model, graph)
    public = load_public(experiment, held, data_dir)
    if method is None:
        method = build_method(experiment)
    else:
        _check_unused(experiment)
    return Setup(experiment, held, net, starts, method, public)


def resolve(experiment: Experiment | str | Path | None, settings: Mapping[str, Any]) -> Experiment:
    """An experiment, a recipe's name or a file, with settings such as ``rounds=5`` or ``train={"lr": 0.1}``."""
    changes: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            changes |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            changes["method.name" if key == "method" else key] = value
    if isinstance(experiment, Experiment):
        return Experiment(**override(experiment.to_dict(), changes)) if changes else experiment
    return Experiment(**override({}, changes)) if experiment is None else Experiment.load(experiment, changes)


def load_data(
    experiment: Experiment,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | Sequence[Samples] | None = None,
    data_dir: str | Path | None = None,
    task: Task | None = None,
) -> Federation:
    """The data handed in, or else what the experiment names."""
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
            raise ConfigError(f"the data was made for {clients.task.name}, the experiment is for {task.name}")
        if table.classes:
            federation = number_classes(federation, table.classes)
        federation = hold_out_and_scale(federation, table)
    device = find_device(experiment.runtime.device)
    return federation if device.type == "cpu" else federation.to(device)


def load_public(
    experiment: Experiment, held: Federation, data_dir: str | Path | None = None
) -> Federation | None:
    """The data that ``pretrain.data`` names, which must be of the clients' kind."""
    table = experiment.pretrain
    if table.data is None:
        return None
    if experiment.data.scaling == FEDERATED:
        raise ConfigError("pretrain.data cannot be scaled by the clients' statistics: leave data.scaling out")
    found = data.load(
        table.data,
        data_dir=data_dir,
        task=held.task,
        partition="iid",
        clients=1,
        pool=":" in table.data,
        seed=table.seed,
        train_per_class=table.train_per_class,
        scaling=experiment.data.scaling,
    )
    if (found.shape, found.classes) != (held.shape, held.classes):
        raise ConfigError(
            f"pretrain.data: {table.data} has inputs of shape {found.shape} and {found.classes} classes, the clients' "
            f"data {held.shape} and {held.classes}"
        )
    return found.to(held.device)


def build_network(
    experiment: Experiment, held: Federation, model: Model | None = None, graph: NeuronGraph | None = None
) -> tuple[Network, dict[int, Tree]]:
    """The network, and each seed's start. torch's global generator is left as it was."""
    check_given(experiment, model, held)
    made = {}
    # before seeding: to read a sample may run code that draws numbers itself
    shape, example = held.shape, take(held.x, slice(0, 1))
    for seed in experiment.seeds:
        with global_generator(fold(seed, "model")):
            if isinstance(model, nn.Module):
                made[seed] = model
            elif model is not None:
                made[seed] = model()
            else:
                table = experiment.model
                made[seed] = models.build(table.name, shape, held.classes, table.model_extra or {})
        made[seed] = _prepared(made[seed].to(held.device), experiment, seed, example)
    task = held.task
    label = next((y[:1] for y in (held.y, held.test_y) if len(y)), None)
    net = Network.of_seeds(
        made, example, sample_loss=task.sample_loss, sample_weight=task.weigh, label=label, graph=graph
    )
    try:
        with torch.no_grad():
            outputs = net.predict(net.initial(), take(held.x, slice(0, 2)))
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
    wrong = task.misfit(tuple(outputs.shape[1:]), tuple(held.y.shape[1:]), held.classes)
    if wrong:
        raise ConfigError(wrong)
    _try_loss(task, outputs, held)
    return net, {seed: net.at(seed).initial() for seed in made}


def _prepared(module: nn.Module, experiment: Experiment, seed: int, example: Any) -> nn.Module:
    """A seed's module with the weights that it starts from, its adapters and its frozen parts."""
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


def read_start(place: str, seed: int, like: Tree) -> Tree:
    """The weights in a file, which must be all of the model's and fit it."""
    path = Path(place.replace("{seed}", str(seed)))
    try:
        found = read_tensors(path, follow=True)
    except ConfigError as error:
        raise ConfigError(f"model.start: {error}") from error
    for name, value in like.items():
        if name not in found:
            raise ConfigError(f"model.start: {path} has no {name}; {nearest(name, found)}")
        if found[name].shape != value.shape:
            raise ConfigError(
                f"model.start: {name} has shape {tuple(found[name].shape)} in {path} and {tuple(value.shape)} here"
            )
    return {name: found[name].to(value) for name, value in like.items()}


def _check_unused(experiment: Experiment) -> None:
    """Refuse options of a method beside a method that is an object already: they would be ignored."""
    changed = experiment.model_dump(exclude_defaults=True)
    changed |= {f"train.{key}": value for key, value in changed.get("train", {}).items()}
    unused = [key for key in compose.METHOD_KEYS if key in changed]
    unused += [f"method.{key}" for key in experiment.method.model_extra or {}]
    if unused:
        raise ConfigError(f"a method's object has its options itself; {', '.join(unused)} would be ignored")


def build_task(experiment: Experiment, given: str | Task | None = None, loss: Any = None) -> Task:
    """The task an experiment names, or the one given."""
    table = experiment.task
    name = table.name if given is None else given
    options = None if isinstance(name, Task) else table.model_extra
    made = make(name, metrics=table.metrics, loss=loss, options=options)
    target = experiment.target_metric
    if target is None or target in (*map(short, made.metrics), *RECORDED):
        return made
    # what has a target is measured, also where it is not listed
    return make(made, metrics=(*made.metrics, target))


def settings_of(
    task: str | Task | Mapping[str, Any] | None, metrics: Sequence[str], clients: Any
) -> tuple[dict[str, Any], Task | None]:
    """What a configuration says of a task in any of the forms users give it, and the task if it is an object."""
    if task is None and isinstance(clients, Federation) and clients.task != Classification():
        task = clients.task
    if task is None:
        table: dict[str, Any] = {}
    elif isinstance(task, Task):
        table = task_settings(task)
    else:
        table = {"name": task} if isinstance(task, str) else dict(task)
    if metrics:
        table["metrics"] = list(metrics)
    return ({"task": table} if table else {}), task if isinstance(task, Task) else None


def task_settings(task: Task) -> dict[str, Any]:
    """What a configuration says of a task that was handed in as an object."""
    cls = type(task)
    name = task.name if task.name in TASKS else f"{cls.__module__}:{cls.__qualname__}"
    options = {
        entry.name: value
        for entry in fields(task)
        if entry.name not in ("metrics", "criterion") and (value := getattr(task, entry.name)) is not None
    }
    return {"name": name, "metrics": list(task.metrics), **options}


def _try_loss(task: Task, outputs: torch.Tensor, held: Federation) -> None:
    """Try a user's own loss before the first round, to see that it returns what is needed."""
    labels = held.y[: len(outputs)]
    if task.criterion is None or not len(labels):
        return
    try:
        found = task.sample_loss(outputs, labels)
    except Exception as error:
        shapes = f"{tuple(outputs.shape)} and {tuple(labels.shape)}"
        raise ConfigError(
            f"the loss fails on outputs and labels of shape {shapes}: {first_line(error)}"
        ) from error
    if not isinstance(found, torch.Tensor) or found.shape != labels.shape[:1]:
        raise ConfigError("the loss must return one number per sample, or their mean")


def build_method(experiment: Experiment) -> Method:
    """The method an experiment names, with its optimisers and its warmup around it."""
    if experiment.method.object is not None:
        raise ConfigError(
            f"this experiment's method was made in Python: {experiment.method.object}. Pass it to "
            "fedpews.run(method=…), or name it as module:Class."
        )
    name, train = experiment.method_name, experiment.train
    rate = {} if train.server_lr is None else {"lr": train.server_lr}
    options = dict(experiment.method.model_extra or {})
    local: dict[str, Any] = dict(experiment.optimizer)
    given = {
        key: getattr(train, key) for key in ("momentum", "weight_decay", "clip_norm") if getattr(train, key)
    }
    if train.optimizer != "sgd":
        local["name"] = train.optimizer
        if "momentum" in given:
            local["momentum"] = given.pop("momentum")
    method = compose.method(
        name,
        warmup=_warmup(experiment),
        server=rate | experiment.server,
        optimizer=local,
        **options,
        **given,
    )
    lora = experiment.model.lora
    if lora is not None and lora.ranks is not None:
        if experiment.privacy.clip is not None:
            raise ConfigError(
                "model.lora.ranks does not go with privacy.clip; give all clients the same rank"
            )
        method = Ranks(method, tuple(lora.ranks), lora.padding)
    privacy = experiment.privacy.model_dump(exclude={"delta"})
    return method if privacy["clip"] is None else Private(method, **privacy)


def _warmup(experiment: Experiment) -> dict[str, Any]:
    """The settings that this kind of warmup reads; a recipe may hold those of other kinds beside them."""
    if experiment.warmup_kind == "none":
        return {}
    read = option_types(compose.masks_class(experiment.warmup_kind))
    given = experiment.warmup.model_dump(exclude_none=True)
    return {key: value for key, value in given.items() if key in read} | {"rounds": experiment.warmup_rounds}


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
        jobs=len(experiment.seeds) * cohort_size(len(setup.data), experiment.participation),
        warmup_rounds=0 if experiment.warmup_kind == "none" else experiment.warmup_rounds,
    )


def privacy_spent(setup: Setup) -> dict[str, Any] | None:
    """The ε and δ of a run, known before it begins; None without differential privacy."""
    table, clients = setup.experiment.privacy, len(setup.data)
    if table.clip is None:
        return None
    cohort = max(1, math.floor(setup.experiment.participation * clients + 0.5))
    spent = epsilon(table.noise, setup.experiment.rounds, table.delta, clients, cohort, table.place)
    return {"epsilon": spent if math.isfinite(spent) else None, "delta": table.delta, "place": table.place}


def record_given(experiment: Experiment, model: Any, clients: Any) -> Experiment:
    """The experiment, saying that its model or its data were given in Python."""
    values = experiment.to_dict()
    if clients is not None:
        table = {key: value for key, value in values["data"].items() if key in _STILL_USED}
        values["data"] = {"name": GIVEN} | table
    if model is not None:
        start = {key: value for key, value in values["model"].items() if key in ("start", "fresh", "lora")}
        code = _code(model)
        values["model"] = {"name": GIVEN} | start | ({"code": code} if code else {})
    return experiment if model is None and clients is None else Experiment(**values)


def check_given(experiment: Experiment, model: Any, clients: Any) -> None:
    """Refuse an experiment whose model or data must be given in Python, and are not."""
    missing = {}
    if model is None and experiment.model.name == GIVEN:
        code = (experiment.model.model_extra or {}).get("code")
        missing["model=…"] = f"model ({code})" if code else "model"
    if clients is None and experiment.data.name == GIVEN:
        missing["clients=…, test=…"] = "data"
    if missing:
        raise ConfigError(
            f"this experiment's {' and '.join(missing.values())} {'were' if len(missing) > 1 else 'was'} given in "
            f"Python: run it there, with fedpews.run(CONFIG, {', '.join(missing)})"
        )


def _code(model: Any) -> str:
    """The name, file and line of a model's definition; empty if unknown."""
    source = type(model) if isinstance(model, nn.Module) else model
    while isinstance(source, partial):
        source = source.func
    try:
        file, line = inspect.getsourcefile(source), inspect.getsourcelines(source)[1]
    except (TypeError, OSError):
        return ""
    if file is None or source.__module__.startswith("torch."):
        return ""
    path, here = Path(file), Path.cwd()
    return f"{source.__qualname__}, {path.relative_to(here) if path.is_relative_to(here) else path}:{line}"


def describe_object(method: Method) -> dict[str, str]:
    """A method's object as a configuration's table: enough to tell it from another, not to make it again.

    >>> from fedpews.methods.fedprox import FedProx
    >>> describe_object(FedProx(mu=0.5))["name"]
    'FedProx'
    """
    text = repr(method)
    if " object at 0x" in text:
        raise ConfigError(
            f"{type(method).__name__} does not say its options in its repr, so a run could not tell it from another; "
            "make it a frozen dataclass"
        )
    names = [type(method).__name__]
    while isinstance(method, Wrapper):
        method = method.inner
        names.append(type(method).__name__)
    return {"name": "+".join(reversed(names)), "object": text}
