"""The tasks that ship: classification, multilabel, regression, segmentation and tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.options import NotNegative
from fedpews.tasks import metrics
from fedpews.tasks.metrics import Metric, Tallies, count_classes, mean_share
from fedpews.tasks.task import Task


def _whole_numbers(y: Tensor, whose: str, wanted: str, fits: bool, ignored: int | None = None) -> Tensor:
    """Classes as int64, or a ConfigError if they have another type or shape, or one is below 0."""
    if y.is_floating_point() or y.is_complex() or not fits:
        raise ConfigError(f"{whose}: y must be {wanted}; got {y.dtype} of shape {tuple(y.shape)}.")
    y = y.to(torch.int64)
    counted = y if ignored is None else y[y != ignored]
    if counted.numel() and int(counted.min()) < 0:
        hint = "" if ignored is None else "; if it is not to count, set task.ignore_index"
        raise ConfigError(f"{whose}: label {int(counted.min())} is below 0{hint}.")
    return y


def _misfit(fits: bool, outputs: tuple[int, ...], wanted: tuple[int, ...]) -> str:
    if fits:
        return ""
    return f"the data needs a model with outputs of shape {wanted}; this model's have shape {outputs}"


@dataclass(frozen=True, kw_only=True)
class Classification(Task):
    """One class per sample: labels (samples,) whole numbers from 0, outputs (samples, classes), cross-entropy.

    Args:
        classes: number of classes; by default the largest label plus one.
        class_weights: weight of each class in the loss.
        label_smoothing: share of a label that is spread over all classes.
    """

    classes: int | None = None
    class_weights: Annotated[tuple[NotNegative, ...], Field(min_length=1)] | None = None
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0

    name: ClassVar[str] = "classification"
    ALWAYS: ClassVar[tuple[str, ...]] = ("correct", "seen")
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric(("correct", "seen"), metrics.accuracy),
        "balanced_accuracy": Metric(("correct", "seen"), mean_share),
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
        wanted = (
            "(samples,) of integer labels (for numbers choose task='regression', for several labels a sample "
            "'multilabel', 'segmentation' or 'tokens')"
        )
        return _whole_numbers(y, whose, wanted, y.ndim == 1)

    def width(self, y: Tensor) -> int:
        if self.classes is not None:
            return self.classes
        return int(y.max()) + 1 if self.class_weights is None else len(self.class_weights)

    def largest(self, y: Tensor) -> int | None:
        return int(y.max())

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        return _misfit(len(outputs) == 1 and outputs[0] >= width, outputs, (width,))

    def classes_of(self, y: Tensor) -> Tensor | None:
        return y

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        width, predicted = outputs.shape[1], outputs.argmax(1)

        def ranks() -> Tensor:
            truth = labels[:, None] == torch.arange(width, device=labels.device)
            return metrics.ranks(metrics.log_odds(outputs), truth)

        return {
            **count_classes(predicted, labels, width),
            "ranks": ranks,
            "calibration": lambda: metrics.calibration(outputs.softmax(1), labels),
        }


@dataclass(frozen=True, kw_only=True)
class Multilabel(Task):
    """Any number of labels per sample: y (samples, labels) of 0 and 1, as many outputs, each with its own sigmoid.

    A sample's loss is the mean over its labels. Metrics are means over the labels for which they are defined; a
    label is predicted from a probability of one half.

    Args:
        positive_weights: weight of the positive samples of each label in the loss.
    """

    positive_weights: tuple[float, ...] | None = None

    name: ClassVar[str] = "multilabel"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "auroc": Metric(("ranks",), metrics.auroc),
        "auprc": Metric(("ranks",), metrics.auprc),
        # counts: true positives, false positives, false negatives, true negatives, (4, labels)
        "accuracy": Metric(("counts",), lambda c: metrics.accuracy(c[0] + c[3], c)),
        "macro_f1": Metric(("counts",), lambda c: mean_share(2 * c[0], 2 * c[0] + c[1] + c[2])),
        "sensitivity": Metric(("counts",), lambda c: mean_share(c[0], c[0] + c[2])),
        "specificity": Metric(("counts",), lambda c: mean_share(c[3], c[3] + c[1])),
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
        return _misfit(outputs == (width,), outputs, (width,))

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        predicted, true = outputs > 0, labels > 0.5
        cells = (predicted & true, predicted & ~true, ~predicted & true, ~predicted & ~true)
        return {
            "counts": lambda: torch.stack([cell.sum(0) for cell in cells]),
            "exact": lambda: (predicted == true).all(1).sum().double(),
            "ranks": lambda: metrics.ranks(outputs, true),
        }


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
        loss_kind: squared error, absolute error or Huber loss.
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
        bad = ~torch.isfinite(y.reshape(len(y), -1)).all(1)
        if bool(bad.any()):
            raise ConfigError(
                f"{whose}: y has NaN or infinite values in {int(bad.sum())} of {len(y)} samples, "
                f"first in sample {int(bad.nonzero()[0])}; clean them first."
            )
        return y.to(torch.float32)

    def width(self, y: Tensor) -> int:
        return y[0].numel()

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        return _misfit(math.prod(outputs) == math.prod(labels), outputs, (width,))

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        def errors() -> Tensor:
            y = labels.double().reshape(len(labels), -1)
            error = outputs.double().reshape(y.shape) - y
            rows = (torch.ones_like(y), error.abs(), error.square(), y, y.square())
            return torch.stack([row.sum(0) for row in rows])

        return {"errors": errors}


@dataclass(frozen=True, kw_only=True)
class Dense(Task):
    """A class for every pixel or token. A sample's loss is the mean over those that do not have ``ignore_index``."""

    classes: int | None = None
    ignore_index: int = -100

    def align(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs as (samples, classes, ...) and their labels (samples, ...)."""
        return outputs, labels

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs, labels = self.align(outputs, labels)
        counted = labels != self.ignore_index
        losses = F.cross_entropy(outputs, torch.where(counted, labels, 0), reduction="none") * counted
        return losses.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp_min(1)

    def weigh(self, labels: Tensor) -> Tensor | None:
        return (labels != self.ignore_index).flatten(1).sum(1).to(torch.float32)

    def width(self, y: Tensor) -> int:
        return self.classes or (self.largest(y) or 0) + 1

    def largest(self, y: Tensor) -> int | None:
        counted = y[y != self.ignore_index]
        return int(counted.max()) if counted.numel() else None

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        outputs, labels = self.align(outputs, labels)
        counted = labels != self.ignore_index
        return count_classes(outputs.argmax(1)[counted], labels[counted], outputs.shape[1])


@dataclass(frozen=True, kw_only=True)
class Segmentation(Dense):
    """A class for every pixel (or voxel): y (samples, height, width) whole numbers, outputs with a channel per class.

    A sample's loss is the mean over the pixels that count, and their number is its weight. Dice and IoU are computed
    over all pixels together: the mean over the classes that occur or are predicted.

    Args:
        classes: number of classes; by default the largest label plus one.
        ignore_index: label of pixels to ignore.
        loss_kind: cross-entropy, or (``dice``) cross-entropy + 1 − the soft Dice coefficient.
        background: include class 0 in dice and iou.
    """

    loss_kind: Literal["cross_entropy", "dice"] = "cross_entropy"
    background: bool = True

    name: ClassVar[str] = "segmentation"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        # overlap: pixels predicted right, predicted and true, (3, classes)
        "dice": Metric(("overlap",), lambda table: mean_share(2 * table[0], table[1] + table[2])),
        "iou": Metric(("overlap",), lambda table: mean_share(table[0], table[1] + table[2] - table[0])),
        "accuracy": Metric(("correct", "seen"), metrics.accuracy),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        mean = super().loss(outputs, labels)
        if self.loss_kind == "cross_entropy":
            return mean
        counted = labels != self.ignore_index
        truth = F.one_hot(torch.where(counted, labels, 0), outputs.shape[1]).movedim(-1, 1) * counted[:, None]
        predicted = outputs.softmax(1) * counted[:, None]
        both = (truth * predicted).flatten(2).sum(2)
        either = (truth + predicted).flatten(2).sum(2)
        return mean + 1 - ((2 * both + 1) / (either + 1)).mean(1)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        wanted = "(samples, height, width) of whole numbers, a class for every pixel"
        return _whole_numbers(y, whose, wanted, y.ndim >= 3, self.ignore_index)

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        return _misfit(outputs[1:] == labels and outputs[0] >= width, outputs, (width, *labels))

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        counts = super().tallies(outputs, labels)

        def overlap() -> Tensor:
            confusion = counts["confusion"]()
            table = torch.stack([confusion.diagonal(), confusion.sum(0), confusion.sum(1)])
            if not self.background:
                # a class without pixels is left out of a mean
                table[:, 0] = 0
            return table

        return {**counts, "overlap": overlap}


def _perplexity(table: Tensor) -> float:
    mean = float(table[0] / table[1]) if float(table[1]) else math.nan
    return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Tokens(Dense):
    """A class for every token: tagging, or the next token. y is (samples, length), outputs (samples, length, classes).

    A sample's loss is the mean over the tokens that count, and their number is its weight.

    Args:
        classes: number of classes (the size of the vocabulary); by default the largest label plus one.
        ignore_index: label of padding.
        shift: for language models whose labels are their inputs: the output at a token predicts the next token.
    """

    shift: bool = False

    name: ClassVar[str] = "tokens"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric(("correct", "seen"), metrics.accuracy),
        "perplexity": Metric(("surprise",), _perplexity),
        "balanced_accuracy": Metric(("correct", "seen"), mean_share),
        "macro_f1": Metric(("confusion",), metrics.macro_f1),
    }

    def align(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        if self.shift:
            outputs, labels = outputs[:, :-1], labels[:, 1:]
        return outputs.movedim(-1, 1), labels

    def weigh(self, labels: Tensor) -> Tensor | None:
        return super().weigh(labels[:, 1:] if self.shift else labels)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        wanted = "(samples, length) of whole numbers, a class for every token"
        return _whole_numbers(y, whose, wanted, y.ndim == 2, self.ignore_index)

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        return _misfit(outputs[:-1] == labels and outputs[-1] >= width, outputs, (*labels, width))

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1).movedim(-1, 1)

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        def surprise() -> Tensor:
            logits, true = self.align(outputs.double(), labels)
            loss = F.cross_entropy(logits, true, ignore_index=self.ignore_index, reduction="sum")
            return torch.stack([loss, (true != self.ignore_index).sum().double()])

        return {**super().tallies(outputs, labels), "surprise": surprise}
