"""A residual network for small images."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn


class ResNet(nn.Module):
    """A residual network of depth 8, 14, 20, ... (6n + 2) for small images, with GroupNorm or BatchNorm.

    Three stages of ``width``, 2·``width`` and 4·``width`` channels; the second and third halve the image. The
    last feature map is averaged, so images may have any size and shape.

    Args:
        depth: the number of layers, 6n + 2.
        width: the channels of the first stage; a multiple of ``group_size``.
        norm: ``"group"``, which does not mix clients' statistics, or ``"batch"``.
        group_size: channels in a group of the GroupNorm. A group is normalised as a whole, so it is one neuron:
            large groups leave a warmup few neurons to choose from.

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
