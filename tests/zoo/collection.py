"""The zoo: architectures by library and name, each built small, with an input."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Build = Callable[[], tuple[nn.Module, Tensor]]


@dataclass(frozen=True)
class Animal:
    """One architecture. ``slow``: too large for the ordinary suite. ``expected``: why nothing can be masked, if so."""

    library: str
    name: str
    build: Build
    slow: bool = False
    refused: str = ""

    def __str__(self) -> str:
        return f"{self.library}-{self.name}"


def image(size: int = 32, channels: int = 3) -> Callable[[], Tensor]:
    return lambda: torch.randn(2, channels, size, size)


def tokens() -> Tensor:
    return torch.randint(3, 50, (2, 8))


_DECLARED: list[Any] = []


def import_torchvision() -> None:
    """Make torchvision importable where its compiled operators cannot be loaded.

    The wheel of the package index is built for CUDA; on a torch without it the import fails for want of two
    operators of object detection, which none of these models uses: declaring them is enough.
    """
    foreign = torch.version.cuda is None and "+cpu" not in importlib.metadata.version("torchvision")
    if foreign and not _DECLARED:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)  # the declaration lives as long as this
