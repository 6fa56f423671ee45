"""The record of a round: every column, computed after the update."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedpews.build import Setup
from fedpews.data.federation import Federation
from fedpews.engines.engine import Engine, Score
from fedpews.errors import RunFailed
from fedpews.methods.contract import THETA, Cohort, Download, Upload
from fedpews.methods.wire import message_sizes
from fedpews.neurons.network import Network
from fedpews.notices import list_names
from fedpews.results.masks import BINS, Ownership
from fedpews.results.memories import Store
from fedpews.results.records import Record
from fedpews.tasks.metrics import accuracy
from fedpews.tasks.names import short
from fedpews.tasks.task import Task
from fedpews.trees import Nest, Tree, mean_cosine

SHOWN_CLIENTS = 100
"""Up to this many clients, a record lists the metrics of each."""

COMPARED_CLIENTS = 8
"""The updates of this many clients of a larger cohort, evenly spread, are compared: 28 pairs."""

COMPARED_ELEMENTS = 2**18
"""About this many elements of a larger tensor, evenly spread, are compared: a cosine to two or three digits."""

EACH_ROUND_UP_TO = 100
"""Up to this round the masks of every round are recorded, then those of every tenth."""


@dataclass
class SeedRound:
    """A round of one seed."""

    seed: int
    phase: str
    cohort: Cohort
    downloads: Mapping[int, Download]  # by client
    state: Nest  # before the update, then after it
    uploads: list[Upload] = field(default_factory=list)  # of the clients that answered
    masks: Sequence[Mapping[str, Tensor] | None] = ()  # the elements that each upload owns; None is all
    left_out: list[int] = field(default_factory=list)  # the clients that diverged


class Measurer:
    """Turns the rounds of a server into records.

    Args:
        observes: whether ``observed`` has the neurons that clients owned in the last round.
    """

    def __init__(self, setup: Setup, engine: Engine, memories: Store, observes: bool = False) -> None:
        self.net, self.method, self.data = setup.net, setup.method, setup.data
        self.engine, self.memories, self.total = engine, memories, len(setup.data)
        self.observes = observes
        self.observed: list[Ownership] = []
        self._logged: set[str] = set()
        self._has_personal = setup.method.personalised
        # the server of real sites has no samples
        data, shown = setup.data, len(setup.data.y) > 0 and self.total <= SHOWN_CLIENTS
        mixes = shown and data.test_owner is None and data.task.classes_of(data.y) is not None
        self._counts = data.counts() if mixes else None

    def measure(self, parts: Sequence[SeedRound], evaluate: bool, began: float) -> list[Record]:
        """The records of a round.

        Args:
            began: when the round began.
        """
        net, method = self.net, self.method
        test: Sequence[Score | None] = [None] * len(parts)
        validation = test
        if evaluate:
            seeds = [part.seed for part in parts]
            models = [method.evaluated_params(net, part.state) for part in parts]
            test = self.engine.evaluate(models, seeds)
            if self.data.validation:
                validation = self.engine.evaluate(models, seeds, "validation")
        records = [
            self._record(part, evaluate, *scores)
            for part, *scores in zip(parts, test, validation, strict=True)
        ]
        if self.observes:
            seen = [
                observe_neurons(net, part.seed, part.cohort.round, part.uploads, self.total) for part in parts
            ]
            self.observed = [ownership for ownership in seen if ownership is not None]
        # seeds share the work, so each gets an equal share of the time
        seconds = (time.perf_counter() - began) / len(records)
        return [record | {"seconds": seconds} for record in records]

    def _record(
        self, part: SeedRound, evaluate: bool, test: Score | None, validation: Score | None
    ) -> Record:
        uploads, downloads = part.uploads, part.downloads.values()
        # most methods send one download to all clients
        shared = {id(download): download for download in downloads}
        sizes = dict(zip(shared, message_sizes(self.net, [*shared.values()]), strict=True))
        record: Record = {"seed": part.seed, "round": part.cohort.round, "phase": part.phase}
        record |= {} if test is None else self.test(test)
        record |= {
            "train_loss": sum(upload.loss for upload in uploads) / len(uploads),
            "bytes_up": sum(message_sizes(self.net, uploads)),
            "bytes_down": sum(sizes[id(download)] for download in downloads),
        }
        record |= measure_ownership(uploads, each=self.total <= SHOWN_CLIENTS)
        # not below 1: of a network without neurons it is undefined
        if part.phase == "warmup" and not record["density"] < 1:
            self._warn("all masks are open: in this warmup every client trains the whole network")
        record |= self.method.measure(self.net, part.state)
        if validation is not None:
            # early stopping and searches use these metrics
            metrics = self.data.task.measure(validation.sums)
            record["validation"] = metrics | {"loss": validation.mean_loss}
            for name, value in metrics.items():
                if value is None:
                    self._warn(f"{name} is undefined on the validation samples")
        if part.left_out:
            record["left_out"] = part.left_out
        if evaluate:
            record |= self.personal(part) if self._has_personal else {}
            answered = [part.downloads[upload.client] for upload in uploads]
            record["update_cosine"] = update_cosine(self.net, uploads, answered, part.masks)
        return record

    def _warn(self, line: str) -> None:
        """Log a line, once in a run."""
        if line not in self._logged:
            self._logged.add(line)
            logging.getLogger("fedpews").warning("%s", line)

    def test(self, score: Score) -> dict[str, Any]:
        """The metrics on all test data, and on those of each client or site."""
        # stop here: a model with nan never recovers, and would fill the record with it
        loss = score.mean_loss
        if not math.isfinite(loss):
            raise RunFailed("the global model's loss is no longer finite; lower train.lr or train.server_lr")
        task = self.data.task
        metrics = task.measure(score.sums)
        for name, value in metrics.items():
            if value is None:
                self._warn(f"{name} is undefined on the test samples")
        counted = "correct" in score.sums and "seen" in score.sums
        record: dict[str, Any] = {}
        if "accuracy" in metrics:
            record["accuracy"] = metrics["accuracy"]
        elif counted:
            record["accuracy"] = accuracy(score.sums["correct"], score.sums["seen"])
        record |= {"loss": loss, "metrics": metrics}
        if score.clients:
            sums = [score.clients.get(client) for client in range(self.total)]
            values = [{} if client is None else task.measure(client) for client in sums]
            record["client_metrics"] = {name: [value.get(name) for value in values] for name in metrics}
            if counted:
                record["client_accuracy"] = [
                    None if client is None else accuracy(client["correct"], client["seen"]) for client in sums
                ]
            for name, value in metrics.items():
                without = [client for client in sorted(score.clients) if values[client][name] is None]
                if value is not None and without and not score.sites:
                    listed = list_names(self.data.names, without)
                    self._warn(f"{name} is undefined on the test samples of {listed}")
        elif self._counts is not None:
            record["client_accuracy"] = score.client_accuracy(self._counts)
        if score.sites:
            record["sites"] = {
                name: {**task.measure(sums), "loss": Score(sums).mean_loss, "samples": samples}
                for name, (samples, sums) in score.sites.items()
            }
        return record

    def personal(self, part: SeedRound) -> dict[str, Any]:
        """The metric of each client's personalised model, made of its memory and the next round's download.

        It is evaluated on the client's own test samples, or else on the classes it has.
        """
        method, seed, state, cohort = self.method, part.seed, part.state, part.cohort
        clients = range(self.total) if self.total <= SHOWN_CLIENTS else cohort.clients
        memories = {client: self.memories.get(seed, client) for client in clients}
        known = {client: memory for client, memory in memories.items() if memory is not None}
        # real sites keep their memories themselves
        chosen = tuple(known) or self.engine.remembering(seed, clients)
        following = replace(cohort, round=cohort.round + 1, clients=chosen)
        downloads = dict(zip(chosen, method.downloads(self.net, state, following), strict=True))
        if known:
            half, net = method.client(method.phase(state, following.round)), self.net.at(seed)
            models = {i: half.personal(net, downloads[i], memory) for i, memory in known.items()}
            values = score_personal(self.engine, self.data, seed, models)
        else:
            values = self.engine.evaluate_personal(seed, downloads)
        if not values:
            return {}
        name = personal_metric(self.data.task)
        record: dict[str, Any] = {f"personal_{name}": sum(values.values()) / len(values)}
        if self.total <= SHOWN_CLIENTS:
            record[f"client_personal_{name}"] = [values.get(client) for client in clients]
        return record


def personal_metric(task: Task) -> str:
    """The metric of personalised models: accuracy where it is measured, else the first metric."""
    is_measured = "correct" in task.ALWAYS or "accuracy" in task.metrics
    return "accuracy" if is_measured else short(task.metrics[0])


def score_personal(
    engine: Engine, data: Federation, seed: int, models: Mapping[int, Tree]
) -> dict[int, float]:
    """The ``personal_metric`` of each client's model, on its own test samples or else on the classes it has."""
    seeds, clients = [seed] * len(models), [*models]
    if data.task.classes_of(data.y) is not None:
        counts = data.counts()
        scores = engine.evaluate([*models.values()], seeds)
        return {i: score.client_accuracy(counts)[i] for i, score in zip(clients, scores, strict=True)}
    owners = clients if data.test_owner is not None else None
    scores = engine.evaluate([*models.values()], seeds, "test", owners)
    name = personal_metric(data.task)
    values = {i: data.task.measure(score.sums).get(name) for i, score in zip(clients, scores, strict=True)}
    return {client: value for client, value in values.items() if value is not None}


