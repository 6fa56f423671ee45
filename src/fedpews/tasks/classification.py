"""One class per sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.options import NotNegative
from fedpews.tasks import metrics
from fedpews.tasks.metrics import Metric
from fedpews.tasks.task import Tallies, Task


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One class per sample: labels (samples,) whole numbers from 0, outputs (samples, classes), cross-entropy.

    Args:
        classes: how many; by default the largest label plus one.
        class_weights: the weight in the loss of a sample of each class.
        label_smoothing: the share of a label that is spread over all classes.
    """

    classes: int | None = None
    class_weights: Annotated[tuple[NotNegative, ...], Field(min_length=1)] | None = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    name: ClassVar[str] = "classification"
    ALWAYS: ClassVar[tuple[str, ...]] = ("correct", "seen")
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric(("correct", "seen"), metrics.accuracy),
        "balanced_accuracy": Metric(("correct", "seen"), metrics.mean_share),
        "macro_f1": Metric(("confusion",), metrics.macro_f1),
        "auroc": Metric(("ranks",), metrics.auroc),
        "auprc": Metric(("ranks",), metrics.auprc),
        "sensitivity": Metric(("confusion",), metrics.sensitivity),
        "specificity": Metric(("confusion",), metrics.specificity),
        "calibration_error": Metric(("calibration",), metrics.calibration_error),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="none", label_smoothing=self.label_smoothing)

    def weigh(self, labels: Tensor) -> Tensor | None:
        if self.class_weights is None:
            return None
        return torch.tensor(self.class_weights, device=labels.device)[labels]

    def labels(self, y: Tensor, whose: str) -> Tensor:
        if y.is_floating_point() or y.is_complex():
            raise ConfigError(
                f"{whose}: y must hold integer labels, got {y.dtype}; for numbers choose task='regression', for "
                "several labels a sample task='multilabel'."
            )
        if y.ndim != 1:
            raise ConfigError(
                f"{whose}: x must be (samples, ...) and y (samples,); got y of shape {tuple(y.shape)}. For several "
                "labels a sample choose task='multilabel', 'segmentation' or 'tokens'."
            )
        if len(y) and int(y.min()) < 0:
            raise ConfigError(f"{whose}: label {int(y.min())} is below 0; labels count from 0.")
        return y.to(torch.int64)

    def width(self, y: Tensor) -> int:
        if self.classes is not None:
            return self.classes
        if self.class_weights is not None:
            return len(self.class_weights)
        return int(y.max()) + 1

    def largest(self, y: Tensor) -> int | None:
        return int(y.max())

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        if len(outputs) == 1 and outputs[0] >= width:
            return ""
        return (
            f"the data has labels 0 to {width - 1} but the model's output has shape {outputs}; "
            f"give the model {width} outputs"
        )

    def classes_of(self, y: Tensor) -> Tensor | None:
        return y

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        width = outputs.shape[1]
        predicted = outputs.argmax(1)

        def truth() -> Tensor:
            return labels[:, None] == torch.arange(width, device=labels.device)

        return {
            "correct": lambda: torch.bincount(labels[predicted == labels], minlength=width),
            "seen": lambda: torch.bincount(labels, minlength=width),
            "confusion": lambda: metrics.confusion(predicted, labels, width),
            "ranks": lambda: metrics.ranks(metrics.log_odds(outputs), truth()),
            "calibration": lambda: metrics.calibration(outputs.softmax(1), labels),
        }
