"""After the last round: every client trains the global model on, for itself alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import closing
from statistics import fmean
from typing import Any

from fedpews.build import Setup, schedule
from fedpews.data.federation import Federation
from fedpews.engines.choose import choose_engine
from fedpews.engines.diverging import sort_out
from fedpews.engines.engine import Engine, Job, Schedule
from fedpews.engines.hardware import available_cores
from fedpews.errors import ConfigError, RunFailed
from fedpews.measure import personal_metric, score_personal
from fedpews.methods.contract import Download
from fedpews.methods.ditto import own_solver
from fedpews.trees import Tree

Models = dict[int, dict[int, Tree]]
"""By seed and client."""


def alone(setup: Setup, data: Federation, epochs: int, jobs: int) -> Engine:
    """What trains a model on one data set for so many epochs, as the run's own engine would."""
    runtime = setup.experiment.runtime
    how = Schedule(setup.experiment.train.batch_size, epochs, None, schedule(setup.experiment).augment)
    workers = runtime.workers or available_cores()
    return choose_engine(runtime.engine, setup.net, data, how, workers, rounds=1, jobs=jobs)[0]


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
    """Each client's model after so many epochs from the global one, and how good each is for its own client.

    Clients use the method's optimiser without the method's own terms.
    """
    experiment = setup.experiment
    table, last = experiment.finetune, experiment.rounds
    assert table.epochs is not None, "asked for only where it is"
    lr = experiment.lr_at(last) if table.lr is None else table.lr
    half, clients = own_solver(setup.method, 0.0), range(len(setup.data))
    jobs = [
        Job(seed, client, half, Download(last + 1, "finetune", len(setup.data), params), None, lr)
        for seed, params in models.items()
        for client in clients
    ]
    engine = alone(setup, setup.data, table.epochs, len(jobs))
    tuned: Models = {seed: {} for seed in models}
    with closing(engine):
        done, bad = sort_out(setup.net, engine.train(jobs))
        if bad:
            raise RunFailed(
                f"client {bad[0].client} diverges in fine-tuning (seed {bad[0].seed}): {bad[0].reason}"
            )
        for one in done:
            tuned[one.seed][one.client] = one.upload.params
        found = [score_personal(engine, setup.data, seed, own) for seed, own in tuned.items()]
    # nan where the metric is undefined for every client
    means = [fmean(each.values()) if each else math.nan for each in found]
    name = personal_metric(setup.data.task)
    return tuned, {
        "epochs": table.epochs,
        "lr": lr,
        f"personal_{name}": {"mean": fmean(means), "by_seed": means},
        f"client_personal_{name}": [[each.get(client) for client in clients] for each in found],
    }
