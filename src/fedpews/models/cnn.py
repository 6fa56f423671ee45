"""The paper's network for images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class CNN(nn.Module):
    """Three convolutions, each with ReLU and 2×2 max pooling, and one fully connected layer.

    Pooling comes before ReLU: the same function, as both are monotone, at a quarter of the ReLU's work. A row
    or column too many for the pooling is left out, so 28×28 ends as 3×3.
    """

    needs_images: ClassVar[bool] = True

    def __init__(
        self, channels: int = 3, size: int = 32, hidden: Sequence[int] = (32, 64, 128), classes: int = 20
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must list the channels of each convolution; got {list(hidden)}")
        side = size // 2 ** len(hidden)
        if side < 1:
            raise ValueError(
                f"{len(hidden)} convolutions with pooling need images of at least "
                f"{2 ** len(hidden)}×{2 ** len(hidden)}; shorten hidden"
            )
        widths = (channels, *hidden)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, kernel_size=3, padding=1) for a, b in pairwise(widths))
        self.classifier = nn.Linear(hidden[-1] * side * side, classes)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = max_pool2d(conv(x), 2).relu()
        out: Tensor = self.classifier(x.flatten(1))
        return out
