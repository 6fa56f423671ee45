"""FedNova: clients that take more steps do not count for more (Wang et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.fedprox import FedProx
from fedpews.methods.optimizers import SGD, Momentum
from fedpews.methods.options import NotNegative
from fedpews.neurons.network import Network
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class FedNova(FedProx):
    """FedAvg with every client's progress divided by the local work behind it, which removes its bias.

    d_i = (x_g − y_i)/a_i and x_g ← x_g − η_g·τ_eff·Σ p_i d_i with τ_eff = Σ p_i a_i. For K plain steps a_i = K;
    with momentum ρ it is (K − ρ(1−ρᴷ)/(1−ρ))/(1−ρ); with the proximal term μ it is (1−(1−ημ)ᴷ)/(ημ). In a
    warmup both sums run over the owners of each element. With equal steps it is FedAvg.

    Args:
        mu: strength of FedProx' term; 0 leaves it out.

    >>> FedNova().work(steps=5, lr=0.1)
    5.0
    """

    mu: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.mu:
            raise ConfigError("fednova knows the work of momentum or of mu, not of both; set one to 0.")
        if type(self.rule) not in (SGD, Momentum):
            raise ConfigError(
                f"fednova knows the work behind sgd and momentum, not behind {type(self.rule).__name__}; "
                "set train.optimizer to 'sgd' or 'momentum'"
            )
        if self.mu and not self.is_plain:
            raise ConfigError("fednova knows the work of mu only for plain SGD; set mu to 0.")

    def work(self, steps: int, lr: float) -> float:
        """a_i, the sum of the weights with which the local gradients enter x_g − y_i, over η."""
        if self.mu:
            return (1 - (1 - lr * self.mu) ** steps) / (lr * self.mu)
        rho = self.rule.momentum if isinstance(self.rule, Momentum) else 0.0
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        done = torch.tensor(self.work(work.steps, work.lr), device=net.device)
        return memory, upload.adding({"work": {"done": done}})

    def aggregate(self, net: Network, old: Tree, uploads: Sequence[Upload], average: Average) -> Tree:
        done = [upload.extra["work"]["done"] for upload in uploads]  # a_i
        model = trees.pick(old, net.trainable)
        nothing = trees.zeros_like(model)
        progress = [
            {name: (value - upload.params[name]) / a for name, value in model.items()}
            for a, upload in zip(done, uploads, strict=True)
        ]
        direction = average(progress, nothing)
        effective = average([{n: a.expand_as(v) for n, v in model.items()} for a in done], nothing)  # τ_eff
        buffers = average([upload.params for upload in uploads], trees.pick(old, net.buffers))
        return {name: value - effective[name] * direction[name] for name, value in model.items()} | buffers
