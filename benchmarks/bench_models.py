"""Larger networks for the benchmarks, as other frameworks' benchmarks have them."""

from __future__ import annotations

from torch import Tensor, nn

from fedpews.models.networks import ViT


class EmnistCNN(nn.Module):
    """The CNN of the FEMNIST benchmarks (LEAF, FedJAX, pfl-research), 1.2 million parameters, without its dropout."""

    def __init__(self, classes: int = 62) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.pool = nn.MaxPool2d(2)
        self.hidden, self.classifier = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.second(self.first(x).relu()).relu())
        out: Tensor = self.classifier(self.hidden(x.flatten(1)).relu())
        return out


class ResNet18(nn.Module):
    """ResNet-18 as for CIFAR: a 3×3 stem and no pooling; GroupNorm of two channels a group."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(32, 64)
        blocks, inputs = [], 64
        for outputs in (64, 128, 256, 512):
            blocks += [Block(inputs, outputs, 1 if outputs == 64 else 2), Block(outputs, outputs, 1)]
            inputs = outputs
        self.blocks, self.classifier = nn.Sequential(*blocks), nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.norm(self.stem(x)).relu())
        out: Tensor = self.classifier(x.mean((2, 3)))
        return out


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(outputs // 2, outputs), nn.GroupNorm(outputs // 2, outputs)
        self.shortcut = nn.Sequential()
        if stride > 1:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(outputs // 2, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (out + self.shortcut(x)).relu()


def transformer() -> ViT:
    """A transformer classifier of six layers."""
    return ViT(classes=10, depth=6, width=128, heads=4, hidden=256)
