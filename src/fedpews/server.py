"""A round of federated learning in one process: choose the cohort, train it, average, evaluate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.engine import Engine, Job
from fedpews.engines.evaluate import Score
from fedpews.errors import RunFailed
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Method, Upload
from fedpews.methods.robust import Aggregate
from fedpews.methods.wire import encode_download, encode_upload
from fedpews.neurons.network import Network
from fedpews.results.memories import Store
from fedpews.results.nests import leaves
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree, norm

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
    aggregate: Aggregate = field(default_factory=Aggregate)

    def lr_at(self, round: int) -> float:
        """The local learning rate: multiplied by ``decay`` after every milestone passed."""
        return self.lr * self.decay ** sum(round > milestone for milestone in self.milestones)


def choose_cohort(total: int, participation: float, round: int, seed: int) -> Cohort:
    """The clients of a round, drawn without replacement and sorted."""
    count = cohort_size(total, participation)
    generator = torch.Generator().manual_seed(fold(seed, round, "cohort"))
    chosen = range(total) if count >= total else torch.randperm(total, generator=generator)[:count].tolist()
    return Cohort(round, tuple(sorted(chosen)), total, fold(seed, round, "server"))


def cohort_size(total: int, participation: float) -> int:
    """How many clients take part in a round: at least one, halves rounded up."""
    return max(1, math.floor(participation * total + 0.5))


def average_of(net: Network, uploads: Sequence[Upload], weighting: str) -> Average:
    """The average that a round's uploads ask for."""
    weights = tuple(1.0 if weighting == "uniform" else float(upload.samples) for upload in uploads)
    return Average(weights, tuple(upload.ownership(net) for upload in uploads))


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
        known = len(data.y) > 0  # a server among real sites has nobody's samples
        self.pending: list[dict[str, Any]] = []
        """Records of the last round that wait for its evaluation."""
        self._counts = data.counts() if known and len(data) <= SHOWN_CLIENTS else None

    def run(self, round: int, last: bool = True) -> list[dict[str, Any]]:
        """One round of all seeds; a record for each seed of every round whose evaluation is known now.

        Among sites the model is evaluated where the next round trains it, so that a round is one message and not two;
        its record then comes with the next round's, and ``pending`` is what is known of it until then.

        Args:
            last: whether no round follows, so that the records must be complete.
        """
        began = time.perf_counter()
        cohorts = {
            seed: choose_cohort(len(self.data), self.rules.participation, round, seed) for seed in self.states
        }
        phases = {seed: self.method.phase(state, round) for seed, state in self.states.items()}
        downloads = {
            seed: self.method.downloads(self.net, state, cohorts[seed]) for seed, state in self.states.items()
        }
        lr = self.rules.lr_at(round)
        jobs = [
            Job(seed, client, self.method.client(phases[seed]), download, self.memories.get(seed, client), lr)
            for seed, cohort in cohorts.items()
            for client, download in zip(cohort.clients, downloads[seed], strict=True)
        ]
        on_the_way = self.engine.scores_on_the_way(jobs)
        settled = [] if on_the_way else self._settle(self._evaluate)
        uploads: dict[int, list[Upload]] = {seed: [] for seed in self.states}
        for done in self.engine.train(jobs):
            self.memories.put(done.seed, done.client, done.memory)
            uploads[done.seed].append(done.upload)
        settled += self._settle(lambda: self.engine.scores_found(list(self.states)))
        for seed, state in self.states.items():
            average = average_of(self.net, uploads[seed], self.rules.weighting)
            average = self.rules.aggregate.of(average, uploads[seed])
            self.states[seed] = self.method.update(self.net, state, uploads[seed], average)
            check_update(state, self.states[seed], uploads[seed])
        scores = None if on_the_way and not last else self._evaluate()
        seconds = (time.perf_counter() - began) / len(self.states)
        self.pending = [
            {
                "seed": seed,
                "round": round,
                "phase": phases[seed],
                **self._measure(uploads[seed], downloads[seed]),
                **self._evaluate_personal(seed, cohorts[seed]),
                "seconds": seconds,
            }
            for seed in self.states
        ]
        return settled if scores is None else settled + self._settle(lambda: scores)

    def _evaluate(self) -> list[Score]:
        return self.engine.evaluate(list(self.models().values()))

    def _settle(self, evaluate: Callable[[], Sequence[Score]]) -> list[dict[str, Any]]:
        """Complete the records that wait for their evaluation."""
        waiting, self.pending = self.pending, []
        if not waiting:
            return []
        scored = zip(waiting, evaluate(), strict=True)
        return [{**record, **self._measure_score(score)} for record, score in scored]

    def models(self) -> dict[int, Tree]:
        """Each seed's global model."""
        return {seed: self.method.params(state) for seed, state in self.states.items()}

    def _measure_score(self, score: Score) -> dict[str, Any]:
        if not math.isfinite(score.loss):
            raise RunFailed("the global model's loss is no longer finite; lower train.lr or train.server_lr")
        record: dict[str, Any] = {"accuracy": score.accuracy, "loss": score.mean_loss}
        if self._counts is not None:
            record["client_accuracy"] = score.client_accuracy(self._counts)
        if score.sites:
            record["sites"] = {
                name: {"accuracy": right / seen, "loss": loss / seen, "samples": seen}
                for name, (right, seen, loss) in score.sites.items()
                if seen
            }
        return record

    def _measure(self, uploads: list[Upload], downloads: list[Download]) -> dict[str, Any]:
        record: dict[str, Any] = {"train_loss": sum(upload.loss for upload in uploads) / len(uploads)}
        shared = {id(download): download for download in downloads}
        sizes = {key: len(encode_download(self.net, download)) for key, download in shared.items()}
        record["bytes_up"] = sum(len(encode_upload(self.net, upload)) for upload in uploads)
        record["bytes_down"] = sum(sizes[id(download)] for download in downloads)
        return record | measure_ownership(uploads, each=len(self.data) <= SHOWN_CLIENTS)

    def _evaluate_personal(self, seed: int, cohort: Cohort) -> dict[str, Any]:
        """How good each client's own model is on the classes it has, for a method that gives clients their own.

        Its own model is made of the client's memory and what the server would send it next.
        """
        if not self.method.personalised:
            return {}
        clients = range(len(self.data)) if len(self.data) <= SHOWN_CLIENTS else cohort.clients
        kept = {client: self.memories.get(seed, client) for client in clients}
        known = {client: memory for client, memory in kept.items() if memory is not None}
        chosen = tuple(known) or self.engine.remembering(
            seed, clients
        )  # among real sites, memories are there
        state = self.states[seed]
        after = replace(cohort, round=cohort.round + 1, clients=chosen)
        downloads = dict(zip(chosen, self.method.downloads(self.net, state, after), strict=True))
        if known:
            half = self.method.client(self.method.phase(state, after.round))
            models = [half.personal(self.net, downloads[client], memory) for client, memory in known.items()]
            counts = self.data.counts()
            found = {
                client: score.client_accuracy(counts[client : client + 1])[0]
                for client, score in zip(known, self.engine.evaluate(models), strict=True)
            }
        else:
            found = self.engine.evaluate_personal(seed, downloads)
        if not found:
            return {}
        record: dict[str, Any] = {"personal_accuracy": sum(found.values()) / len(found)}
        if len(self.data) <= SHOWN_CLIENTS:
            record["client_personal_accuracy"] = [found.get(client) for client in clients]
        return record


