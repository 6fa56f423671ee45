"""What the server hands to an engine, and what it gets back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import torch

from fedpews.data.federation import Federation
from fedpews.engines.augment import Augment
from fedpews.engines.evaluate import Part, Score, score_models
from fedpews.methods.contract import ClientHalf, Download, Upload
from fedpews.neurons.network import Network
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
    """A job without a result: the client's numbers broke down."""

    seed: int
    client: int
    reason: str


class Engine(ABC):
    """Runs the clients of a round on this machine."""

    name: str
    evaluates_in_training: bool = False
    """Whether the last ``train`` also evaluated the models it started from, so that ``evaluate`` knows their scores."""

    @abstractmethod
    def train(self, jobs: Sequence[Job]) -> Sequence[Done | Diverged]:
        """Every job, in the order given; the numbers depend on the job alone."""

    def made_with(self) -> dict[str, str]:
        """What its numbers depend on besides the experiment; a run goes on to the same ones only with the same."""
        return {
            "engine": self.name,
            "torch": torch.__version__,
            "processor": torch.backends.cpu.get_cpu_capability(),
        }

    def go_on(self, made_with: Mapping[str, str], *, may_change: bool) -> None:
        """Keep to how earlier rounds were trained; what cannot be kept to is an error, unless it may change."""
        return

    @abstractmethod
    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: Part = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        """Each model on a part of the data: all of it, or what its owner (a client) has of it.

        ``seeds`` says whose run each is of.
        """

    def remembering(self, seed: int, clients: Sequence[int]) -> tuple[int, ...]:
        """The clients that keep a memory where only the engine can reach it."""
        return ()

    def evaluate_personal(self, seed: int, downloads: Mapping[int, Download]) -> dict[int, float]:
        """These clients' own models, each evaluated by its client on the classes it has."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release threads or processes."""


class LocalEngine(Engine):
    """An engine that has the data, and threads of its own."""

    net: Network
    data: Federation
    _pool: Executor

    def evaluate(
        self,
        models: Sequence[Tree],
        seeds: Sequence[int],
        part: Part = "test",
        owners: Sequence[int | None] | None = None,
    ) -> list[Score]:
        return score_models(self.net, models, seeds, self.data, self._pool, part, owners)
