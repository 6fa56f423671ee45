"""The contract of an engine: the jobs it gets and the results it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import reduce

import torch

from fedpews.data.federation import Federation
from fedpews.engines.augment import Augment
from fedpews.engines.evaluate import Part, Score, chunk_size, cut, score_chunk
from fedpews.methods.contract import ClientHalf, Download, Upload
from fedpews.neurons.modules import channels_last
from fedpews.neurons.network import Network
from fedpews.tasks.metrics import Sums, add
from fedpews.trees import Nest, Tree


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
        if net.survives_channels_last:
            # once for each model: convolutions would copy their weights for every chunk
            models = [{name: channels_last(value) for name, value in model.items()} for model in models]
        chunks = [cut(data, part, chunk_size(net), owner) for owner in owners or [None] * len(models)]
        passes = [
            (net.at(seed), model, data, part, rows)
            for seed, model, own in zip(seeds, models, chunks, strict=True)
            for _, rows in own
        ]
        sums = self._pool.map(lambda arguments: score_chunk(*arguments), passes)
        scores = []
        for own in chunks:
            by_owner: dict[int | None, Sums] = {}
            each = [next(sums) for _ in own]
            for (owner, _), one in zip(own, each, strict=True):
                by_owner[owner] = add(by_owner[owner], one) if owner in by_owner else one
            clients = {owner: total for owner, total in by_owner.items() if owner is not None}
            scores.append(Score(reduce(add, each), clients))
        return scores

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        """The clients whose memory only the engine can reach."""
        return ()

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        """The metric of these clients' personal models, each evaluated by its client on the classes it has."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release threads or processes."""
