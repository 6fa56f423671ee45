"""The paper's network for the synthetic data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; inputs of any shape are flattened.

    The defaults are the paper's: 5 → 32 → 64 → 128 → 32 → 4.

    Args:
        hidden: the units of each hidden layer.
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
