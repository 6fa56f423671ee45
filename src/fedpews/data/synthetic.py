"""Interleaved 2-D clusters, lifted to five standardised features; with four classes they are the paper's data."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpews.seeds import fold

CORNERS = ((-4.0, 4.0), (4.0, 4.0), (-4.0, -4.0), (4.0, -4.0))
"""Top left, top right, bottom left, bottom right; from each, four clusters run down to the right."""

TILTED = ((0.25, 0.15), (0.15, 0.25))
SHAPES = (((0.05, 0.0), (0.0, 0.45)), TILTED, TILTED, ((0.25, 0.0), (0.0, 0.05)))
"""What a standard normal point is multiplied by, for the clusters of each corner."""


Shape = tuple[tuple[float, float], tuple[float, float]]


def clusters(shape: Shape | None = None, classes: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """The 16 clusters: their centres (16, 2), their shapes (16, 2, 2) and the class of each (16,).

    At each corner four clusters have offsets k·(1, −1). Two classes alternate along them: 0 and 2 at the top,
    1 and 3 at the bottom, so the even classes are the upper half of the plane and the odd ones the lower. With eight
    classes each corner has two of its own that alternate, with sixteen every cluster is a class.

    Args:
        shape: of all clusters; by default each corner has its own.
        classes: 4, 8 or 16.
    """
    k = torch.arange(4)
    steps = k[:, None] * torch.tensor([1.0, -1.0], dtype=torch.float64)
    centres = torch.tensor(CORNERS, dtype=torch.float64)[:, None] + steps  # (corners, 4, 2)
    shapes = torch.tensor(SHAPES if shape is None else [shape] * len(CORNERS), dtype=torch.float64)
    if classes == 4:
        labels = [2 * (k % 2) + bottom for bottom in (0, 0, 1, 1)]
    else:
        each = classes // len(CORNERS)
        labels = [each * corner + k % each for corner in range(len(CORNERS))]
    return centres.flatten(0, 1), shapes.repeat_interleave(4, 0), torch.cat(labels)


def sample(
    per_class: int, seed: int, purpose: str, shape: Shape | None = None, classes: int = 4
) -> tuple[Tensor, Tensor]:
    """``per_class`` points of each class, spread evenly over its clusters.

    The features are [x, y, x², y², xy], each of mean 0 and deviation 1 over these points.

    >>> x, y = sample(8, seed=0, purpose="train")
    >>> tuple(x.shape), y.bincount().tolist()
    ((32, 5), [8, 8, 8, 8])
    """
    centres, shapes, labels = clusters(shape, classes)
    generator = torch.Generator().manual_seed(fold(seed, "synthetic", purpose))
    points = []
    for label in range(classes):
        of_class = (labels == label).nonzero().flatten()
        cluster = of_class[torch.arange(per_class) % len(of_class)]
        noise = torch.randn(per_class, 1, 2, generator=generator, dtype=torch.float64)
        points.append(centres[cluster] + (noise @ shapes[cluster]).squeeze(1))
    a, b = torch.cat(points).unbind(1)
    features = torch.stack([a, b, a * a, b * b, a * b], 1)  # (samples, 5)
    spread, middle = torch.std_mean(features, dim=0, correction=0)
    return ((features - middle) / spread).float(), torch.arange(classes).repeat_interleave(per_class)


def one_shape(seed: int) -> tuple[list[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """synthetic-32k with the tilted shape at all four corners, for `fedpews reproduce calibration`.

    Public material of the paper's first author has both versions. It has one client: name a partition.
    """
    train, test = sample(8000, seed, "train", TILTED), sample(1600, seed, "test", TILTED)
    return [train], test
