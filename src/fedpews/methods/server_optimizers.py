"""Server optimisers: how far, and which way, the server moves towards the aggregate (Reddi et al. 2021).

Each takes Δ = x_g − aggregate as if it were a gradient, by the rules of `optimizers.py`. They go with every method
whose server averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews.methods import optimizers
from fedpews.methods.average import Average
from fedpews.methods.optimizers import Optimizer, Slots
from fedpews.neurons.network import Network
from fedpews.options import Positive
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class ServerOptimizer(Optimizer):
    """A rule with the server's own rate.

    Args:
        lr: η_g, the server's rate.
    """

    lr: Positive = 1.0

    def approach(self, old: Tensor, aggregate: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
        """The parameter's new value and slots, given where the clients say it should go."""
        return self.step(old, old - aggregate, slots, self.lr)


def init_server(optimizer: ServerOptimizer, net: Network, params: Tree) -> Nest:
    """The slots of all trainable parameters."""
    return {name: optimizer.start(params[name]) for name in net.trainable}


def step_server(
    optimizer: ServerOptimizer, net: Network, old: Tree, aggregate: Tree, slots: Nest, average: Average
) -> tuple[Tree, Nest]:
    """New parameters and slots. An element nobody owned stays as it was, whatever momentum it has.

    With ``average.zero_unowned`` its aggregate is zero instead: x_g ← x_g − η_g·x_g for a plain step.
    Buffers are statistics, not directions: they take the aggregate as it is.
    """
    covered = average.covered(old)
    new_params, new_slots = dict(aggregate), {}
    for name in net.trainable:
        if average.zero_unowned:
            goal = torch.where(covered[name], aggregate[name], 0.0)
            new_params[name], new_slots[name] = optimizer.approach(old[name], goal, slots[name])
            continue
        value, kept = optimizer.approach(old[name], aggregate[name], slots[name])
        new_params[name] = torch.where(covered[name], value, old[name])
        new_slots[name] = {
            key: torch.where(covered[name], slot, slots[name][key]) for key, slot in kept.items()
        }
    return new_params, new_slots


@dataclass(frozen=True)
class SGD(optimizers.SGD, ServerOptimizer):
    """x_g ← x_g − η_g·Δ. With ``lr=1`` the server takes the aggregate."""

    def approach(self, old: Tensor, aggregate: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
        return (aggregate, {}) if self.lr == 1 else super().approach(old, aggregate, slots)


@dataclass(frozen=True)
class Momentum(optimizers.Momentum, ServerOptimizer):
    """FedAvgM: momentum at the server, v ← β·v + Δ and x_g ← x_g − η_g·v."""


@dataclass(frozen=True)
class Adagrad(optimizers.Adagrad, ServerOptimizer):
    """FedAdagrad: a server rate that shrinks where updates were large, v ← v + Δ², without a first moment."""

    lr: Positive = 0.1
    tau: Positive = 1e-3


@dataclass(frozen=True)
class Yogi(optimizers.Yogi, ServerOptimizer):
    """FedYogi: Adam at the server with a slower second moment, v ← v − (1−β₂)·Δ²·sign(v − Δ²)."""

    lr: Positive = 0.1


@dataclass(frozen=True)
class Adam(optimizers.Smoothed, ServerOptimizer):
    """FedAdam: Adam at the server, v ← β₂v + (1−β₂)Δ²."""

    lr: Positive = 0.1
