"""A round of federated learning in one process: choose the cohort, train it, average, evaluate."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.diverging import explain, sort_out
from fedpews.engines.engine import Engine, Job
from fedpews.engines.evaluate import Part as EvaluatedPart
from fedpews.engines.evaluate import Score
from fedpews.errors import RunFailed
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Method, Upload
from fedpews.methods.robust import Aggregate
from fedpews.methods.wire import message_sizes
from fedpews.neurons.network import Network
from fedpews.observe import observe_neurons, update_cosine
from fedpews.results.memories import Store
from fedpews.results.nests import leaves
from fedpews.results.neurons import Ownership
from fedpews.seeds import fold
from fedpews.tasks.contract import Task
from fedpews.tasks.names import short
from fedpews.tasks.sums import accuracy
from fedpews.trees import Nest, Tree, norm, stack

SHOWN_CLIENTS = 100
"""Up to so many clients, a record lists every client's accuracy."""


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
        # a server among real sites has nobody's samples
        mixes = len(data.y) > 0 and len(data) <= SHOWN_CLIENTS and data.test_owner is None
        self._counts = data.counts() if mixes and data.task.classes_of(data.y) is not None else None

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
        on_the_way = self.engine.scores_on_the_way(jobs)
        settled = [] if on_the_way else self.settle()
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
        settled += self._settle(self.engine.scores_found)
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
        waits = is_evaluated and on_the_way and not last and self._evaluates_whole([*parts])
        if is_evaluated and not waits:
            scores = self._evaluate([*parts])
            if self.data.validation:
                held = self._evaluate([*parts], "validation")
        records = []
        for (seed, part), score, validation in zip(parts.items(), scores, held, strict=True):
            record = {"seed": seed, "round": round, "phase": part.phase} | self._measure(part, score)
            record |= self.method.measure(self.net, self.states[seed])
            record |= self._validate(validation) | ({"left_out": part.left_out} if part.left_out else {})
            if is_evaluated and self.method.personalised:
                record |= self._evaluate_personal(seed, part.cohort)
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
        return self._settle(self._evaluate)

    def _settle(self, evaluate: Callable[[Sequence[int]], Sequence[Score]]) -> list[dict[str, Any]]:
        waiting, self.pending = self.pending, []
        if not waiting:
            return []
        scores = evaluate([record["seed"] for record in waiting])
        return [record | self._measure_score(score) for record, score in zip(waiting, scores, strict=True)]

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

    def _measure(self, part: Part, score: Score | None) -> dict[str, Any]:
        """How good the global model is (if it was evaluated), what travelled, and who owned what."""
        uploads, downloads = part.uploads, part.downloads
        record = {} if score is None else self._measure_score(score)
        record["train_loss"] = sum(upload.loss for upload in uploads) / len(uploads)
        # most methods send one download to everybody
        shared = {id(download): download for download in downloads}
        sizes = dict(zip(shared, message_sizes(self.net, [*shared.values()]), strict=True))
        record["bytes_up"] = sum(message_sizes(self.net, uploads))
        record["bytes_down"] = sum(sizes[id(download)] for download in downloads)
        return record | measure_ownership(uploads, each=self.total <= SHOWN_CLIENTS)

    def _metrics(self, score: Score) -> dict[str, Any]:
        """The global model's metrics on all test data, and on each client's own."""
        # stop here: a model with nan never recovers, and would fill the record with it
        if not math.isfinite(score.loss):
            raise RunFailed("the global model's loss is no longer finite; lower train.lr or train.server_lr")
        task = self.data.task
        metrics = task.measure(score.sums)
        counted = "correct" in score.sums and "seen" in score.sums
        record: dict[str, Any] = {"accuracy": score.accuracy} if counted else {}
        if "accuracy" in metrics:
            record["accuracy"] = metrics["accuracy"]
        record |= {"loss": score.mean_loss, "metrics": metrics}
        if score.clients:
            own = [score.clients.get(client) for client in range(self.total)]
            found = [{} if sums is None else task.measure(sums) for sums in own]
            record["client_metrics"] = {
                metric: [values.get(metric) for values in found] for metric in metrics
            }
            if counted:
                record["client_accuracy"] = [
                    None if sums is None else accuracy(sums["correct"], sums["seen"]) for sums in own
                ]
        return record

    def _measure_score(self, score: Score) -> dict[str, Any]:
        """The metrics, with what each client or site finds."""
        record = self._metrics(score)
        if not score.clients and self._counts is not None:
            record["client_accuracy"] = score.client_accuracy(self._counts)
        if score.sites:
            record["sites"] = {
                name: {**self.data.task.measure(sums), "loss": Score(sums).mean_loss, "samples": samples}
                for name, (samples, sums) in score.sites.items()
            }
        return record

    def _validate(self, score: Score | None) -> dict[str, Any]:
        """The metrics on held-out samples, for everything that makes a choice."""
        if score is None:
            return {}
        return {"validation": self.data.task.measure(score.sums) | {"loss": score.mean_loss}}

    def _evaluate_personal(self, seed: int, cohort: Cohort) -> dict[str, Any]:
        """How good each client's own model is, for a method that gives clients their own.

        It is evaluated on the client's own test samples, or else on the classes it has. The model is
        made of the client's memory and what the server would send it next.
        """
        clients = range(self.total) if self.total <= SHOWN_CLIENTS else cohort.clients
        kept = {client: self.memories.get(seed, client) for client in clients}
        known = {client: memory for client, memory in kept.items() if memory is not None}
        # among real sites, memories are there
        chosen = tuple(known) or self.engine.remembering(seed, clients)
        state = self.states[seed]
        # a client's own model is the one it would use next, made of the download of the next round
        after = replace(cohort, round=cohort.round + 1, clients=chosen)
        downloads = dict(zip(chosen, self.method.downloads(self.net, state, after), strict=True))
        if known:
            half = self.method.client(self.method.phase(state, after.round))
            net = self.net.at(seed)
            models = {i: half.personal(net, downloads[i], memory) for i, memory in known.items()}
            found = score_personal(self.engine, self.data, seed, models)
        else:
            found = self.engine.evaluate_personal(seed, downloads)
        if not found:
            return {}
        name = personal_metric(self.data.task)
        record: dict[str, Any] = {f"personal_{name}": sum(found.values()) / len(found)}
        if self.total <= SHOWN_CLIENTS:
            record[f"client_personal_{name}"] = [found.get(client) for client in clients]
        return record


