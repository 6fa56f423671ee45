"""The contract of an engine: the jobs it gets, the results it returns, and the scores of models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.data.inputs import take
from fedpews.engines.augment import Augment
from fedpews.engines.hardware import return_freed_memory
from fedpews.engines.pooling import fast_pooling
from fedpews.errors import ClientDiverged
from fedpews.methods.contract import ClientHalf, Download, Upload
from fedpews.neurons.modules import channels_last
from fedpews.neurons.network import Network
from fedpews.tasks.metrics import Sums, accuracy, add
from fedpews.torch_private import tree_map_only
from fedpews.trees import Nest, Tree, leaves, stacks

LIMIT = 1e15
"""The largest weight from which training can continue: the square of a weight 20,000 times as large is infinite."""

SQUARES = LIMIT**2
"""The same for squares: running variances, second moments."""

CHUNK, HEAVY_CHUNK = 2500, 250
"""Test samples per pass. Constants, so that the numbers do not depend on the machine."""

HEAVY = 10**6
"""Operations a sample from which a network is heavy: more samples at once would only outgrow the caches."""

OWNERS = 100
"""Up to so many clients, each client's own samples are scored separately."""

Part = Literal["test", "validation"]

Chunk = tuple[int | None, Tensor | slice]
"""The samples of one pass, and the client that they belong to, or None."""


@dataclass(frozen=True)
class Schedule:
    """How every client trains in a round."""

    batch_size: int
    epochs: int | None = 1
    steps: int | None = None  # instead of epochs
    augment: Augment | None = None


@dataclass(frozen=True)
class Job:
    """One client's part of one round."""

    seed: int  # of the run
    client: int
    half: ClientHalf
    download: Download
    memory: Nest | None
    lr: float


@dataclass(frozen=True)
class Done:
    """The result of a job."""

    seed: int
    client: int
    memory: Nest
    upload: Upload


@dataclass(frozen=True)
class Diverged:
    """A job without a result: the client's numbers are not finite."""

    seed: int
    client: int
    reason: str


@dataclass(frozen=True)
class Score:
    """Sums over the samples of a test set, and over those of each client that has its own."""

    sums: Sums
    clients: Mapping[int, Sums] = field(default_factory=dict)
    # by the site's name: how many test samples of its own it has, and the sums over them
    sites: Mapping[str, tuple[int, Sums]] = field(default_factory=dict, kw_only=True)

    @property
    def mean_loss(self) -> float:
        """Over the samples, each weighing what the task says."""
        return float(self.sums["loss"]) / float(self.sums["weight"])

    def client_accuracy(self, counts: Tensor) -> list[float]:
        """Each client's accuracy on its own test samples, or else on the common ones at its own mix of classes.

        For one class per sample; ``counts`` is (clients, classes).
        """
        width = counts.shape[1]
        correct, seen = self.sums["correct"][:width], self.sums["seen"][:width]
        tested = seen > 0
        by_class = correct[tested].double() / seen[tested]
        mix = counts[:, tested].double()
        accuracies: list[float] = ((mix @ by_class) / mix.sum(1).clamp_min(1)).tolist()
        for client, sums in self.clients.items():
            accuracies[client] = accuracy(sums["correct"], sums["seen"])
        return accuracies


class Engine(ABC):
    """Runs the clients of a round. By default models are scored here, chunk by chunk over the engine's threads."""

    name: str
    net: Network
    data: Federation
    _pool: Executor

    @abstractmethod
    def train(self, jobs: Sequence[Job]) -> Sequence[Done | Diverged]:
        """Every job, in the order given; the numbers depend on the job alone."""

    def made_with(self) -> dict[str, str]:
        """What its numbers depend on besides the experiment; a resumed run has equal numbers only with the same."""
        return {
            "engine": self.name,
            "torch": torch.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
        }

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        """Train as in the earlier rounds of a resumed run, or raise an error, unless it may change."""
        return

    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: Part = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        """The score of each model on the test or validation data.

        Args:
            seeds: the run that each model belongs to.
            owners: for each model the client on whose own samples it is scored; None is all samples.
        """
        net, data = self.net, self.data
        chunks = [
            self._chunks[part] if owner is None else cut(data, part, chunk_size(net), owner)
            for owner in owners or [None] * len(models)
        ]
        passes = [
            (net.at(seed), model, data, part, rows)
            for seed, model, pieces in zip(seeds, models, chunks, strict=True)
            for _, rows in pieces
        ]
        sums = self._pool.map(lambda arguments: score_chunk(*arguments), passes)
        scores = []
        for pieces in chunks:
            by_owner: dict[int | None, Sums] = {}
            each = [next(sums) for _ in pieces]
            for (owner, _), new in zip(pieces, each, strict=True):
                by_owner[owner] = add(by_owner[owner], new) if owner in by_owner else new
            clients = {owner: total for owner, total in by_owner.items() if owner is not None}
            scores.append(Score(reduce(add, each), clients))
        return_freed_memory()
        return scores

    @cached_property
    def _chunks(self) -> dict[Part, list[Chunk]]:
        """All test and all validation data, which do not change."""
        size = chunk_size(self.net)
        return {"test": cut(self.data, "test", size), "validation": cut(self.data, "validation", size)}

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        """The clients whose memory only the engine can reach."""
        return ()

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        """The metric of these clients' personal models, each evaluated by its client on the classes it has."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release threads or processes."""


