"""A small transformer encoder for images."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu


class ViT(nn.Module):
    """A small vision transformer: patches, pre-norm attention blocks, the mean of all patches classified.

    Its neurons are the hidden units of the feed-forward layers. All clients share the residual stream, which LayerNorm
    mixes, and the attention heads.

    Args:
        patch: side of a patch; it must divide the image's size.
        width: features of a patch along the stream; ``heads`` must divide it.
        depth: how many attention blocks there are.
        heads: attention heads of each block.
        hidden: units of each block's feed-forward layer.

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
        self.unmasked = tuple(f"blocks.{i}.attention" for i in range(depth))
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
