"""The paper's network for images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import max_pool2d


class CNN(nn.Module):
    """Four convolutions with ReLU, 2×2 max pooling after the first three, and one fully connected layer.

    The paper's text has four convolutions, its table three and a flatten of 2,048; four with three poolings is both,
    and gives the paper's curve of FedAvg.

    Pooling comes before ReLU: the same function, as both are monotone, at a quarter of the ReLU's work. A row
    or column too many for the pooling is left out, so 28×28 ends as 3×3.

    Args:
        hidden: the channels of each convolution.
        pools: how many of them, from the first on, are followed by pooling; by default at most three.
    """

    needs_images: ClassVar[bool] = True

    def __init__(
        self,
        channels: int = 3,
        size: int = 32,
        hidden: Sequence[int] = (32, 64, 128, 128),
        classes: int = 20,
        pools: int | None = None,
    ) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must list the channels of each convolution; got {list(hidden)}")
        self.pools = min(3, len(hidden)) if pools is None else pools
        if not 0 <= self.pools <= len(hidden):
            raise ValueError(
                f"pools must be between 0 and {len(hidden)}, one for each convolution; got {pools}"
            )
        side = size // 2**self.pools
        if side < 1:
            raise ValueError(
                f"{self.pools} poolings need images of at least {2**self.pools}×{2**self.pools}; lower pools"
            )
        widths = (channels, *hidden)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, kernel_size=3, padding=1) for a, b in pairwise(widths))
        self.classifier = nn.Linear(hidden[-1] * side * side, classes)

    def forward(self, x: Tensor) -> Tensor:
        for depth, conv in enumerate(self.convs):
            x = conv(x)
            x = (max_pool2d(x, 2) if depth < self.pools else x).relu()
        out: Tensor = self.classifier(x.flatten(1))
        return out
