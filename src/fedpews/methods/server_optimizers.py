"""Server optimisers: how far, and which way, the server moves towards the aggregate (Reddi et al. 2021).

Each takes Δ = x_g − aggregate as if it were a gradient. They go with every method whose server averages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews.methods import options
from fedpews.methods.average import Average
from fedpews.methods.options import Options, Positive
from fedpews.neurons.network import Network
from fedpews.trees import Nest, Tree

Slots = dict[str, Tensor]


class ServerOptimizer(Options, ABC):
    """The rule for one parameter; what it remembers about it is its slots."""

    @abstractmethod
    def start(self, like: Tensor) -> Slots:
        """The slots before round 1."""

    @abstractmethod
    def step(self, old: Tensor, aggregate: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
        """The parameter's new value and slots."""


def init_server(optimizer: ServerOptimizer, net: Network, params: Tree) -> Nest:
    """The slots of all trainable parameters."""
    return {name: optimizer.start(params[name]) for name in net.trainable}


def step_server(
    optimizer: ServerOptimizer, net: Network, old: Tree, aggregate: Tree, slots: Nest, average: Average
) -> tuple[Tree, Nest]:
    """New parameters and slots. An element nobody owned stays as it was, whatever momentum it has.

    Buffers are statistics, not directions: they take the aggregate as it is.
    """
    covered = average.covered(old)
    new_params, new_slots = dict(aggregate), {}
    for name in net.trainable:
        value, kept = optimizer.step(old[name], aggregate[name], slots[name])
        new_params[name] = torch.where(covered[name], value, old[name])
        new_slots[name] = {
            key: torch.where(covered[name], slot, slots[name][key]) for key, slot in kept.items()
        }
    return new_params, new_slots


@dataclass(frozen=True)
class SGD(ServerOptimizer):
    """x_g ← x_g − η_g·Δ. With ``lr=1`` the server takes the aggregate."""

    lr: Positive = 1.0

    def start(self, like: Tensor) -> Slots:
        return {}

    def step(self, old: Tensor, aggregate: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
        return (aggregate if self.lr == 1 else old - self.lr * (old - aggregate)), {}


@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """FedAvgM: momentum at the server, v ← β·v + Δ and x_g ← x_g − η_g·v.

    Args:
        lr: η_g, the server's rate.
        momentum: β.
    """

    lr: Positive = 1.0
    momentum: options.Momentum = 0.9

    def start(self, like: Tensor) -> Slots:
        return {"velocity": torch.zeros_like(like)}

    def step(self, old: Tensor, aggregate: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
        velocity = self.momentum * slots["velocity"] + (old - aggregate)
        return old - self.lr * velocity, {"velocity": velocity}


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """m ← β₁m + (1−β₁)Δ, v by the variant's own rule, x_g ← x_g − η_g·m/(√v + τ); v starts at τ².

    Args:
        lr: η_g, the server's rate.
        beta1: β₁, of the first moment.
        beta2: β₂, of the second moment.
        tau: τ, keeps the step finite where v is small.
    """

    lr: Positive = 0.1
    beta1: options.Momentum = 0.9
    beta2: options.Momentum = 0.99
    tau: Positive = 1e-3

    def start(self, like: Tensor) -> Slots:
        return {"first": torch.zeros_like(like), "second": torch.full_like(like, self.tau**2)}

    def step(self, old: Tensor, aggregate: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, Slots]:
        delta = old - aggregate
        first = self.beta1 * slots["first"] + (1 - self.beta1) * delta
        second = self.second(slots["second"], delta * delta)
        return old - self.lr * first / (second.sqrt() + self.tau), {"first": first, "second": second}

    @abstractmethod
    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        """The new second moment from the old one and Δ²."""


@dataclass(frozen=True)
class Adagrad(Adaptive):
    """FedAdagrad: a server rate that shrinks where updates were large, v ← v + Δ², without a first moment."""

    beta1: options.Momentum = 0.0

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@dataclass(frozen=True)
class Yogi(Adaptive):
    """FedYogi: Adam at the server with a slower second moment, v ← v − (1−β₂)·Δ²·sign(v − Δ²)."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)


@dataclass(frozen=True)
class Adam(Adaptive):
    """FedAdam: Adam at the server, v ← β₂v + (1−β₂)Δ²."""

    def second(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared
