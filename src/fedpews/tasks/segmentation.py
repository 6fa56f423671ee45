"""A class for every pixel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedpews.errors import ConfigError
from fedpews.tasks import sums
from fedpews.tasks.contract import Metric, Tallies
from fedpews.tasks.dense import Dense


@dataclass(frozen=True, kw_only=True)
class Segmentation(Dense):
    """A class for every pixel (or voxel): y (samples, height, width) whole numbers, outputs with a channel per class.

    A sample's loss is the mean over the pixels that count, and it weighs as many as these are. Dice and IoU are
    those of all pixels together, the mean over the classes that there are or that were predicted.

    Args:
        classes: how many; by default the largest label plus one.
        ignore_index: the label of pixels that do not count.
        loss_kind: cross-entropy, or with one minus the soft Dice coefficient added to it.
        background: whether class 0 has a part in dice and iou.
    """

    loss_kind: Literal["cross_entropy", "dice"] = "cross_entropy"
    background: bool = True

    name: ClassVar[str] = "segmentation"
    METRICS: ClassVar[Mapping[str, Metric]] = {
        "dice": Metric(("overlap",), lambda table: sums.mean_share(2 * table[0], table[1] + table[2])),
        "iou": Metric(("overlap",), lambda table: sums.mean_share(table[0], table[1] + table[2] - table[0])),
        "accuracy": Metric(("correct", "seen"), sums.accuracy),
    }

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        kept = labels != self.ignore_index
        labels = torch.where(kept, labels, 0)
        pixels = F.cross_entropy(outputs, labels, reduction="none") * kept
        total = kept.flatten(1).sum(1).clamp_min(1)
        mean = pixels.flatten(1).sum(1) / total
        if self.loss_kind == "cross_entropy":
            return mean
        truth = F.one_hot(labels, outputs.shape[1]).movedim(-1, 1) * kept[:, None]
        said = outputs.softmax(1) * kept[:, None]
        both = (truth * said).flatten(2).sum(2)
        either = (truth + said).flatten(2).sum(2)
        return mean + 1 - ((2 * both + 1) / (either + 1)).mean(1)

    def weigh(self, labels: Tensor) -> Tensor | None:
        return (labels != self.ignore_index).flatten(1).sum(1).to(torch.float32)

    def labels(self, y: Tensor, whose: str) -> Tensor:
        if y.is_floating_point() or y.is_complex() or y.ndim < 3:
            raise ConfigError(
                f"{whose}: y must be (samples, height, width) of whole numbers, a class for every pixel; "
                f"got {y.dtype} of shape {tuple(y.shape)}."
            )
        y = y.to(torch.int64)
        low = y[y != self.ignore_index]
        if low.numel() and int(low.min()) < 0:
            raise ConfigError(
                f"{whose}: label {int(low.min())} is below 0; set task.ignore_index if it is to be left out."
            )
        return y

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
        kept = labels != self.ignore_index
        width, true, said = outputs.shape[1], labels[kept], outputs.argmax(1)[kept]

        def overlap() -> Tensor:
            parts = (true[said == true], said, true)
            table = torch.stack([torch.bincount(part, minlength=width) for part in parts])
            if not self.background:
                # a class without pixels has no part in a mean
                table[:, 0] = 0
            return table

        return {
            "overlap": overlap,
            "correct": lambda: (said == true).sum(),
            "seen": lambda: torch.tensor(len(true)),
        }
