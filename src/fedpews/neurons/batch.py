"""The samples of one step, and means over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

SampleLoss = Callable[[Tensor, Tensor], Tensor]
SampleWeight = Callable[[Tensor], Tensor | None]
"""labels -> how much each sample weighs; None where all weigh the same."""

Term = Callable[[Tensor, Tensor], Tensor]
"""(features, outputs) -> one number per sample, or one for the batch."""


class Batch(NamedTuple):
    """Samples of one step. ``weight`` is 0 for padding, else 1; None when there is no padding."""

    x: Any  # a tensor, or a tuple or dict of tensors: the model's arguments
    y: Tensor
    weight: Tensor | None = None

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """The mean of one value per sample, padding left out; a batch that weighs nothing has mean 0."""
        if weights is None and self.weight is None:
            return values.mean()
        if weights is None or self.weight is None:
            weight = self.weight if weights is None else weights
            assert weight is not None
        else:
            weight = weights * self.weight
        summed = (values * weight).sum()
        if weights is None:
            return summed / weight.sum().clamp_min(1)
        total = weight.sum()
        return summed / torch.where(total > 0, total, 1)


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of each sample."""
    return F.cross_entropy(outputs, labels, reduction="none")
