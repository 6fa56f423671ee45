"""Before round 1: the server trains the model on public data of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from fedpews.build import Setup
from fedpews.engines.diverging import sort_out
from fedpews.engines.engine import Job
from fedpews.errors import RunFailed
from fedpews.finetuning import alone
from fedpews.methods.contract import Download
from fedpews.methods.ditto import own_solver
from fedpews.trees import Tree


def pretrain(setup: Setup) -> Mapping[int, Tree]:
    """Each seed's global model before round 1: as it starts, or after so many epochs on the public data.

    The server uses the clients' optimiser without the method's own terms.
    """
    if setup.public is None:
        return setup.starts
    table = setup.experiment.pretrain
    lr = setup.experiment.lr_at(1) if table.lr is None else table.lr
    half = own_solver(setup.method, 0.0)
    jobs = [
        Job(seed, 0, half, Download(0, "pretrain", 1, params), None, lr)
        for seed, params in setup.starts.items()
    ]
    with closing(alone(setup, setup.public, table.epochs, len(jobs))) as engine:
        done, bad = sort_out(setup.net, engine.train(jobs))
    if bad:
        raise RunFailed(f"the model diverges in pretraining (seed {bad[0].seed}): {bad[0].reason}")
    return {one.seed: one.upload.params for one in done}
