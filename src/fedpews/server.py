"""A round of federated learning: choose the cohort, train it, update the global model, measure."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.diverging import explain, sort_out
from fedpews.engines.engine import Engine, Job
from fedpews.errors import RunFailed
from fedpews.measure import Measurer, SeedRound
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Method, Upload
from fedpews.methods.robust import Aggregate
from fedpews.neurons.network import Network
from fedpews.results.memories import Store
from fedpews.results.records import Record
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree, leaves, norm, stack


@dataclass(frozen=True)
class Rules:
    """The settings of a round, named as in the configuration."""

    participation: float = 1.0
    weighting: str = "uniform"  # or "samples"
    lr: float = 0.01
    lr_milestones: tuple[int, ...] = ()
    lr_decay: float = 0.1
    lr_warmup: int = 0
    lr_schedule: str = "constant"  # or "cosine", which ends at the last round
    lr_min: float = 0.0
    diverged: str = "stop"  # or "leave-out"
    aggregate: Aggregate = field(default_factory=Aggregate)
    evaluate_every: int = 1
    rounds: int | None = None  # the last round is always evaluated

    def lr_at(self, round: int) -> float:
        """The local learning rate: multiplied by ``lr_decay`` after each milestone.

        It rises linearly in the first ``lr_warmup`` rounds; a cosine begins after them.

        >>> rules = Rules(lr=1.0, lr_warmup=2, lr_schedule="cosine", rounds=6)
        >>> [round(rules.lr_at(t), 3) for t in range(1, 7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        lr = self.lr * self.lr_decay ** sum(round > milestone for milestone in self.lr_milestones)
        if round <= self.lr_warmup:
            return lr * round / self.lr_warmup
        if self.lr_schedule != "cosine" or self.rounds is None:
            return lr
        progress = (round - self.lr_warmup - 1) / (self.rounds - self.lr_warmup)
        return self.lr_min + (lr - self.lr_min) * (1 + math.cos(math.pi * progress)) / 2

    def is_evaluated(self, round: int) -> bool:
        """Whether the global model is evaluated after this round.

        >>> [round for round in range(1, 9) if Rules(evaluate_every=3, rounds=8).is_evaluated(round)]
        [3, 6, 8]
        """
        return round % self.evaluate_every == 0 or round == self.rounds


class Server:
    """Runs rounds for all seeds side by side. A checkpoint holds its ``states`` and its clients' ``memories``."""

    def __init__(
        self,
        net: Network,
        method: Method,
        data: Federation,
        engine: Engine,
        memories: Store,
        rules: Rules,
        states: Mapping[int, Nest],
    ) -> None:
        self.net, self.method, self.engine, self.memories = net, method, engine, memories
        self.rules, self.states, self.total = rules, dict(states), len(data)
        self.measurer = Measurer(net, method, data, engine, memories)

    def run(self, round: int, seeds: Sequence[int] | None = None, last: bool = True) -> list[Record]:
        """One round of all seeds, or of those given; a record for each.

        Args:
            last: whether the records must be complete now, because no round follows or a decision needs them. If
                not, an engine that evaluates while it trains completes them in the next round.
        """
        began = time.perf_counter()
        parts = self._train(round, [seed for seed in self.states if seeds is None or seed in seeds])
        for part in parts:
            self._update(part)
        return self.measurer.measure(parts, self.rules.is_evaluated(round), last, began)

    def models(self) -> dict[int, Tree]:
        """Each seed's global model."""
        return {seed: self.method.params(state) for seed, state in self.states.items()}

    def _train(self, round: int, seeds: Sequence[int]) -> list[SeedRound]:
        """Choose each seed's cohort and train it."""
        parts: dict[int, SeedRound] = {}
        jobs: list[Job] = []
        lr = self.rules.lr_at(round)
        for seed in seeds:
            state = self.states[seed]
            cohort = choose_cohort(self.total, self.rules.participation, round, seed)
            phase = self.method.phase(state, round)
            downloads = self.method.downloads(self.net, state, cohort)
            half, parts[seed] = self.method.client(phase), SeedRound(seed, phase, cohort, downloads, state)
            for client, download in zip(cohort.clients, downloads, strict=True):
                jobs.append(Job(seed, client, half, download, self.memories.get(seed, client), lr))
        # all seeds' jobs at once: the engine has more to run side by side. Clients that dropped out are missing in
        # its answer; the average is over those that answered
        finished, diverged = sort_out(self.net, self.engine.train(jobs))
        # raised before anything of the round counts, so that the last good state can still be saved
        if diverged and (self.rules.diverged == "stop" or {done.seed for done in finished} != set(parts)):
            raise explain(diverged, jobs)
        for lost in diverged:
            parts[lost.seed].left_out.append(lost.client)
        for done in finished:
            self.memories.put(done.seed, done.client, done.memory)
            parts[done.seed].uploads.append(done.upload)
        return [*parts.values()]

    def _update(self, part: SeedRound) -> None:
        """Aggregate the uploads into the next state."""
        average = average_of(self.net, part.uploads, self.rules.weighting)
        part.masks = average.masks
        average = self.rules.aggregate.of(average, part.uploads)
        state = self.method.update(self.net, part.state, part.uploads, average)
        check_update(part.state, state, part.uploads, part.seed)
        part.state = self.states[part.seed] = state


def choose_cohort(total: int, participation: float, round: int, seed: int) -> Cohort:
    """The clients of a round, drawn without replacement and sorted."""
    count = cohort_size(total, participation)
    # a function of seed and round alone, so a resumed run draws the same cohorts
    generator = torch.Generator().manual_seed(fold(seed, round, "cohort"))
    chosen = range(total) if count >= total else torch.randperm(total, generator=generator)[:count].tolist()
    return Cohort(round, tuple(sorted(chosen)), total, fold(seed, round, "server"), seed)


def cohort_size(total: int, participation: float) -> int:
    """How many clients take part in a round: at least one, halves rounded up."""
    return max(1, math.floor(participation * total + 0.5))


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
        if not value.is_floating_point() or _is_finite(value):
            continue
        if name in before and not _is_finite(before[name]):
            continue
        largest = max(uploads, key=lambda upload: float(norm(upload.params)))
        raise RunFailed(
            f"the aggregate of round {uploads[0].round} of seed {seed} is not finite any more ({name}); the largest "
            f"upload is that of client {largest.client}. Nothing of this round is saved; lower train.lr or server_lr."
        )


def _is_finite(value: Tensor) -> bool:
    # a finite sum proves it in a tenth of the time; a sum that overflows does not disprove it
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())
