"""Any number of labels per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.tasks.metrics import Metric, accuracy, auprc, auroc, mean_share, ranks
from fedpews.tasks.task import Tallies, Task


@dataclass(frozen=True, kw_only=True)
class Multilabel(Task):
    """Any number of labels per sample: y (samples, labels) of 0 and 1, as many outputs, each with its own sigmoid.

    A sample's loss is the mean over its labels. Metrics are means over the labels for which they are defined; a
    label is predicted from a probability of one half.

    Args:
        positive_weights: the weight of each label's presence against its absence.
    """

    positive_weights: tuple[float, ...] | None = None

    name: ClassVar[str] = "multilabel"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "auroc": Metric(("ranks",), auroc),
        "auprc": Metric(("ranks",), auprc),
        # counts: true positives, false positives, false negatives, true negatives, (4, labels)
        "accuracy": Metric(("counts",), lambda counts: accuracy(counts[0] + counts[3], counts)),
        "macro_f1": Metric(("counts",), lambda c: mean_share(2 * c[0], 2 * c[0] + c[1] + c[2])),
        "sensitivity": Metric(("counts",), lambda counts: mean_share(counts[0], counts[0] + counts[2])),
        "specificity": Metric(("counts",), lambda counts: mean_share(counts[3], counts[3] + counts[1])),
        "exact_match": Metric(("exact", "weight"), lambda exact, weight: float(exact / weight)),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        weights = self.positive_weights
        weight = None if weights is None else torch.tensor(weights, device=outputs.device)
        losses = F.binary_cross_entropy_with_logits(outputs, labels, reduction="none", pos_weight=weight)
        return losses.mean(1)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        if y.ndim != 2:
            raise ConfigError(f"{whose}: y must be (samples, labels) of 0 and 1; got shape {tuple(y.shape)}.")
        wrong = y[(y != 0) & (y != 1)]
        if len(wrong):
            raise ConfigError(f"{whose}: y must hold 0 (absent) and 1 (present); got {float(wrong[0])}.")
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
        predicted, true = outputs > 0, labels > 0.5

        def counts() -> Tensor:
            cells = (predicted & true, predicted & ~true, ~predicted & true, ~predicted & ~true)
            return torch.stack([cell.sum(0) for cell in cells])

        return {
            "counts": counts,
            "exact": lambda: (predicted == true).all(1).sum().double(),
            "ranks": lambda: ranks(outputs, true),
        }
