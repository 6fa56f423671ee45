"""A round of federated learning in one process: choose the cohort, train it, average, evaluate."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.engines.engine import Engine, Job
from fedpews.engines.evaluate import Score
from fedpews.errors import RunFailed
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Method, Upload
from fedpews.methods.wire import encode_download, encode_upload
from fedpews.neurons.network import Network
from fedpews.observe import observe_neurons, update_cosine
from fedpews.results.memories import Store
from fedpews.results.neurons import Ownership
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree

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
    rises: int = 0  # rounds until lr is reached
    falls_until: int | None = None  # the round at which a cosine ends, at least
    least: float = 0.0

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


def choose_cohort(total: int, participation: float, round: int, seed: int) -> Cohort:
    """The clients of a round, drawn without replacement and sorted."""
    count = cohort_size(total, participation)
    generator = torch.Generator().manual_seed(fold(seed, round, "cohort"))
    chosen = range(total) if count >= total else torch.randperm(total, generator=generator)[:count].tolist()
    return Cohort(round, tuple(sorted(chosen)), total, fold(seed, round, "server"), seed)


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
        # of the last round, where clients own neurons
        self.observed: list[Ownership] = []
        known = len(data.y) > 0  # a server among real sites has nobody's samples
        self._counts = data.counts() if known and len(data) <= SHOWN_CLIENTS else None

    def run(self, round: int, seeds: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """One round of all seeds, or of those given; a record for each."""
        began = time.perf_counter()
        states = {seed: state for seed, state in self.states.items() if seeds is None or seed in seeds}
        cohorts = {
            seed: choose_cohort(len(self.data), self.rules.participation, round, seed) for seed in states
        }
        phases = {seed: self.method.phase(state, round) for seed, state in states.items()}
        downloads = {
            seed: self.method.downloads(self.net, state, cohorts[seed]) for seed, state in states.items()
        }
        lr = self.rules.lr_at(round)
        jobs = [
            Job(seed, client, self.method.client(phases[seed]), download, self.memories.get(seed, client), lr)
            for seed, cohort in cohorts.items()
            for client, download in zip(cohort.clients, downloads[seed], strict=True)
        ]
        uploads: dict[int, list[Upload]] = {seed: [] for seed in states}
        for done in self.engine.train(jobs):
            self.memories.put(done.seed, done.client, done.memory)
            uploads[done.seed].append(done.upload)
        cosines = {}
        for seed, state in states.items():
            average = average_of(self.net, uploads[seed], self.rules.weighting)
            cosines[seed] = update_cosine(self.net, uploads[seed], downloads[seed], average.masks)
            self.states[seed] = self.method.update(self.net, state, uploads[seed], average)
        seen = (
            observe_neurons(self.net, seed, round, sent, len(self.data)) for seed, sent in uploads.items()
        )
        self.observed = [one for one in seen if one is not None]
        scores = self.engine.evaluate(
            [self.method.params(self.states[seed]) for seed in states], list(states)
        )
        seconds = (time.perf_counter() - began) / len(states)
        return [
            {
                "seed": seed,
                "round": round,
                "phase": phases[seed],
                **self._measure(score, uploads[seed], downloads[seed]),
                **self._evaluate_personal(seed, cohorts[seed]),
                "update_cosine": cosines[seed],
                "seconds": seconds,
            }
            for seed, score in zip(states, scores, strict=True)
        ]

    def models(self) -> dict[int, Tree]:
        """Each seed's global model."""
        return {seed: self.method.params(state) for seed, state in self.states.items()}

    def _measure(self, score: Score, uploads: list[Upload], downloads: list[Download]) -> dict[str, Any]:
        if not math.isfinite(score.loss):
            raise RunFailed("the global model's loss is no longer finite; lower train.lr or train.server_lr")
        record: dict[str, Any] = {
            "accuracy": score.accuracy,
            "loss": score.mean_loss,
            "train_loss": sum(upload.loss for upload in uploads) / len(uploads),
        }
        if self._counts is not None:
            record["client_accuracy"] = score.client_accuracy(self._counts)
        shared = {id(download): download for download in downloads}
        sizes = {key: len(encode_download(self.net, download)) for key, download in shared.items()}
        record["bytes_up"] = sum(len(encode_upload(self.net, upload)) for upload in uploads)
        record["bytes_down"] = sum(sizes[id(download)] for download in downloads)
        return record | measure_ownership(uploads, each=len(self.data) <= SHOWN_CLIENTS)

    def _evaluate_personal(self, seed: int, cohort: Cohort) -> dict[str, Any]:
        """How good each client's own model is, for a method that gives clients their own.

        It is judged on the client's own test samples, or else on the classes it has. Its own
        model is made of the client's memory and what the server would send it next.
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
            net = self.net.at(seed)
            models = [half.personal(net, downloads[client], memory) for client, memory in known.items()]
            counts = self.data.counts()
            found = {
                client: score.client_accuracy(counts)[client]
                for client, score in zip(
                    known, self.engine.evaluate(models, [seed] * len(models)), strict=True
                )
            }
        else:
            found = self.engine.evaluate_personal(seed, downloads)
        if not found:
            return {}
        record: dict[str, Any] = {"personal_accuracy": sum(found.values()) / len(found)}
        if len(self.data) <= SHOWN_CLIENTS:
            record["client_personal_accuracy"] = [found.get(client) for client in clients]
        return record


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
