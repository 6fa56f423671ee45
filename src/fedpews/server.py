"""A round of federated learning: choose the cohort, train it, update the global model, measure."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedpews.build import Setup
from fedpews.engines.engine import Engine, Job, explain, sort_out
from fedpews.errors import RunFailed
from fedpews.measure import Measurer, SeedRound
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Upload
from fedpews.methods.robust import make_robust
from fedpews.neurons.network import Network
from fedpews.results.memories import Store
from fedpews.results.records import Record
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree, leaves, norm, stack


class Server:
    """Runs rounds for all seeds side by side. A checkpoint holds its ``states`` and its clients' ``memories``."""

    def __init__(
        self,
        setup: Setup,
        engine: Engine,
        memories: Store,
        states: Mapping[int, Nest],
        *,
        observes: bool = False,
    ) -> None:
        self.setup, self.engine, self.memories, self.states = setup, engine, memories, dict(states)
        self.measurer = Measurer(setup, engine, memories, observes)
        self.total = len(setup.data)
        self.rates = [setup.experiment.lr_at(round + 1) for round in range(setup.experiment.rounds)]
        self.cohort_size = setup.experiment.cohort_size(self.total)

    def run(self, round: int, seeds: Sequence[int] | None = None) -> list[Record]:
        """One round of all seeds, or of those given; a record for each."""
        began = time.perf_counter()
        net, method, experiment = self.setup.net, self.setup.method, self.setup.experiment
        # a caller may continue after the experiment's last one
        train, lr = experiment.train, self.rates[min(round, experiment.rounds) - 1]
        parts: dict[int, SeedRound] = {}
        jobs: list[Job] = []
        for seed, state in self.states.items():
            if seeds is not None and seed not in seeds:
                continue
            cohort = choose_cohort(self.total, self.cohort_size, round, seed)
            phase = method.phase(state, round)
            downloads = dict(zip(cohort.clients, method.downloads(net, state, cohort), strict=True))
            half, parts[seed] = method.client(phase), SeedRound(seed, phase, cohort, downloads, state)
            for client, download in downloads.items():
                jobs.append(Job(seed, client, half, download, self.memories.get(seed, client), lr))
        # all seeds' jobs at once: the engine has more to run side by side. Clients that dropped out are missing in
        # its answer; the average is over those that answered
        finished, diverged = sort_out(net, self.engine.train(jobs))
        # raised before anything of the round counts, so that the last good state can still be saved
        if diverged and (train.diverged == "stop" or {done.seed for done in finished} != set(parts)):
            raise explain(diverged, jobs)
        for lost in diverged:
            parts[lost.seed].left_out.append(lost.client)
        for done in finished:
            self.memories.put(done.seed, done.client, done.memory)
            parts[done.seed].uploads.append(done.upload)
        for seed, part in parts.items():
            average = average_of(net, part.uploads, train.weighting)
            part.masks = average.masks
            if train.aggregate != "mean":
                average = make_robust(average, part.uploads, train.aggregate, train.trim, train.byzantine)
            state = method.update(net, part.state, part.uploads, average)
            check_update(part.state, state, part.uploads, seed)
            part.state = self.states[seed] = state
        evaluate = round % experiment.runtime.evaluate_every == 0 or round == experiment.rounds
        return self.measurer.measure([*parts.values()], evaluate, began)

    def models(self) -> dict[int, Tree]:
        """Each seed's global model."""
        return {seed: self.setup.method.params(state) for seed, state in self.states.items()}


def choose_cohort(total: int, count: int, round: int, seed: int) -> Cohort:
    """The clients of a round, drawn without replacement and sorted."""
    # a function of seed and round alone, so a resumed run draws the same cohorts
    generator = torch.Generator().manual_seed(fold(seed, round, "cohort"))
    chosen = range(total) if count >= total else torch.randperm(total, generator=generator)[:count].tolist()
    return Cohort(round, tuple(sorted(chosen)), total, fold(seed, round, "server"), seed)


def average_of(net: Network, uploads: Sequence[Upload], weighting: str) -> Average:
    """The average over a round's uploads, each weighted and masked by what its client owns."""
    weights = tuple(1.0 if weighting == "uniform" else float(upload.samples) for upload in uploads)
    # a mask of single weights goes before a mask of neurons
    neurons = [upload.neurons for upload in uploads if upload.neurons is not None and upload.mask is None]
    if len(neurons) < len(uploads):
        return Average(weights, tuple(upload.ownership(net) for upload in uploads))
    # all clients' masks at once: with many small clients, the number of calls is what costs
    masks = net.graph.expand(stack(neurons))
    rows = zip(*map(Tensor.unbind, masks.values()), strict=True)
    return Average(weights, tuple(dict(zip(masks, row, strict=True)) for row in rows))


def check_update(old: Nest, new: Nest, uploads: Sequence[Upload], seed: int) -> None:
    """Raise an error if the new state is not finite, before it is saved; the error names the largest upload."""
    before = dict(leaves(old))
    for name, value in leaves(new):
        # a finite sum proves it in a tenth of the time; a sum that overflows does not disprove it
        if not value.is_floating_point() or math.isfinite(value.sum()) or torch.isfinite(value).all():
            continue
        if name in before and not torch.isfinite(before[name]).all():
            continue
        largest = max(uploads, key=lambda upload: float(norm(upload.params)))
        raise RunFailed(
            f"the aggregate of round {uploads[0].round} of seed {seed} is not finite any more ({name}); the largest "
            f"upload is that of client {largest.client}. Nothing of this round is saved; lower train.lr or server_lr."
        )
