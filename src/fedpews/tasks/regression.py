"""Numbers to predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.tasks.metrics import Metric
from fedpews.tasks.task import Tallies, Task

LOSSES: dict[str, Callable[..., Tensor]] = {"mse": F.mse_loss, "mae": F.l1_loss, "huber": F.huber_loss}


def _mse(table: Tensor) -> float:
    return float((table[2] / table[0]).mean())


def _r2(table: Tensor) -> float:
    """1 − residual over total variance, the mean over the numbers predicted; NaN where labels do not vary."""
    samples, _, squares, labels, square_labels = table
    total = square_labels - labels.square() / samples
    known = total > 1e-12 * square_labels.clamp_min(1e-300)
    return float((1 - squares[known] / total[known]).mean())


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Numbers to predict: y (samples,) or (samples, numbers) floating point, as many outputs.

    Args:
        loss_kind: the squared error, the absolute error, or Huber's.
    """

    loss_kind: Literal["mse", "mae", "huber"] = "mse"

    name: ClassVar[str] = "regression"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "mae": Metric(("errors",), lambda table: float((table[1] / table[0]).mean())),
        "rmse": Metric(("errors",), lambda table: _mse(table) ** 0.5),
        "mse": Metric(("errors",), _mse),
        "r2": Metric(("errors",), _r2),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        losses = LOSSES[self.loss_kind](outputs.reshape(labels.shape), labels, reduction="none")
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses

    def labels(self, y: Tensor, whose: str) -> Tensor:
        if y.is_complex() or y.dtype == torch.bool:
            raise ConfigError(f"{whose}: y must hold numbers, got {y.dtype}.")
        if not bool(torch.isfinite(y).all()):
            bad = ~torch.isfinite(y.reshape(len(y), -1)).all(1)
            raise ConfigError(
                f"{whose}: y has NaN or infinite values in {int(bad.sum())} of {len(y)} samples, "
                f"first in sample {int(bad.nonzero()[0])}; clean them first."
            )
        return y.to(torch.float32)

    def width(self, y: Tensor) -> int:
        return y[0].numel()

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        if torch.Size(outputs).numel() == torch.Size(labels).numel():
            return ""
        return (
            f"the data has {width} number{'s' * (width != 1)} a sample to predict but the model's output has shape "
            f"{outputs}; give the model {width} output{'s' * (width != 1)}"
        )

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        def errors() -> Tensor:
            y = labels.double().reshape(len(labels), -1)
            error = outputs.double().reshape(y.shape) - y
            rows = (torch.ones_like(y), error.abs(), error.square(), y, y.square())
            return torch.stack([row.sum(0) for row in rows])

        return {"errors": errors}
