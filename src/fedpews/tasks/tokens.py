"""A class for every token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.tasks import sums
from fedpews.tasks.contract import Metric, Tallies
from fedpews.tasks.dense import Dense


def _perplexity(table: Tensor) -> float:
    mean = float(table[0] / table[1]) if float(table[1]) else math.nan
    return math.exp(mean) if mean < 700 else math.inf


@dataclass(frozen=True, kw_only=True)
class Tokens(Dense):
    """A class for every token: tagging, or the next token. y is (samples, length), outputs (samples, length, classes).

    A sample's loss is the mean over the tokens that count, and it weighs as many as these are.

    Args:
        classes: how many (the size of the vocabulary); by default the largest label plus one.
        ignore_index: the label of padding.
        shift: labels are the inputs themselves, and the output at a token is about the one after it.
    """

    shift: bool = False

    name: ClassVar[str] = "tokens"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "accuracy": Metric(("correct", "seen"), sums.accuracy),
        "perplexity": Metric(("surprise",), _perplexity),
        "balanced_accuracy": Metric(("correct", "seen"), sums.balanced_accuracy),
        "macro_f1": Metric(("confusion",), sums.macro_f1),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        outputs, labels = self._pair(outputs, labels)
        kept = labels != self.ignore_index
        every = F.cross_entropy(outputs.movedim(-1, 1), torch.where(kept, labels, 0), reduction="none") * kept
        return every.sum(1) / kept.sum(1).clamp_min(1)

    def weigh(self, labels: Tensor) -> Tensor | None:
        labels = labels[:, 1:] if self.shift else labels
        return (labels != self.ignore_index).sum(1).to(torch.float32)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.ndim != 2:
            raise ConfigError(
                f"{whose}: y must be (samples, length) of whole numbers, a class for every token; "
                f"got {y.dtype} of shape {tuple(y.shape)}."
            )
        y = y.to(torch.int64)
        counted = y[y != self.ignore_index]
        if counted.numel() and int(counted.min()) < 0:
            raise ConfigError(
                f"{whose}: label {int(counted.min())} is below 0; is it padding? Then set task.ignore_index."
            )
        return y

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
        kept = labels != self.ignore_index
        width, said, true = outputs.shape[-1], outputs.argmax(-1)[kept], labels[kept]

        def surprise() -> Tensor:
            lost = F.cross_entropy(outputs[kept].double(), true, reduction="sum")
            return torch.stack([lost, kept.sum().double()])

        return {
            "correct": lambda: torch.bincount(true[said == true], minlength=width),
            "seen": lambda: torch.bincount(true, minlength=width),
            "confusion": lambda: sums.confusion(said, true, width),
            "surprise": surprise,
        }

    def _pair(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return (outputs[:, :-1], labels[:, 1:]) if self.shift else (outputs, labels)
