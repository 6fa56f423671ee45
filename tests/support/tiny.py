"""Networks so small that a round can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedpews.neurons import Hidden, NeuronGraph
from fedpews.neurons.network import Network
from fedpews.testing import Samples


def half_square(outputs: Tensor, labels: Tensor) -> Tensor:
    """½(output − label)², so that the gradient of a model w·x at x = 1 is w − label."""
    return 0.5 * (outputs[:, 0] - labels) ** 2


def point(start: float = 1.0) -> Network:
    """One weight w; on samples (1, y) the loss is ½(w − y)²."""
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, start)
    return Network(layer, torch.ones(1, 1), sample_loss=half_square)


def chain(u: Sequence[float], v: Sequence[float]) -> Network:
    """One input, len(u) hidden neurons without activation, one output: Σ v_k u_k x."""
    first, second = nn.Linear(1, len(u), bias=False), nn.Linear(len(u), 1, bias=False)
    with torch.no_grad():
        first.weight.copy_(torch.tensor(u)[:, None])
        second.weight.copy_(torch.tensor(v)[None])
    model = nn.Sequential(first, second)
    graph = NeuronGraph.by_hand(model, [Hidden("0", read_by=["1"])])
    return Network(model, torch.ones(1, 1), sample_loss=half_square, graph=graph)


def targets(*labels: int, steps: int = 2) -> list[Samples]:
    """A client for each label, with as many samples (1, label) as it takes steps of one sample."""
    return [(torch.ones(steps, 1), torch.full((steps,), label)) for label in labels]


def train_chain(
    u: float, v: float, label: float, steps: int, lr: float, scale: float = 1.0
) -> tuple[float, float]:
    """SGD on ½(scale·v·u − label)² by the formula: slope·scale·v for u, slope·scale·u for v."""
    for _ in range(steps):
        slope = scale * v * u - label
        u, v = u - lr * slope * scale * v, v - lr * slope * scale * u
    return u, v
