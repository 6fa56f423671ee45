"""Any number of labels per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.tasks import sums
from fedpews.tasks.contract import Metric, Tallies, Task


def _accuracy(counts: Tensor) -> float:
    return sums.accuracy(counts[0] + counts[3], counts)


def _macro_f1(counts: Tensor) -> float:
    hits, false, missed, _ = counts
    return sums.mean_share(2 * hits, 2 * hits + false + missed)


def _sensitivity(counts: Tensor) -> float:
    return sums.mean_share(counts[0], counts[0] + counts[2])


def _specificity(counts: Tensor) -> float:
    return sums.mean_share(counts[3], counts[3] + counts[1])


@dataclass(frozen=True, kw_only=True)
class Multilabel(Task):
    """Any number of labels per sample: y (samples, labels) of 0 and 1, as many outputs, each with its own sigmoid.

    A sample's loss is the mean over its labels. Metrics are means over the labels for which they are defined; a
    label is predicted from a probability of one half.

    Args:
        positive_weights: how much the presence of each label weighs against its absence.
    """

    positive_weights: tuple[float, ...] | None = None

    name: ClassVar[str] = "multilabel"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "auroc": Metric(("ranks",), sums.auroc),
        "auprc": Metric(("ranks",), sums.auprc),
        "accuracy": Metric(("counts",), _accuracy),
        "macro_f1": Metric(("counts",), _macro_f1),
        "sensitivity": Metric(("counts",), _sensitivity),
        "specificity": Metric(("counts",), _specificity),
        "exact_match": Metric(("exact", "weight"), lambda exact, weight: float(exact / weight)),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        weights = self.positive_weights
        heavier = None if weights is None else torch.tensor(weights, device=outputs.device)
        every = F.binary_cross_entropy_with_logits(outputs, labels, reduction="none", pos_weight=heavier)
        return every.mean(1)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        if y.ndim != 2:
            raise ConfigError(f"{whose}: y must be (samples, labels) of 0 and 1; got shape {tuple(y.shape)}.")
        if not bool(((y == 0) | (y == 1)).all()):
            raise ConfigError(f"{whose}: y must hold 0 (absent) and 1 (present); got {_odd(y)}.")
        return y.to(torch.float32)

    def width(self, y: Tensor) -> int:
        return y.shape[1]

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        if outputs == (width,):
            return ""
        return f"the data has {width} labels a sample but the model's output has shape {outputs}"

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        said, true = outputs > 0, labels > 0.5

        def counts() -> Tensor:
            cells = (said & true, said & ~true, ~said & true, ~said & ~true)
            return torch.stack([cell.sum(0) for cell in cells])

        return {
            "counts": counts,
            "exact": lambda: (said == true).all(1).sum().double(),
            "ranks": lambda: sums.ranks(outputs, true),
        }


def _odd(y: Tensor) -> float:
    return float(y[(y != 0) & (y != 1)].flatten()[0])
