"""A class for every pixel or token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.tasks.metrics import Metric, accuracy, confusion, macro_f1, mean_share
from fedpews.tasks.task import Tallies, Task


@dataclass(frozen=True, kw_only=True)
class Dense(Task):
    """A task whose labels are a class for every pixel or token; those with ``ignore_index`` do not count."""

    classes: int | None = None
    ignore_index: int = -100

    def width(self, y: Tensor) -> int:
        return self.classes or (self.largest(y) or 0) + 1

    def largest(self, y: Tensor) -> int | None:
        counted = y[y != self.ignore_index]
        return int(counted.max()) if counted.numel() else None

    def _whole_numbers(self, y: Tensor, whose: str, wanted: str, fits: bool, hint: str) -> Tensor:
        if y.is_floating_point() or y.is_complex() or not fits:
            raise ConfigError(f"{whose}: y must be {wanted}; got {y.dtype} of shape {tuple(y.shape)}.")
        y = y.to(torch.int64)
        counted = y[y != self.ignore_index]
        if counted.numel() and int(counted.min()) < 0:
            raise ConfigError(f"{whose}: label {int(counted.min())} is below 0; {hint}")
        return y


@dataclass(frozen=True, kw_only=True)
class Segmentation(Dense):
    """A class for every pixel (or voxel): y (samples, height, width) whole numbers, outputs with a channel per class.

    A sample's loss is the mean over the pixels that count, and their number is its weight. Dice and IoU are computed
    over all pixels together: the mean over the classes that occur or are predicted.

    Args:
        classes: how many; by default the largest label plus one.
        ignore_index: the label of pixels that do not count.
        loss_kind: cross-entropy, or with one minus the soft Dice coefficient added to it.
        background: whether dice and iou include class 0.
    """

    loss_kind: Literal["cross_entropy", "dice"] = "cross_entropy"
    background: bool = True

    name: ClassVar[str] = "segmentation"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "dice": Metric(("overlap",), lambda table: mean_share(2 * table[0], table[1] + table[2])),
        "iou": Metric(("overlap",), lambda table: mean_share(table[0], table[1] + table[2] - table[0])),
        "accuracy": Metric(("correct", "seen"), accuracy),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        counted = labels != self.ignore_index
        labels = torch.where(counted, labels, 0)
        pixels = F.cross_entropy(outputs, labels, reduction="none") * counted
        mean = pixels.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp_min(1)
        if self.loss_kind == "cross_entropy":
            return mean
        truth = F.one_hot(labels, outputs.shape[1]).movedim(-1, 1) * counted[:, None]
        predicted = outputs.softmax(1) * counted[:, None]
        both = (truth * predicted).flatten(2).sum(2)
        either = (truth + predicted).flatten(2).sum(2)
        return mean + 1 - ((2 * both + 1) / (either + 1)).mean(1)

    def weigh(self, labels: Tensor) -> Tensor | None:
        return (labels != self.ignore_index).flatten(1).sum(1).to(torch.float32)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        wanted = "(samples, height, width) of whole numbers, a class for every pixel"
        hint = "set task.ignore_index to ignore it."
        return self._whole_numbers(y, whose, wanted, y.ndim >= 3, hint)

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        if outputs[1:] == labels and outputs[0] >= width:
            return ""
        return (
            f"the labels are {labels} with classes 0 to {width - 1}, so the model's output must have shape "
            f"({width}, {', '.join(map(str, labels))}); it has {outputs}"
        )

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(1)

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        counted = labels != self.ignore_index
        width, true, predicted = outputs.shape[1], labels[counted], outputs.argmax(1)[counted]

        def overlap() -> Tensor:
            rows = (true[predicted == true], predicted, true)
            table = torch.stack([torch.bincount(row, minlength=width) for row in rows])
            if not self.background:
                # a class without pixels is left out of a mean
                table[:, 0] = 0
            return table

        return {
            "overlap": overlap,
            "correct": lambda: (predicted == true).sum(),
            "seen": lambda: torch.tensor(len(true)),
        }


def _perplexity(table: Tensor) -> float:
    mean = float(table[0] / table[1]) if float(table[1]) else math.nan
    return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Tokens(Dense):
    """A class for every token: tagging, or the next token. y is (samples, length), outputs (samples, length, classes).

    A sample's loss is the mean over the tokens that count, and their number is its weight.

    Args:
        classes: how many (the size of the vocabulary); by default the largest label plus one.
        ignore_index: the label of padding.
        shift: labels are the inputs themselves, and the output at a token predicts the next one.
    """

    shift: bool = False

    name: ClassVar[str] = "tokens"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric(("correct", "seen"), accuracy),
        "perplexity": Metric(("surprise",), _perplexity),
        "balanced_accuracy": Metric(("correct", "seen"), mean_share),
        "macro_f1": Metric(("confusion",), macro_f1),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs, labels = self._pair(outputs, labels)
        counted = labels != self.ignore_index
        labels = torch.where(counted, labels, 0)
        losses = F.cross_entropy(outputs.movedim(-1, 1), labels, reduction="none") * counted
        return losses.sum(1) / counted.sum(1).clamp_min(1)

    def weigh(self, labels: Tensor) -> Tensor | None:
        labels = labels[:, 1:] if self.shift else labels
        return (labels != self.ignore_index).sum(1).to(torch.float32)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        wanted = "(samples, length) of whole numbers, a class for every token"
        hint = "is it padding? Then set task.ignore_index."
        return self._whole_numbers(y, whose, wanted, y.ndim == 2, hint)

    def misfit(self, outputs: tuple[int, ...], labels: tuple[int, ...], width: int) -> str:
        if len(outputs) == 2 and outputs[0] == labels[0] and outputs[1] >= width:
            return ""
        return (
            f"the labels are {labels[0]} tokens with classes 0 to {width - 1}, so the model's output must have shape "
            f"({labels[0]}, {width}); it has {outputs}"
        )

    def scores(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(-1).movedim(-1, 1)

    def tallies(self, outputs: Tensor, labels: Tensor) -> Tallies:
        outputs, labels = self._pair(outputs, labels)
        counted = labels != self.ignore_index
        width, predicted, true = outputs.shape[-1], outputs.argmax(-1)[counted], labels[counted]

        def surprise() -> Tensor:
            loss = F.cross_entropy(outputs[counted].double(), true, reduction="sum")
            return torch.stack([loss, counted.sum().double()])

        return {
            "correct": lambda: torch.bincount(true[predicted == true], minlength=width),
            "seen": lambda: torch.bincount(true, minlength=width),
            "confusion": lambda: confusion(predicted, true, width),
            "surprise": surprise,
        }

    def _pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs[:, :-1], labels[:, 1:]) if self.shift else (outputs, labels)