def check_update(old: Nest, new: Nest, uploads: Sequence[Upload]) -> None:
    """Refuse to go on with a state that is broken, before anything of it is saved, and say whose upload was largest."""
    before = dict(leaves(old))
    for name, value in leaves(new):
        if not value.is_floating_point() or bool(torch.isfinite(value).all()):
            continue
        if name in before and not bool(torch.isfinite(before[name]).all()):
            continue
        largest = max(uploads, key=lambda upload: float(norm(upload.params)))
        raise RunFailed(
            f"the aggregate of round {uploads[0].round} is not finite any more ({name}); the largest upload is that "
            f"of client {largest.client}. Nothing of this round is saved; lower train.lr or train.server_lr."
        )


def measure_ownership(uploads: Sequence[Upload], each: bool = False) -> dict[str, Any]:
    """How much of the network a client owns, how much somebody owns, and how alike two clients' parts are.

    In hidden neurons, or in single weights for a method that owns those. Overlap is the mean over pairs of
    |both| / |either|. With ``each``, also how much every client of the cohort owns.
    """
    owned = [_owned(upload) for upload in uploads]
    if any(part is None for part in owned):
        return {"density": 1.0, "coverage": 1.0, "overlap": 1.0}
    masks = torch.stack([part for part in owned if part is not None]).double()  # (clients, neurons)
    shares = masks.mean(1)
    both = masks @ masks.T
    either = masks.sum(1)[:, None] + masks.sum(1)[None] - both
    pairs = [
        float(both[a, b] / either[a, b]) if either[a, b] else 0.0
        for a, b in itertools.combinations(range(len(masks)), 2)
    ]
    record = {"client_density": shares.tolist()} if each else {}
    return record | {
        "density": float(shares.mean()),
        "coverage": float((masks.sum(0) > 0).double().mean()),
        "overlap": sum(pairs) / len(pairs) if pairs else 1.0,
    }


def _owned(upload: Upload) -> Tensor | None:
    if upload.mask is not None:
        return torch.cat([mask.flatten() for mask in upload.mask.values()])
    return upload.neurons
