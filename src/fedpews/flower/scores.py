"""How good a model is on a site's own samples: the sums that metrics are computed from, and how they are checked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from fedpews.engines.evaluate import Part
from fedpews.errors import ConfigError
from fedpews.flower.limits import FRAME, LARGEST_LOSS
from fedpews.methods.wire import BadMessage
from fedpews.tasks.metrics import Sums
from fedpews.tasks.task import Task

FORMAT = "fedpews.sums"

MOST_NUMBERS = 2**22
"""The most numbers in one sum: a histogram of 4096 bins for each of 500 classes."""


def score_records(scores: Mapping[Part, Mapping[int, Sums]]) -> dict[str, ArrayRecord]:
    """The sums over a site's samples as Flower records, by part of its data and seed; empty without such samples."""
    return {
        f"{part}-{seed}": ArrayRecord({name: _pack(value.double().numpy()) for name, value in sums.items()})
        for part, by_seed in scores.items()
        for seed, sums in by_seed.items()
    }


def least(task: Task, sums: Sums) -> Sums:
    """The least that the metrics need: right answers by class would show how often a site has each class.

    >>> from fedpews.tasks import Classification
    >>> least(Classification(), {"correct": torch.tensor([2, 1]), "seen": torch.tensor([3, 3])})
    {'correct': tensor([3]), 'seen': tensor([6])}
    """
    others = [
        task.METRICS[metric] for metric in task.metrics if metric in task.METRICS and metric != "accuracy"
    ]
    needed = {name for metric in others for name in metric.needs}
    return {
        name: value.sum().reshape(1) if name in ("correct", "seen") and name not in needed else value
        for name, value in sums.items()
    }


@dataclass
class ScoreCheck:
    """Reads sites' scores. A site may be wrong about its samples, but not about the number that it declared.

    Args:
        labels: the most labels that one sample may have: its pixels or tokens.
        sample: the sums of a few samples, which have the shapes of every site's; else those of the first site count.
    """

    task: Task
    labels: int
    sample: Sums = field(default_factory=dict)

    def __post_init__(self) -> None:
        if kept := [name for name in self.task.sum_names() if name.startswith("kept_")]:
            raise ConfigError(
                f"{' and '.join(self.task.metrics)}: one of these needs every sample's output ({', '.join(kept)}), "
                "which does not leave a site. Give the server a test set (test=FILE.npz), or choose other metrics."
            )

    @property
    def most_bytes(self) -> int:
        """The most bytes that the sums of one seed and part of the data can have."""
        return sum(8 * value.numel() for value in self.sample.values()) + FRAME

    def read(self, content: RecordDict, part: Part, seeds: Iterable[int], declared: int) -> dict[int, Sums]:
        """The sums for each seed's model, over exactly as many samples as the site declared; {} for none.

        The content comes from the network.
        """
        sums = {}
        for seed in seeds:
            record = content.get(f"{part}-{seed}")
            if not isinstance(record, ArrayRecord):
                raise BadMessage(f"it has no score on its {part} samples for seed {seed}")
            sums[seed] = self._check({name: _unpack(name, record[name]) for name in record}, declared)
        return sums

    def _check(self, sums: Sums, declared: int) -> Sums:
        if not declared:
            if sums:
                raise BadMessage("it has a score, and declared no samples for it")
            return {}
        wanted = self.task.sum_names()
        if set(sums) != set(wanted):
            raise BadMessage(f"its score is made of {sorted(sums)!r:.200}, not of {sorted(wanted)}")
        for name, value in sums.items():
            if not bool(torch.isfinite(value).all()):
                raise BadMessage(f"its score has numbers in {name} that are not finite")
            shape = tuple(self.sample.get(name, value).shape)
            if shape != tuple(value.shape):
                raise BadMessage(f"its score has {name} of shape {tuple(value.shape)}, others have {shape}")
        if sums["loss"].dim() or sums["weight"].dim():
            raise BadMessage("its score has a loss or a weight that is no single number")
        heaviest = declared * self.labels * max(1.0, *(getattr(self.task, "class_weights", None) or (1.0,)))
        loss, weight = float(sums["loss"]), float(sums["weight"])
        if not 0 <= weight <= heaviest or not 0 <= loss <= LARGEST_LOSS * max(weight, 1):
            raise BadMessage(f"its score makes no sense: loss {loss:g} over {weight:g}")
        if self._counts_samples() and weight != declared:
            raise BadMessage(f"its score is over {weight:g} samples, and it declared {declared}")
        if "seen" in sums:
            self._check_counts(sums, declared)
        self.sample = self.sample or sums
        return sums

    def _counts_samples(self) -> bool:
        """Whether every sample has weight 1."""
        return type(self.task).weigh is Task.weigh or getattr(self.task, "class_weights", ()) is None

    def _check_counts(self, sums: Sums, declared: int) -> None:
        right, seen = sums["correct"], sums["seen"]
        whole = bool((right == right.round()).all()) and bool((seen == seen.round()).all())
        if right.shape != seen.shape or not whole or not bool(((right >= 0) & (right <= seen)).all()):
            raise BadMessage("its right answers are more than its answers, or not counts")
        total, classed = int(seen.sum()), self.task.name == "classification"
        if total > declared * self.labels or (classed and total != declared):
            raise BadMessage(f"its score is over {total} answers, and it declared {declared} samples")


def _pack(values: NDArray[np.float64]) -> Array:
    data = np.ascontiguousarray(values, "<f8").tobytes()
    return Array(dtype="float64", shape=tuple(values.shape), stype=FORMAT, data=data)


def _unpack(name: str, array: Array) -> torch.Tensor:
    shape = tuple(array.shape)
    if array.stype != FORMAT or any(type(size) is not int or size < 0 for size in shape):
        raise BadMessage(f"its score has {name!r:.40} in a form that is not known")
    # beside a zero a size is lost in the product, and may still be larger than numpy allows
    if max((math.prod(shape), *shape)) > MOST_NUMBERS or len(array.data) != 8 * math.prod(shape):
        raise BadMessage(f"its score has {len(array.data)} bytes for {name!r:.40} of shape {shape!r:.60}")
    return torch.from_numpy(np.frombuffer(array.data, "<f8").reshape(shape).copy())