def personal_metric(task: Task) -> str:
    """By what clients' own models are judged: accuracy where it is measured, else the metric that counts."""
    is_measured = "correct" in task.ALWAYS or "accuracy" in task.metrics
    return "accuracy" if is_measured else short(task.metrics[0])


def score_personal(
    engine: Engine, data: Federation, seed: int, models: Mapping[int, Tree]
) -> dict[int, float]:
    """Each client's own model, by ``personal_metric``: on its own test samples, or else on the classes it has."""
    seeds, clients = [seed] * len(models), [*models]
    if data.task.classes_of(data.y) is not None:
        counts = data.counts()
        scores = engine.evaluate([*models.values()], seeds)
        return {i: score.client_accuracy(counts)[i] for i, score in zip(clients, scores, strict=True)}
    owners = clients if data.test_owner is not None else None
    scores = engine.evaluate([*models.values()], seeds, "test", owners)
    name = personal_metric(data.task)
    found = {i: data.task.measure(score.sums).get(name) for i, score in zip(clients, scores, strict=True)}
    return {client: value for client, value in found.items() if value is not None}


def measure_ownership(uploads: Sequence[Upload], each: bool = False) -> dict[str, Any]:
    """How much of the network a client owns, how much somebody owns, and how alike two clients' parts are.

    In hidden neurons, or in single weights for a method that owns those. Overlap is the mean over pairs of
    |both| / |either|. With ``each``, also how much every client of the cohort owns.
    """
    owned = []
    for upload in uploads:
        if upload.mask is not None:
            # by name: a mask that was read back from disk, or came over the wire, has another order
            owned.append(torch.cat([mask.flatten() for _, mask in sorted(upload.mask.items())]))
        elif upload.neurons is not None:
            owned.append(upload.neurons)
        else:
            return {"density": 1.0, "coverage": 1.0, "overlap": 1.0}
    masks = torch.stack(owned).cpu()  # (clients, neurons)
    # whole numbers, exact in single precision as long as nobody owns 2²⁴ elements
    numbers = masks.to(torch.float32 if masks.shape[1] < 2**24 else torch.float64)
    # (clients, clients): how many elements each two own both; on the diagonal, how many each owns
    both = (numbers @ numbers.T).double()
    sizes = both.diagonal()
    either = sizes[:, None] + sizes[None] - both
    first, second = torch.triu_indices(len(owned), len(owned), 1)
    # two that own nothing have nothing in common
    alike = (both / either.clamp_min(1))[first, second].tolist()
    shares = sizes / masks.shape[1]
    record = {"client_density": shares.tolist()} if each else {}
    return record | {
        "density": float(shares.mean()),
        "coverage": float(masks.any(0).double().mean()),
        "overlap": sum(alike) / len(alike) if alike else 1.0,
    }