def measure_ownership(uploads: Sequence[Upload], each: bool = False) -> dict[str, Any]:
    """How much of the network a client owns, how much any client owns, and how much two clients have in common.

    In hidden neurons, or in single weights for a method that owns those. Overlap is the mean over pairs of
    |both| / |either|. With ``each``, also the share of every client of the cohort.
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
    # whole numbers, exact in single precision as long as no client owns 2²⁴ elements
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


def update_cosine(
    net: Network,
    uploads: Sequence[Upload],
    downloads: Sequence[Download],
    masks: Sequence[Mapping[str, Tensor] | None],
) -> float | None:
    """The mean cosine between the updates of two clients, on the elements both own; below 0 they cancel out.

    None if no two clients have an element in common, or if nothing moved.

    Args:
        masks: the elements that each upload owns; None is all of them.
    """
    # evenly spread over the cohort, not drawn: a resumed run compares the same clients
    chosen = range(0, len(uploads), max(1, -(-len(uploads) // COMPARED_CLIENTS)))
    pairs = [(downloads[i].params, uploads[i].params) for i in chosen]
    # FedPM uploads bits where it downloads scores: there is no update to compare
    names = tuple(
        name
        for name in net.trainable
        if all(name in start and name in end and end[name].is_floating_point() for start, end in pairs)
        and all(end[name].shape == start[name].shape for start, end in pairs)
    )
    starts = [{name: start[name] for name in names} for start, _ in pairs]
    return mean_cosine(starts, [end for _, end in pairs], [masks[i] for i in chosen], COMPARED_ELEMENTS)


def observe_neurons(
    net: Network, seed: int, round: int, uploads: Sequence[Upload], total: int
) -> Ownership | None:
    """The neurons that each client owned, and a histogram of θ; None without masks, or if the round is not recorded."""
    if any(upload.neurons is None for upload in uploads) or (round > EACH_ROUND_UP_TO and round % 10):
        return None
    owned = torch.stack([upload.neurons for upload in uploads if upload.neurons is not None])
    shared = [upload.extra[THETA]["neurons"] for upload in uploads if THETA in upload.extra]
    thetas = torch.stack(shared).float().cpu() if shared else None
    # (layers, BINS): how many θ of each layer are in each of ``BINS`` equal parts of 0 to 1
    histogram = [
        torch.histc(thetas[:, layer.start : layer.start + layer.size], BINS, 0, 1).long().tolist()
        for layer in net.graph.layers
        if thetas is not None
    ]
    clients = tuple(upload.client for upload in uploads)
    return Ownership.of(seed, round, clients, owned.cpu().numpy(), histogram or None, total)
