"""Scores of a model on a site's samples: the sums that metrics are computed from, and their checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import ArrayRecord, RecordDict
from safetensors.torch import load, save

from fedpews.engines.engine import Part
from fedpews.errors import ConfigError
from fedpews.flower.limits import FRAME, LARGEST_LOSS
from fedpews.flower.messages import pack, unpack
from fedpews.methods.wire import BadMessage
from fedpews.tasks.metrics import Sums
from fedpews.tasks.task import Task


def score_records(scores: Mapping[Part, Mapping[int, Sums]]) -> dict[str, ArrayRecord]:
    """The sums over a site's samples as Flower records, by part of its data and seed; empty without such samples."""
    return {
        f"{part}-{seed}": pack(save({name: value.double().contiguous() for name, value in sums.items()}))
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
        if kept := [name for name in self.task.sum_names if name.startswith("kept_")]:
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
        scores = {}
        for seed in seeds:
            try:
                sums = {
                    name: value.double() for name, value in load(unpack(content, f"{part}-{seed}")).items()
                }
                scores[seed] = self._check(sums, declared)
            except BadMessage as error:
                raise BadMessage(f"its score on its {part} samples for seed {seed}: {error}") from None
            except Exception as error:  # bytes from outside may raise anything
                raise BadMessage(
                    f"its score cannot be read: {type(error).__name__}: {error!s:.200}"
                ) from error
        return scores

    def _check(self, sums: Sums, declared: int) -> Sums:
        if not declared:
            if sums:
                raise BadMessage("it declared no samples")
            return {}
        wanted = self.task.sum_names
        if set(sums) != set(wanted):
            raise BadMessage(f"it is made of {sorted(sums)!r:.200}, not of {sorted(wanted)}")
        for name, value in sums.items():
            if not bool(torch.isfinite(value).all()):
                raise BadMessage(f"{name} has numbers that are not finite")
            shape = tuple(self.sample.get(name, value).shape)
            if shape != tuple(value.shape):
                raise BadMessage(f"{name} has the shape {tuple(value.shape)}, others have {shape}")
        if sums["loss"].dim() or sums["weight"].dim():
            raise BadMessage("its loss or its weight is no single number")
        heaviest = declared * self.labels * max(1.0, *(getattr(self.task, "class_weights", None) or (1.0,)))
        loss, weight = float(sums["loss"]), float(sums["weight"])
        if not 0 <= weight <= heaviest or not 0 <= loss <= LARGEST_LOSS * max(weight, 1):
            raise BadMessage(f"loss {loss:g} over {weight:g} makes no sense")
        if self._counts_samples() and weight != declared:
            raise BadMessage(f"it is over {weight:g} samples, and the site declared {declared}")
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
            raise BadMessage(f"it is over {total} answers, and the site declared {declared} samples")
