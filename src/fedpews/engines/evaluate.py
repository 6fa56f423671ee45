"""How good a model is on the test samples: all of them, and each client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import reduce
from itertools import repeat
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
    own_correct: Tensor | None = None  # (clients,) of each client's own test samples, where they are known
    own_seen: Tensor | None = None  # (clients,)
    sites: Mapping[str, tuple[int, int, float]] = field(default_factory=dict, kw_only=True)
    """By the site's name, what it found on its own test samples: right, seen and loss."""

    def __add__(self, other: Score) -> Score:
        own = [
            None if mine is None or theirs is None else mine + theirs
            for mine, theirs in ((self.own_correct, other.own_correct), (self.own_seen, other.own_seen))
        ]
        return Score(self.correct + other.correct, self.seen + other.seen, self.loss + other.loss, *own)

    @property
    def accuracy(self) -> float:
        # whole numbers first: a ratio of tensors would be single precision, where 0.7 < 0.7
        return int(self.correct.sum()) / int(self.seen.sum())

    @property
    def mean_loss(self) -> float:
        return self.loss / float(self.seen.sum())

    def client_accuracy(self, counts: Tensor) -> list[float]:
        """Each client's accuracy on its own test samples, or else at its own mix of classes of the common ones.

        ``counts`` is (clients, classes).
        """
        tested = self.seen > 0
        by_class = self.correct[tested].double() / self.seen[tested]
        mix = counts[:, tested].double()
        accuracy = (mix @ by_class) / mix.sum(1).clamp_min(1)
        if self.own_correct is not None and self.own_seen is not None:
            own = self.own_correct.double() / self.own_seen.clamp_min(1)
            accuracy = torch.where(self.own_seen > 0, own, accuracy)
        return accuracy.tolist()


def score_chunk(net: Network, params: Tree, data: Federation, first: int) -> Score:
    """The score on one chunk of test samples, from ``first`` on."""
    last = first + chunk_size(net)
    x, y = data.test_x[first:last], data.test_y[first:last]
    # images: channels last is the order in which convolutions copy nothing
    if x.dim() == 4 and net.survives_channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        outputs, losses = net.evaluate(params, x, y)
        loss = float(losses.cpu().double().sum())  # not every device has double precision
    hit = outputs.argmax(1) == y
    own: list[Tensor] = []
    if data.test_owner is not None:
        owner = data.test_owner[first:last]
        own = [_count(owner[kept] + 1, len(data) + 1)[1:] for kept in (hit, slice(None))]
    return Score(_count(y[hit], data.classes), _count(y, data.classes), loss, *own)


def _count(values: Tensor, kinds: int) -> Tensor:
    return torch.bincount(values.cpu(), minlength=kinds)


def score_models(
    net: Network, models: Sequence[Tree], seeds: Sequence[int], data: Federation, pool: Executor
) -> list[Score]:
    """Each model on the whole test set, chunk by chunk over the pool's threads; ``seeds`` says of which run."""
    starts = range(0, len(data.test_y), chunk_size(net))
    nets = map(net.at, seeds)
    work = [(*run, start) for run in zip(nets, models, strict=True) for start in starts]
    each, params, firsts = zip(*work, strict=True)
    parts = list(pool.map(score_chunk, each, params, repeat(data), firsts))
    return [reduce(add, parts[i : i + len(starts)]) for i in range(0, len(parts), len(starts))]
