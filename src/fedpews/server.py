"""A round of federated learning in one process: choose the cohort, train it, average, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.diverging import explain, sort_out
from fedpews.engines.engine import Engine, Job
from fedpews.engines.evaluate import Part as EvaluatedPart
from fedpews.engines.evaluate import Score
from fedpews.errors import RunFailed
from fedpews.measure import Measurer
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Method, Upload
from fedpews.methods.robust import Aggregate
from fedpews.neurons.network import Network
from fedpews.observe import observe_neurons, update_cosine
from fedpews.results.masks import Ownership
from fedpews.results.memories import Store
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree, leaves, norm, stack


@dataclass(frozen=True)
class Rules:
    """What holds in every round."""

    participation: float = 1.0
    weighting: str = "uniform"  # or "samples"
    lr: float = 0.01
    milestones: tuple[int, ...] = ()
    decay: float = 0.1
    evaluate_every: int = 1
    rounds: int | None = None  # the last one is always evaluated
    rises: int = 0  # rounds until lr is reached
    falls_until: int | None = None  # the round at which a cosine ends, at least
    least: float = 0.0
    aggregate: Aggregate = field(default_factory=Aggregate)
    leaves_out: bool = False  # a client that diverges, instead of stopping

    def lr_at(self, round: int) -> float:
        """The local learning rate: multiplied by ``decay`` after every milestone passed.

        In the first ``rises`` rounds it rises in equal parts; a cosine begins behind them.

        >>> [round(Rules(lr=1.0, rises=2, falls_until=6).lr_at(t), 3) for t in range(1, 7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        """
        lr = self.lr * self.decay ** sum(round > milestone for milestone in self.milestones)
        if round <= self.rises:
            return lr * round / self.rises
        if self.falls_until is None:
            return lr
        gone = (round - self.rises - 1) / (self.falls_until - self.rises)
        return self.least + (lr - self.least) * (1 + math.cos(math.pi * gone)) / 2

    def is_evaluated(self, round: int) -> bool:
        """Whether the global model is evaluated after this round.

        >>> [round for round in range(1, 9) if Rules(evaluate_every=3, rounds=8).is_evaluated(round)]
        [3, 6, 8]
        """
        return round % self.evaluate_every == 0 or round == self.rounds


@dataclass(frozen=True)
class Part:
    """One seed's part of a round."""

    phase: str
    cohort: Cohort
    downloads: Sequence[Download]  # in the cohort's order
    uploads: list[Upload] = field(default_factory=list)  # of those who answered
    left_out: list[int] = field(default_factory=list)  # who diverged

    @property
    def answered(self) -> list[Download]:
        """The download behind each upload."""
        sent = dict(zip(self.cohort.clients, self.downloads, strict=True))
        return [sent[upload.client] for upload in self.uploads]


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
    """The average that a round's uploads ask for."""
    weights = tuple(1.0 if weighting == "uniform" else float(upload.samples) for upload in uploads)
    # where a client owns single weights, their mask counts, not its neurons
    neurons = [upload.neurons for upload in uploads if upload.neurons is not None and upload.mask is None]
    if len(neurons) < len(uploads):
        return Average(weights, tuple(upload.ownership(net) for upload in uploads))
    # all clients' masks at once: with many small clients, calls cost more than numbers
    masks = net.graph.expand(stack(neurons))
    rows = zip(*map(Tensor.unbind, masks.values()), strict=True)
    return Average(weights, tuple(dict(zip(masks, row, strict=True)) for row in rows))


def check_update(old: Nest, new: Nest, uploads: Sequence[Upload], seed: int) -> None:
    """Refuse to go on with a state that is broken, before anything of it is saved, and say whose upload was largest."""
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
    # a sum with one broken number in it is broken too, and takes a tenth of the time; one that overflows is not
    # proof, so then every number is looked at
    return bool(torch.isfinite(value.sum())) or bool(torch.isfinite(value).all())


class Server:
    """Runs rounds for all seeds side by side. ``states`` is all there is to save, with the memories."""

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
        self.net, self.method, self.data, self.engine = net, method, data, engine
        self.memories, self.rules, self.states = memories, rules, dict(states)
        # records of the last round that wait for its evaluation
        self.pending: list[dict[str, Any]] = []
        # of the last round, where clients own neurons
        self.observed: list[Ownership] = []
        self.total = len(data)
        self._measurer = Measurer(net, data)

    def run(self, round: int, seeds: Sequence[int] | None = None, last: bool = True) -> list[dict[str, Any]]:
        """One round of all seeds, or of those given; a record for each.

        Without an evaluation it says nothing about accuracy. Among sites the model is evaluated where the next round
        trains it, so that a round is one message and not two; its record then comes with the next round's, and
        ``pending`` is what is known of it until then.

        Args:
            last: whether the records must be complete now, because no round follows or a decision needs them.
        """
        began = time.perf_counter()
        parts: dict[int, Part] = {}
        jobs: list[Job] = []
        lr = self.rules.lr_at(round)
        # all seeds' jobs go to the engine at once: more to run side by side
        for seed, state in self.states.items():
            if seeds is not None and seed not in seeds:
                continue
            cohort = choose_cohort(self.total, self.rules.participation, round, seed)
            part = Part(
                self.method.phase(state, round), cohort, self.method.downloads(self.net, state, cohort)
            )
            half, parts[seed] = self.method.client(part.phase), part
            for client, download in zip(cohort.clients, part.downloads, strict=True):
                jobs.append(Job(seed, client, half, download, self.memories.get(seed, client), lr))
        # clients that dropped out are missing here; the average is over those that answered
        good, bad = sort_out(self.net, self.engine.train(jobs))
        # before anything of the round counts, so that where it began can still be saved
        if bad and (not self.rules.leaves_out or {done.seed for done in good} != set(parts)):
            raise explain(bad, jobs)
        for left in bad:
            parts[left.seed].left_out.append(left.client)
        for done in good:
            self.memories.put(done.seed, done.client, done.memory)
            parts[done.seed].uploads.append(done.upload)
        # of the models that this round began with
        settled = self.settle()
        is_evaluated = self.rules.is_evaluated(round)
        cosines: dict[int, float | None] = {}
        self.observed = []
        for seed, part in parts.items():
            average = average_of(self.net, part.uploads, self.rules.weighting)
            if is_evaluated:
                cosines[seed] = update_cosine(self.net, part.uploads, part.answered, average.masks)
            average = self.rules.aggregate.of(average, part.uploads)
            before = self.states[seed]
            self.states[seed] = self.method.update(self.net, before, part.uploads, average)
            check_update(before, self.states[seed], part.uploads, seed)
            seen = observe_neurons(self.net, seed, round, part.uploads, self.total)
            self.observed += [] if seen is None else [seen]
        scores: Sequence[Score | None] = [None] * len(parts)
        held: Sequence[Score | None] = [None] * len(parts)
        waits = is_evaluated and not last and self.engine.evaluates_in_training(jobs)
        waits = waits and self._evaluates_whole([*parts])
        if is_evaluated and not waits:
            scores = self._evaluate([*parts])
            if self.data.validation:
                held = self._evaluate([*parts], "validation")
        records = []
        for (seed, part), score, validation in zip(parts.items(), scores, held, strict=True):
            state, measurer = self.states[seed], self._measurer
            record = {"seed": seed, "round": round, "phase": part.phase}
            record |= {} if score is None else measurer.test(score)
            record |= measurer.messages(part.uploads, part.downloads) | self.method.measure(self.net, state)
            record |= {} if validation is None else measurer.validation(validation)
            record |= {"left_out": part.left_out} if part.left_out else {}
            if is_evaluated and self.method.personalised:
                record |= measurer.personal(self.engine, self.method, self.memories, seed, state, part.cohort)
            records.append(record | ({"update_cosine": cosines[seed]} if is_evaluated else {}))
        # seeds share the work, so each gets an equal part of the time
        seconds = (time.perf_counter() - began) / len(records)
        records = [record | {"seconds": seconds} for record in records]
        if waits:
            self.pending = records
            return settled
        return settled + records

    def settle(self) -> list[dict[str, Any]]:
        """The records that wait for their evaluation, evaluated now."""
        waiting, self.pending = self.pending, []
        if not waiting:
            return []
        scores = self._evaluate([record["seed"] for record in waiting])
        return [record | self._measurer.test(score) for record, score in zip(waiting, scores, strict=True)]

    def _evaluate(self, seeds: Sequence[int], part: EvaluatedPart = "test") -> Sequence[Score]:
        models = [self.method.evaluated_params(self.net, self.states[seed]) for seed in seeds]
        return self.engine.evaluate(models, seeds, part)

    def _evaluates_whole(self, seeds: Sequence[int]) -> bool:
        """Whether the model that is evaluated is the one that the next round's clients get."""
        states = [self.states[seed] for seed in seeds]
        return all(
            self.method.evaluated_params(self.net, state) is self.method.params(state) for state in states
        )

    def models(self) -> dict[int, Tree]:
        """Each seed's global model."""
        return {seed: self.method.params(state) for seed, state in self.states.items()}
