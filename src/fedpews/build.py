"""From an experiment to what runs it: data, network, method and engine."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedpews import compose, data, models
from fedpews.configs import override
from fedpews.data.federation import Federation, Samples, digest, from_clients
from fedpews.engines.choose import choose_engine
from fedpews.engines.engine import Engine, Schedule
from fedpews.errors import ConfigError, first_line
from fedpews.experiment import Experiment
from fedpews.methods.contract import Method
from fedpews.methods.options import option_types
from fedpews.methods.private import epsilon, with_dp
from fedpews.methods.robust import Aggregate
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.seeds import fold
from fedpews.server import Rules, cohort_size
from fedpews.trees import Tree

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

    @cached_property
    def data_hash(self) -> str:
        """A digest of all samples and of who holds which."""
        return digest(self.data)

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
            aggregate=Aggregate(train.aggregate, train.trim, train.byzantine),
        )


def build(
    experiment: Experiment,
    *,
    model: Model | None = None,
    clients: Sequence[Samples] | Federation | None = None,
    test: Samples | None = None,
    graph: NeuronGraph | None = None,
    data_dir: str | Path | None = None,
) -> Setup:
    """Everything an experiment needs; the arguments are those of `fedpews.run`."""
    if (clients is None) != (test is None) and not isinstance(clients, Federation):
        raise ConfigError("clients and test belong together: give both, or a data.name")
    held = load_data(experiment, clients, test, data_dir)
    net, starts = build_network(experiment, held, model, graph)
    return Setup(experiment, held, net, starts, build_method(experiment))


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
    test: Samples | None = None,
    data_dir: str | Path | None = None,
) -> Federation:
    """The data handed in, or else what the experiment names."""
    if isinstance(clients, Federation):
        held = clients
    elif clients is not None and test is not None:
        held = from_clients(clients, test)
    else:
        table = experiment.data.model_dump(exclude_none=True)
        held = data.load(table.pop("name"), data_dir=data_dir, **table)
    device = torch.device(experiment.runtime.device)
    return held if device.type == "cpu" else held.to(device)


def build_network(
    experiment: Experiment, held: Federation, model: Model | None = None, graph: NeuronGraph | None = None
) -> tuple[Network, dict[int, Tree]]:
    """The network, and each seed's start. torch's global generator is left as it was."""
    made = {}
    for seed in experiment.seeds:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(fold(seed, "model"))
            if isinstance(model, nn.Module):
                made[seed] = model
            elif model is not None:
                made[seed] = model()
            else:
                table = experiment.model
                made[seed] = models.build(table.name, held.x.shape[1:], held.classes, table.model_extra or {})
        made[seed] = made[seed].to(held.x.device)
    nets = {seed: Network(module, held.x[:1], graph=graph) for seed, module in made.items()}
    net = nets[experiment.seeds[0]]
    try:
        outputs = net.predict(net.initial(), held.x[:2]).shape
    except RuntimeError as error:
        shape = tuple(held.x.shape[1:])
        raise ConfigError(f"the model cannot take inputs of shape {shape}: {first_line(error)}") from error
    if len(outputs) != 2 or outputs[1] < held.classes:
        raise ConfigError(
            f"the data has labels 0 to {held.classes - 1} but the model's output has shape {tuple(outputs[1:])}; "
            f"give the model {held.classes} outputs"
        )
    return net, {seed: other.initial() for seed, other in nets.items()}


def build_method(experiment: Experiment) -> Method:
    """The method an experiment names, with its server optimiser and its warmup around it."""
    name, train = experiment.method_name, experiment.train
    rate = {} if train.server_lr is None else {"lr": train.server_lr}
    options = dict(experiment.method.model_extra or {})
    options |= {key: getattr(train, key) for key in ("momentum", "weight_decay") if getattr(train, key)}
    method = compose.method(name, warmup=_warmup(experiment), server=rate | experiment.server, **options)
    privacy = experiment.privacy.model_dump(exclude={"delta"})
    return method if privacy["clip"] is None else with_dp(method, **privacy)


def privacy_spent(experiment: Experiment, clients: int) -> dict[str, Any] | None:
    """What a run's privacy costs, known before it begins; None without differential privacy."""
    table = experiment.privacy
    if table.clip is None:
        return None
    cohort = cohort_size(clients, experiment.participation)
    spent = epsilon(table.noise, experiment.rounds, table.delta, clients, cohort, table.place)
    return {"epsilon": spent if math.isfinite(spent) else None, "delta": table.delta, "place": table.place}


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
    return Schedule(train.batch_size, train.epochs, train.steps)


def build_engine(setup: Setup) -> tuple[Engine, str]:
    """The engine that trains the clients on this machine, and why it was chosen."""
    experiment = setup.experiment
    return choose_engine(
        experiment.runtime.engine,
        setup.net,
        setup.data,
        schedule(experiment),
        experiment.runtime.workers or len(os.sched_getaffinity(0)),
        rounds=experiment.rounds,
        jobs=len(experiment.seeds) * cohort_size(len(setup.data), experiment.participation),
        phases=1 if experiment.warmup_kind == "none" else 2,
    )
