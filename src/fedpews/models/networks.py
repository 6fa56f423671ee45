"""The networks that ship: the paper's MLP and CNN, a residual network and a vision transformer for small images."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, max_pool2d


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; inputs of any shape are flattened.

    The defaults are the paper's: 5 → 32 → 64 → 128 → 32 → 4.

    Args:
        hidden: number of units of each hidden layer.
    """

    def __init__(self, inputs: int = 5, hidden: Sequence[int] = (32, 64, 128, 32), classes: int = 4) -> None:
        super().__init__()
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must list the units of each hidden layer; got {list(hidden)}")
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((inputs, *hidden)))
        self.classifier = nn.Linear(hidden[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = layer(x).relu()
        out: Tensor = self.classifier(x)
        return out


class CNN(nn.Module):
    """Four convolutions with ReLU, 2×2 max pooling after the first three, and one fully connected layer.

    The paper's text has four convolutions, its table three and a flatten of 2,048; four with three poolings is both,
    and gives the paper's curve of FedAvg.

    Pooling comes before ReLU: the same function, as both are monotone, at a quarter of the ReLU's work. A row
    or column too many for the pooling is left out, so 28×28 ends as 3×3.

    Args:
        hidden: number of channels of each convolution.
        pools: the first ``pools`` convolutions are followed by pooling; by default at most three.
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
            raise ValueError(f"pools must be between 0 and {len(hidden)}; got {pools}")
        side = size // 2**self.pools
        if side < 1:
            raise ValueError(f"{self.pools} poolings need images of at least {2**self.pools}×{2**self.pools}")
        widths = (channels, *hidden)
        self.convs = nn.ModuleList(nn.Conv2d(a, b, kernel_size=3, padding=1) for a, b in pairwise(widths))
        self.classifier = nn.Linear(hidden[-1] * side * side, classes)

    def forward(self, x: Tensor) -> Tensor:
        for depth, conv in enumerate(self.convs):
            x = conv(x)
            x = (max_pool2d(x, 2) if depth < self.pools else x).relu()
        out: Tensor = self.classifier(x.flatten(1))
        return out


class ResNet(nn.Module):
    """A residual network of depth 8, 14, 20, ... (6n + 2) for small images, with GroupNorm or BatchNorm.

    Three stages of ``width``, 2·``width`` and 4·``width`` channels; the second and third halve the image. The
    last feature map is averaged, so images may have any size and shape.

    Args:
        depth: number of layers, 6n + 2.
        width: number of channels of the first stage; a multiple of ``group_size``.
        norm: ``"group"`` (no running statistics) or ``"batch"``.
        group_size: number of channels in a group of the GroupNorm. A group is one neuron, so large groups give a
            warmup few neurons.

    He et al., "Deep Residual Learning for Image Recognition", 2016, section 4.2.
    """

    needs_images: ClassVar[bool] = True

    def __init__(
        self,
        channels: int = 3,
        classes: int = 20,
        depth: int = 8,
        width: int = 16,
        norm: str = "group",
        group_size: int = 2,
    ) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"depth must be 8, 14, 20, ... (6n + 2); got {depth}")
        if norm not in ("group", "batch"):
            raise ValueError(f'norm must be "group" or "batch"; got {norm!r}')
        if width < 1 or (norm == "group" and (group_size < 1 or width % group_size)):
            raise ValueError(f"width must be a multiple of group_size {group_size}; got {width}")
        groups = group_size if norm == "group" else None
        self.stem, self.norm = _conv(channels, width), _norm(width, groups)
        blocks: list[nn.Module] = []
        inputs = width
        for stage in range(3):
            for number in range((depth - 2) // 6):
                outputs = width * 2**stage
                blocks.append(ResidualBlock(inputs, outputs, 2 if stage and not number else 1, groups))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.stem(x)).relu())
        out: Tensor = self.classifier(x.mean((2, 3)))
        return out


class ResidualBlock(nn.Module):
    """Two convolutions and a shortcut around them; a 1×1 convolution on it where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int | None) -> None:
        super().__init__()
        self.conv1, self.norm1 = _conv(inputs, outputs, stride), _norm(outputs, groups)
        self.conv2, self.norm2 = _conv(outputs, outputs), _norm(outputs, groups)
        self.skip: nn.Module = nn.Identity()
        if inputs != outputs:
            # every second pixel, then the 1×1 convolution: a strided one without its faulty kernel (see EagerEngine)
            conv = nn.Conv2d(inputs, outputs, 1, bias=False)
            self.skip = nn.Sequential(nn.MaxPool2d(1, stride), conv, _norm(outputs, groups))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        out: Tensor = (self.norm2(self.conv2(y)) + self.skip(x)).relu()
        return out


def _conv(inputs: int, outputs: int, stride: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)


def _norm(channels: int, group_size: int | None) -> nn.Module:
    if group_size is None:
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(channels // group_size, channels)


class ViT(nn.Module):
    """A small vision transformer: patches, pre-norm attention blocks, the mean of all patches classified.

    Its neurons are the attention heads and the hidden units of the feed-forward layers. All clients share the residual
    stream, which LayerNorm mixes.

    Args:
        patch: side of a patch; it must divide the image size.
        width: embedding dimension; ``heads`` must divide it.
        depth: number of attention blocks.
        heads: number of attention heads of each block.
        hidden: number of units of each block's feed-forward layer.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021.
    """

    needs_images: ClassVar[bool] = True

    def __init__(
        self,
        channels: int = 3,
        size: int = 32,
        classes: int = 20,
        patch: int = 4,
        width: int = 64,
        depth: int = 4,
        heads: int = 4,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        if patch < 1 or size % patch:
            raise ValueError(f"patch must divide the images' size {size}; got {patch}")
        if heads < 1 or width % heads:
            raise ValueError(f"heads must divide width {width}; got {heads}")
        if depth < 1 or hidden < 1:
            raise ValueError(f"depth and hidden must be above 0; got {depth} and {hidden}")
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads, hidden) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2) + self.position  # (samples, patches, width)
        out: Tensor = self.classifier(self.norm(self.blocks(x)).mean(1))
        return out


class AttentionBlock(nn.Module):
    """Attention over all patches, then a feed-forward layer; both add to the residual stream."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = x + self.down(gelu(self.up(self.norm2(x))))
        return out
