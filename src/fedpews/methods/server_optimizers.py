"""Server optimisers: how far, and which way, the server moves towards the aggregate (Reddi et al. 2021).

Each takes Δ = x_g − aggregate as if it were a gradient, by the rules of `optimizers.py`. They go with every method
whose server averages. FedExP sets the length of the step from the clients' changes (Jhunjhunwala et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods import optimizers
from fedpews.methods.average import Average
from fedpews.methods.optimizers import Optimizer, Slots
from fedpews.neurons.network import Network
from fedpews.options import NotNegative, Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@dataclass(frozen=True)
class ServerOptimizer(Optimizer):
    """A rule with the server's own rate.

    Args:
        lr: η_g, the server's learning rate.
    """

    lr: Positive = 1.0

    def approach(self, old: Tensor, aggregate: Tensor, slots: Slots) -> tuple[Tensor, Slots]:
        """The parameter's new value and slots, given where the clients say it should go."""
        return self.step(old, old - aggregate, slots, self.lr)

    def init(self, net: Network, params: Tree) -> Nest:
        """The model and the slots of its trainable parameters, before round 1."""
        return {"params": params, "server": {name: self.start(params[name]) for name in net.trainable}}

    def move(
        self, net: Network, state: Nest, aggregate: Tree, values: Sequence[Tree], average: Average
    ) -> Nest:
        """The model and the slots after a round, given the aggregate of the clients' ``values``.

        An element that no client owns keeps its value and its slots, whatever momentum it has. With
        ``average.zero_unowned`` its aggregate is zero instead: x_g ← x_g − η_g·x_g for a plain step. Buffers are
        statistics, not directions: they are set to the aggregate.
        """
        old, slots = state["params"], state["server"]
        new_params, new_slots = dict(aggregate), {}
        for name, owned in average.covered(trees.pick(old, net.trainable)).items():
            goal = torch.where(owned, aggregate[name], 0.0) if average.zero_unowned else aggregate[name]
            value, moved = self.approach(old[name], goal, slots[name])
            moves = owned | average.zero_unowned
            new_params[name] = torch.where(moves, value, old[name])
            new_slots[name] = {k: torch.where(moves, slot, slots[name][k]) for k, slot in moved.items()}
        return {"params": new_params, "server": new_slots}


@dataclass(frozen=True)
class SGD(optimizers.SGD, ServerOptimizer):
    """x_g ← x_g − η_g·Δ. With ``lr=1`` the server takes the aggregate."""

    def move(
        self, net: Network, state: Nest, aggregate: Tree, values: Sequence[Tree], average: Average
    ) -> Nest:
        if self.lr != 1:
            return super().move(net, state, aggregate, values, average)
        if average.zero_unowned:
            owned = average.covered({name: aggregate[name] for name in net.trainable})
            aggregate = aggregate | {n: torch.where(mask, aggregate[n], 0.0) for n, mask in owned.items()}
        return {"params": aggregate, "server": state["server"]}


@register("server", "fedavgm")
@dataclass(frozen=True)
class Momentum(optimizers.Momentum, ServerOptimizer):
    """FedAvgM: momentum at the server, v ← β·v + Δ and x_g ← x_g − η_g·v."""


@register("server", "fedadagrad")
@dataclass(frozen=True)
class Adagrad(optimizers.Adagrad, ServerOptimizer):
    """FedAdagrad: a server rate that shrinks where updates were large, v ← v + Δ², without a first moment."""

    lr: Positive = 0.1
    tau: Positive = 1e-3


@register("server", "fedyogi")
@dataclass(frozen=True)
class Yogi(optimizers.Yogi, ServerOptimizer):
    """FedYogi: Adam at the server with a slower second moment, v ← v − (1−β₂)·Δ²·sign(v − Δ²)."""

    lr: Positive = 0.1


@register("server", "fedadam")
@dataclass(frozen=True)
class Adam(optimizers.Smoothed, ServerOptimizer):
    """FedAdam: Adam at the server, v ← β₂v + (1−β₂)Δ²."""

    lr: Positive = 0.1


@register("server", "fedexp")
@dataclass(frozen=True)
class FedExP(SGD):
    """FedExP: a longer server step where clients' changes differ, η_g = max(1, mean ‖Δ_i‖²/(2(‖Δ̄‖² + ε))).

    Δ_i = y_i − x_g, Δ̄ is the aggregate's step and x_g ← x_g + lr·η_g·Δ̄. The mean of the squares is taken over the
    owners of each element, and weighed like the models; if all own everything it is the paper's Σ‖Δ_i‖²/M. Where every
    element has one owner η_g is 1. The authors' program multiplies ε by the number of clients, lets it fall with the
    local rate, and evaluates the mean of the last two models; here ε is the paper's and the last model is evaluated.

    Args:
        lr: factor of the server's step.
        eps: ε, keeps the step finite when the changes cancel; the authors use 0.001, and 0.1 for EMNIST.
    """

    eps: NotNegative = 1e-3

    def move(
        self, net: Network, state: Nest, aggregate: Tree, values: Sequence[Tree], average: Average
    ) -> Nest:
        goal = self.extrapolate(net, state["params"], aggregate, values, average)
        return super().move(net, state, goal, values, average)

    def extrapolate(
        self, net: Network, old: Tree, aggregate: Tree, values: Sequence[Tree], average: Average
    ) -> Tree:
        """x_g + η_g·Δ̄."""
        model = {name: old[name] for name in net.trainable if name in values[0]}
        squares = [{n: (value[n] - x) ** 2 for n, x in model.items()} for value in values]
        mean = average(squares, trees.zeros_like(model))
        step = trees.subtract(trees.pick(aggregate, model), model)
        apart = torch.stack([mean[name].float().sum() for name in sorted(mean)]).sum()
        together = trees.norm(step) ** 2 + self.eps
        # changes of exactly zero go nowhere, whatever the rate
        rate = (apart / (2 * together.clamp_min(torch.finfo(torch.float32).tiny))).clamp_min(1.0)
        return aggregate | trees.add(model, step, rate)
