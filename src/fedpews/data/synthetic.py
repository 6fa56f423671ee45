"""Four classes of interleaved 2-D clusters, lifted to five features: the paper's synthetic data."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.seeds import fold

CLASSES = 4
SIGMA = 0.1  # standard deviation within a cluster: covariance 0.01·I


def centres() -> tuple[Tensor, Tensor]:
    """The 16 cluster centres (16, 2) and the class of each (16,).

    Eight lie on a circle of radius 4 at k·45° with class k mod 4, eight on a circle of radius 2 at
    k·45° + 22.5° with class (k + 2) mod 4, so the classes interleave and none is on one side.
    """
    k = torch.arange(8)
    outer, inner = k * math.pi / 4, k * math.pi / 4 + math.pi / 8
    angle = torch.cat([outer, inner]).double()
    radius = torch.tensor([4.0] * 8 + [2.0] * 8, dtype=torch.float64)
    points = radius[:, None] * torch.stack([angle.cos(), angle.sin()], 1)  # (16, 2)
    return points, torch.cat([k % CLASSES, (k + 2) % CLASSES])


def sample(per_class: int, seed: int, purpose: str) -> tuple[Tensor, Tensor]:
    """``per_class`` points of each class, spread evenly over its four clusters.

    The features are [x, y, x², y², xy], raw: standardising them takes away the difficulty.

    >>> x, y = sample(8, seed=0, purpose="train")
    >>> tuple(x.shape), y.bincount().tolist()
    ((32, 5), [8, 8, 8, 8])
    """
    if per_class < 1:
        raise ConfigError(f"the number of samples per class must be above 0; got {per_class}.")
    points, labels = centres()
    generator = torch.Generator().manual_seed(fold(seed, "synthetic", purpose))
    x, y = [], []
    for label in range(CLASSES):
        mine = points[labels == label]  # (4, 2)
        which = torch.arange(per_class) % len(mine)
        noise = torch.randn(per_class, 2, generator=generator, dtype=torch.float64)
        x.append(mine[which] + SIGMA * noise)
        y.append(torch.full((per_class,), label))
    a, b = torch.cat(x).unbind(1)
    features = torch.stack([a, b, a * a, b * b, a * b], 1)  # (samples, 5)
    return features.float(), torch.cat(y)
