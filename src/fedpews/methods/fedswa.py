"""FedSWA and FedMoSWA: a local rate that falls within every round (Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Rate, Upload, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.scaffold import ControlVariates
from fedpews.neurons.network import Batch, Network
from fedpews.options import Positive, Share
from fedpews.registry import register
from fedpews.trees import Nest, Tree

PROGRESS = "progress"
"""In a local state: the steps taken, and K; in a memory: K, the steps of the client's last round."""


@register("method", "fedswa")
@dataclass(frozen=True)
class FedSWA(FedAvg):
    """FedSWA: a local rate that falls within every round, and a server that extrapolates (Liu et al. 2025).

    FedAvg whose k-th local step has the rate η·(1 − (1 − ρ)·k/K), and whose server moves by α·(mean(y_i) − x_g). k
    counts from 0 in every round, so the rate is cyclical. K is what the client did in its last round; in its first one
    it does not know K, and the rate stays η. The defaults are the paper's; the authors' program has ρ = 0 and α = 1
    instead, and doubles η.

    Args:
        rho: ρ, the learning rate at the end of a round, as a share of the rate at its start; 1 with ``alpha=1`` equals
            FedAvg.
        alpha: α, the server's step towards the mean of the clients; above 1 it goes past the mean.

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

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
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


@register("method", "fedmoswa")
@dataclass(frozen=True)
class FedMoSWA(FedSWA, ControlVariates):
    """FedMoSWA: FedSWA with control variates and server momentum (Liu et al. 2025).

    A step follows g − c_i + m, with c_i the client's own control and m the server's, both zero at first. Afterwards
    c_i⁺ = c_i − m + (x_g − y)/Σ_k η_k, the mean of the client's gradients by their rates, and at the server m ← m +
    γ·mean(c_i⁺ − m) over the clients of the round; SCAFFOLD's c is Σ c_i/N instead. Plain SGD only. The defaults are
    the paper's; in the authors' program the local rate is constant, α = 1, γ = 0.4, and the first m is the whole mean.

    In a warmup Σ_k η_k is over the steps in which the element took part, c_i changes only where the client uploads, and
    the mean runs over the owners of an element.

    Args:
        rho: ρ, as in `fedswa`.
        alpha: α, as in `fedswa`.
        gamma: γ, the server's step of m towards the mean of the round.

    >>> FedMoSWA().gamma
    0.2
    """

    gamma: Share = 0.2

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        nothing = trees.zeros_like(trees.pick(params, net.trainable))
        return super().init(net, params, total) | {"control": nothing}

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        return replace(super().broadcast(state, cohort), extra={"control": state["control"]})

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        local = super().start(net, download, memory)
        # Σ η_k/η: a number for each parameter, which a warmup makes one for each element
        return local | {"way": {name: value.new_zeros(()) for name, value in local["control"].items()}}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        moved, loss = super().step(net, local, batch, noise, lr)
        factor = self.factor(local)
        return moved | {"way": trees.map_tree(lambda way: way + factor, local["way"])}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        control, _ = self.new_controls(net, download, local, work, local["way"])
        change = trees.subtract(control, download.extra["control"])
        return memory | {"control": control}, upload.adding({"control": change})

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        changes = [upload.extra["control"] for upload in uploads]
        mean = average(changes, trees.zeros_like(state["control"]))
        control = trees.add(state["control"], mean, self.gamma)
        return super().update(net, state, uploads, average) | {"control": control}
