"""Training without the federation: by the server before round 1 (pretrain), by each client after the last (finetune).

Both use the clients' optimiser without the method's own terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from statistics import fmean
from typing import Any

from fedpews.build import Setup, schedule
from fedpews.data.federation import Federation
from fedpews.engines.choose import choose_engine
from fedpews.engines.engine import Engine, Job, Schedule, sort_out
from fedpews.engines.hardware import available_cores
from fedpews.errors import ConfigError, RunFailed
from fedpews.measure import personal_metric, score_personal
from fedpews.methods.contract import Download
from fedpews.methods.ditto import own_solver
from fedpews.trees import Tree

Models = dict[int, dict[int, Tree]]
"""By seed and client."""


def pretrain(setup: Setup) -> Mapping[int, Tree]:
    """Each seed's global model before round 1: as it starts, or after so many epochs on the public data."""
    if setup.public is None:
        return setup.starts
    table = setup.experiment.pretrain
    lr = setup.experiment.lr_at(1) if table.lr is None else table.lr
    downloads = {seed: Download(0, "pretrain", 1, params) for seed, params in setup.starts.items()}
    with _trained(setup, setup.public, downloads, table.epochs, lr) as (_, models):
        return {seed: clients[0] for seed, clients in models.items()}


def check_finetuning(setup: Setup) -> None:
    """Refuse fine-tuning that cannot be done, before the first round."""
    if setup.experiment.finetune.epochs is None:
        return
    if not len(setup.data.y):
        raise ConfigError(
            "finetune: the clients' data are at their sites, and this process has none to train on"
        )
    if setup.method.personalised:
        raise ConfigError(
            f"finetune starts from the global model; {setup.experiment.method_label} has personal models already"
        )


def fine_tune(setup: Setup, models: Mapping[int, Tree]) -> tuple[Models, dict[str, Any]]:
    """Each client's model after so many epochs from the global one, and its metric on the client's data."""
    table, last, clients = setup.experiment.finetune, setup.experiment.rounds, range(len(setup.data))
    assert table.epochs is not None
    lr = setup.experiment.lr_at(last) if table.lr is None else table.lr
    downloads = {s: Download(last + 1, "finetune", len(clients), params) for s, params in models.items()}
    with _trained(setup, setup.data, downloads, table.epochs, lr) as (engine, tuned):
        values = [score_personal(engine, setup.data, seed, trees) for seed, trees in tuned.items()]
    # nan where the metric is undefined for every client
    means = [fmean(each.values()) if each else math.nan for each in values]
    name = personal_metric(setup.data.task)
    return tuned, {
        "epochs": table.epochs,
        "lr": lr,
        f"personal_{name}": {"mean": fmean(means), "by_seed": means},
        f"client_personal_{name}": [[each.get(client) for client in clients] for each in values],
    }


@contextmanager
def _trained(
    setup: Setup, data: Federation, downloads: Mapping[int, Download], epochs: int, lr: float
) -> Iterator[tuple[Engine, Models]]:
    """Each seed's download after so many epochs at each client of the data, and the engine that trained them."""
    half, experiment = own_solver(setup.method, 0.0), setup.experiment
    jobs = [
        Job(seed, client, half, download, None, lr)
        for seed, download in downloads.items()
        for client in range(len(data))
    ]
    how = Schedule(experiment.train.batch_size, epochs, None, schedule(experiment).augment)
    workers = experiment.runtime.workers or available_cores()
    engine, _ = choose_engine(
        experiment.runtime.engine, setup.net, data, how, workers, rounds=1, jobs=len(jobs)
    )
    models: Models = {seed: {} for seed in downloads}
    with closing(engine):
        finished, diverged = sort_out(setup.net, engine.train(jobs))
        if diverged:
            first, phase = diverged[0], jobs[0].download.phase
            raise RunFailed(f"client {first.client} diverges in {phase} (seed {first.seed}): {first.reason}")
        for done in finished:
            models[done.seed][done.client] = done.upload.params
        yield engine, models
