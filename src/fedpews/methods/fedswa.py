"""FedSWA: a local rate that falls within every round, and a server that goes on past the mean (Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.options import Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree

PROGRESS = "progress"
"""In a local state: the steps taken, and K; in a memory: K, the steps of the client's last round."""


@register("method", "fedswa")
@dataclass(frozen=True)
class FedSWA(LocalSGD):
    """FedAvg whose k-th local step has the rate η·(1 − (1 − ρ)·k/K), and whose server moves by α·(mean(y_i) − x_g).

    k counts from 0 in every round, so the rate is cyclical. K is what the client did in its last round; in its first
    one it does not know K, and the rate stays η. The defaults are the paper's; the authors' program has ρ = 0 and α = 1
    instead, and doubles η.

    Args:
        rho: ρ, the part of the rate that is left at the end of a round; 1 with ``alpha=1`` is FedAvg.
        alpha: α, how far the server goes towards the mean of the clients, or past it.

    >>> FedSWA().alpha
    1.5
    """

    rho: Annotated[float, Field(ge=0, le=1)] = 0.1
    alpha: Positive = 1.5

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        unknown = torch.tensor(torch.inf, device=net.device)
        progress = {
            "taken": torch.tensor(0.0, device=net.device),
            "of": unknown if memory is None else memory[PROGRESS]["of"],
        }
        return super().start(net, download, memory) | {PROGRESS: progress}

    def factor(self, local: Nest) -> Tensor:
        """The next step's rate over η."""
        progress = local[PROGRESS]
        return 1 - (1 - self.rho) * torch.clamp_max(progress["taken"] / progress["of"], 1)

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        moved, loss = super().step(net, local, batch, noise, lr * self.factor(local))
        progress = local[PROGRESS]
        return moved | {PROGRESS: progress | {"taken": progress["taken"] + 1}}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        return memory | {PROGRESS: {"of": torch.tensor(float(work.steps), device=net.device)}}, upload

    def aggregate(self, net: Network, old: Tree, uploads: Sequence[Upload], average: Average) -> Tree:
        mean = super().aggregate(net, old, uploads, average)
        if self.alpha == 1:
            return mean
        model = trees.pick(old, net.trainable)
        return mean | trees.add(model, trees.subtract(trees.pick(mean, net.trainable), model), self.alpha)
