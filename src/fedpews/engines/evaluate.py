"""How good a model is on the common test set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import torch
from torch import Tensor

from fedpews.data.federation import Federation
from fedpews.neurons.network import Network
from fedpews.trees import Tree

CHUNK, HEAVY_CHUNK = 1000, 250
"""Test samples per pass. Constants, so that the numbers do not depend on the machine."""

HEAVY = 10**6
"""Operations a sample from which a network is heavy: more samples at once would only outgrow the caches."""


def chunk_size(net: Network) -> int:
    """How many samples to evaluate in one pass."""
    return HEAVY_CHUNK if net.flops > HEAVY else CHUNK


@dataclass(frozen=True)
class Score:
    """Counts over the test set, or a part of it."""

    correct: Tensor  # (classes,) samples of each class that were recognised
    seen: Tensor  # (classes,)
    loss: float  # summed over the samples
    sites: Mapping[str, tuple[int, int, float]] = field(default_factory=dict)
    """By the site's name, what it found on its own test samples: right, seen and loss."""

    def __add__(self, other: Score) -> Score:
        return Score(self.correct + other.correct, self.seen + other.seen, self.loss + other.loss)

    @property
    def accuracy(self) -> float:
        return int(self.correct.sum()) / int(
            self.seen.sum()
        )  # of tensors it would be single precision: 0.7 < 0.7

    @property
    def mean_loss(self) -> float:
        return self.loss / float(self.seen.sum())

    def client_accuracy(self, counts: Tensor) -> list[float]:
        """Accuracy at each client's own mix of classes; ``counts`` is (clients, classes)."""
        tested = self.seen > 0
        by_class = self.correct[tested].double() / self.seen[tested]
        mix = counts[:, tested].double()
        return ((mix @ by_class) / mix.sum(1).clamp_min(1)).tolist()


def score_chunk(net: Network, params: Tree, data: Federation, first: int) -> Score:
    """The score on one chunk of test samples, from ``first`` on."""
    last = first + chunk_size(net)
    x, y = data.test_x[first:last], data.test_y[first:last]
    if net.takes_channels_last:  # the order in which convolutions copy nothing
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        outputs = net.predict(params, x)
        loss = float(net.sample_loss(outputs, y).double().sum())
    right = y[outputs.argmax(1) == y]
    return Score(
        torch.bincount(right.cpu(), minlength=data.classes),
        torch.bincount(y.cpu(), minlength=data.classes),
        loss,
    )


def score_models(net: Network, models: Sequence[Tree], data: Federation, pool: Executor) -> list[Score]:
    """Each model on the whole test set, chunk by chunk over the pool's threads."""
    starts = range(0, len(data.test_y), chunk_size(net))
    parts = list(
        pool.map(
            lambda part: score_chunk(net, part[0], data, part[1]),
            [(model, start) for model in models for start in starts],
        )
    )
    return [reduce(add, parts[i : i + len(starts)]) for i in range(0, len(parts), len(starts))]