def chunk_size(net: Network) -> int:
    """How many samples to evaluate in one pass."""
    return HEAVY_CHUNK if net.flops > HEAVY else CHUNK


def cut(data: Federation, part: Part, size: int, owner: int | None = None) -> list[Chunk]:
    """The test or validation data in chunks of one pass.

    With ``owner`` only that client's samples.
    """
    owned = data.test_clients if part == "test" else data.validation
    if not owned:
        return [(None, slice(first, first + size)) for first in range(0, len(data.test_y), size)]
    groups: dict[int | None, Tensor] = {client: rows for client, rows in enumerate(owned) if len(rows)}
    if owner is not None:
        groups = {owner: owned[owner]}
    elif len(groups) > OWNERS:
        groups = {None: torch.cat(owned)}
    if part == "test" and owner is None:
        mine = torch.zeros(len(data.test_y), dtype=torch.bool, device=data.test_y.device)
        mine[torch.cat(owned)] = True
        left = (~mine).nonzero().flatten()
        groups[None] = torch.cat([groups[None], left]) if None in groups else left
    return [
        (client, rows) for client, all_rows in groups.items() for rows in all_rows.split(size) if len(rows)
    ]


def score_chunk(net: Network, params: Tree, data: Federation, part: Part, rows: Tensor | slice) -> Sums:
    """The sums over one chunk of samples."""
    inputs, labels = (data.test_x, data.test_y) if part == "test" else (data.x, data.y)
    x = take(inputs, rows)
    with torch.no_grad(), fast_pooling(net):
        # images: channels last is the order in which convolutions copy nothing
        if net.survives_channels_last:
            x = tree_map_only(Tensor, channels_last, x)
        return data.task.sums(net.predict(params, x), labels[rows])


def sort_out(net: Network, outcomes: Sequence[Done | Diverged]) -> tuple[list[Done], list[Diverged]]:
    """The results that can be averaged, and those that cannot: not finite, or so large that the next step would not be.

    A client's loss may still be finite when its weights or its memory are not, and an average with one such client
    makes all others diverge in the next round.
    """
    finished = [outcome for outcome in outcomes if isinstance(outcome, Done)]
    limits = dict.fromkeys(net.trainable, LIMIT)
    # tensors of one name and shape are stacked: with many small clients calls cost more than numbers
    alike: dict[tuple[Any, ...], list[tuple[int, Tensor]]] = {}
    for i, done in enumerate(finished):
        tensors = [(name, value, limits.get(name, SQUARES)) for name, value in done.upload.params.items()]
        for kept in (done.upload.extra, done.memory):
            tensors += [(name, value, SQUARES) for name, value in leaves(kept)]
        for name, value, limit in tensors:
            if value.is_floating_point() and value.numel():
                alike.setdefault((name, limit, value.shape), []).append((i, value))
    beyond: dict[int, str] = {}  # index of a result -> the first of its tensors that is too large
    for (name, limit, _), members in alike.items():
        rows = iter(members)
        for stacked in stacks([value for _, value in members]):
            indices = [i for i, _ in islice(rows, len(stacked))]
            flat = stacked.reshape(-1)
            # the sum of squares takes a third of the time: below LIMIT², every element is below LIMIT
            if flat @ flat < SQUARES:
                continue
            # torch.aminmax would read them once instead of twice, and takes ten times as long
            for i, size in zip(indices, flat.view(len(stacked), -1).abs().amax(1).tolist(), strict=True):
                # NaN is no smaller than the limit either
                if not size <= limit:
                    beyond.setdefault(i, name)
    bad = [outcome for outcome in outcomes if isinstance(outcome, Diverged)]
    for i, name in sorted(beyond.items()):
        reason = f"{name} is not finite any more, or beyond {LIMIT:g}"
        bad.append(Diverged(finished[i].seed, finished[i].client, reason))
    return [done for i, done in enumerate(finished) if i not in beyond], bad


def explain(bad: Sequence[Diverged], jobs: Sequence[Job]) -> ClientDiverged:
    """The error that names the client that diverged, the round, and what to do."""
    job = next(job for job in jobs if (job.seed, job.client) == (bad[0].seed, bad[0].client))
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return ClientDiverged(
        f"client {job.client} diverges in round {job.download.round} of seed {job.seed}: {bad[0].reason}{more}; lower "
        f"train.lr (now {job.lr:g}), limit gradients with train.clip_norm, check the scale of its inputs, or set "
        "train.diverged to 'leave-out'"
    )
