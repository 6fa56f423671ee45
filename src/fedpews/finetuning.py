"""After the last round: every client trains the global model on, for itself alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from fedpews.build import Setup, schedule
from fedpews.engines.choose import choose_engine
from fedpews.engines.engine import Job, Schedule
from fedpews.errors import ConfigError
from fedpews.methods.contract import Download
from fedpews.methods.ditto import own_solver
from fedpews.trees import Tree

Models = dict[int, dict[int, Tree]]
"""By seed and client."""


def check_finetuning(setup: Setup) -> None:
    """Refuse fine-tuning that cannot be done, before the first round."""
    if setup.experiment.finetune.epochs is None:
        return
    if not len(setup.data.y):
        raise ConfigError(
            "finetune: the clients' data are at their sites, and this process has none to train on"
        )
    if setup.data.task.classes_of(setup.data.y) is None:
        raise ConfigError(
            f"finetune is evaluated by accuracy, so it is for classification, not {setup.data.task.name}"
        )
    if setup.method.personalised:
        raise ConfigError(
            f"finetune starts from the global model; {setup.experiment.method_label} has personal models already"
        )


def fine_tune(setup: Setup, models: Mapping[int, Tree]) -> tuple[Models, dict[str, Any]]:
    """Each client's model after so many epochs from the global one, and how good they are, each on its own classes.

    Clients use the method's optimiser without the method's own terms.
    """
    experiment = setup.experiment
    table, last = experiment.finetune, experiment.rounds
    lr = setup.rules.lr_at(last) if table.lr is None else table.lr
    half, clients = own_solver(setup.method, 0.0), range(len(setup.data))
    jobs = [
        Job(seed, client, half, Download(last + 1, "finetune", len(setup.data), params), None, lr)
        for seed, params in models.items()
        for client in clients
    ]
    engine, _ = choose_engine(
        experiment.runtime.engine,
        setup.net,
        setup.data,
        Schedule(experiment.train.batch_size, table.epochs, None, schedule(experiment).augment),
        experiment.runtime.workers or len(os.sched_getaffinity(0)),
        rounds=1,
        jobs=len(jobs),
    )
    with closing(engine):
        done = engine.train(jobs)
        scores = engine.evaluate([one.upload.params for one in done], [one.seed for one in done])
    counts = setup.data.counts()
    tuned: Models = {seed: {} for seed in models}
    found: dict[int, list[float | None]] = {seed: [] for seed in models}
    for one, score in zip(done, scores, strict=True):
        tuned[one.seed][one.client] = one.upload.params
        found[one.seed].append(score.client_accuracy(counts)[one.client])
    means = {seed: _mean([value for value in each if value is not None]) for seed, each in found.items()}
    return tuned, {
        "epochs": table.epochs,
        "lr": lr,
        "personal_accuracy": {"mean": _mean(list(means.values())), "by_seed": list(means.values())},
        "client_personal_accuracy": list(found.values()),
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
