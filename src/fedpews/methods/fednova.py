"""FedNova: updates normalised by the number of local steps (Wang et al. 2020)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import PARAMS, STEPS_TAKEN, Download, Upload, Work
from fedpews.methods.fedprox import FedProx
from fedpews.methods.optimizers import SGD, Momentum
from fedpews.neurons.network import Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fednova")
@dataclass(frozen=True)
class FedNova(FedProx):
    """FedAvg with every client's progress divided by the local work behind it, which removes its bias.

    d_i = (x_g − y_i)/a_i and x_g ← x_g − η_g·τ_eff·Σ p_i d_i with τ_eff = Σ p_i a_i. For K plain steps a_i = K;
    with momentum ρ it is (K − ρ(1−ρᴷ)/(1−ρ))/(1−ρ); with the proximal term μ it is (1−(1−ημ)ᴷ)/(ημ). With equal
    steps it is FedAvg.

    In a warmup all of this is per element: K counts the steps in which the element took part, so a client sends a_i
    for each, and the sums run over its owners. Owners that took no step with it have no d_i; their a_i is 0.

    Args:
        mu: μ, the weight of FedProx's proximal term; 0 means none.

    >>> FedNova().work(steps=5, lr=0.1)
    5.0
    """

    counts_steps: ClassVar[bool] = True

    mu: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and self.mu:
            raise ConfigError("fednova supports momentum or mu, not both; set one of them to 0.")
        if type(self.rule) not in (SGD, Momentum):
            raise ConfigError(
                f"fednova knows the work behind sgd and momentum, not behind {type(self.rule).__name__}; "
                "set train.optimizer to 'sgd' or 'momentum'"
            )
        if self.mu and not self.is_plain:
            raise ConfigError("fednova knows the work of mu only for plain SGD; set mu to 0.")

    def work(self, steps: float | Tensor, lr: float) -> float | Tensor:
        """a_i, the sum of the weights with which the local gradients enter x_g − y_i, over η."""
        if self.mu:
            return (1 - (1 - lr * self.mu) ** steps) / (lr * self.mu)
        rho = self.rule.momentum if isinstance(self.rule, Momentum) else 0.0
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        return memory, add_work(net, local, upload, lambda steps: self.work(steps, work.lr))

    def aggregate(self, net: Network, old: Tree, uploads: Sequence[Upload], average: Average) -> Tree:
        model = trees.pick(old, net.trainable)
        nothing = trees.zeros_like(model)
        done, progress = divide_by_work(model, uploads)  # a_i, d_i
        direction, effective = average(progress, nothing), average(done, nothing)  # Σ p_i d_i, τ_eff
        if any("work_each" in upload.extra for upload in uploads):
            moved = average([{n: (a[n] > 0).to(v) for n, v in model.items()} for a in done], nothing)
            tiny = torch.finfo(torch.float32).tiny
            direction = {n: value / moved[n].clamp_min(tiny) for n, value in direction.items()}
        buffers = average([upload.params for upload in uploads], trees.pick(old, net.buffers))
        return {name: value - effective[name] * direction[name] for name, value in model.items()} | buffers


def add_work(
    net: Network, local: Nest, upload: Upload, work: Callable[[float | Tensor], float | Tensor]
) -> Upload:
    """The upload with the local work behind it: a number, and in a warmup one for each element."""
    done = torch.as_tensor(work(float(upload.steps)), dtype=torch.float32, device=net.device)
    upload = upload.adding({"work": {"done": done}})
    if STEPS_TAKEN not in local:
        return upload
    each = {
        name: torch.as_tensor(work(steps.double())).to(local[PARAMS][name])
        for name, steps in local[STEPS_TAKEN].items()
        if name in net.trainable
    }
    # of the parameters' shapes, so that only what the client owns is sent
    return upload.adding(
        {"work_each": {name: value.expand(net.shapes[name]) for name, value in each.items()}}
    )


def divide_by_work(model: Tree, uploads: Sequence[Upload]) -> tuple[list[Tree], list[Tree]]:
    """The work a_i behind every element of each upload, and (x_g − y_i)/a_i, which is 0 where a_i is."""
    work, progress = [], []
    for upload in uploads:
        done, each = upload.extra["work"]["done"], upload.extra.get("work_each", {})
        a = {name: each.get(name, done).to(x).expand_as(x) for name, x in model.items()}
        work.append(a)
        progress.append(
            {n: torch.where(a[n] > 0, (x - upload.params[n]) / a[n], 0.0) for n, x in model.items()}
        )
    return work, progress
