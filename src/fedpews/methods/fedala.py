"""FedALA: each client learns how much of the global model to adopt, weight by weight (Zhang et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedpews import trees
from fedpews.methods.contract import Download, Rate, Upload, Work
from fedpews.methods.fedavg import FedAvg, clip
from fedpews.methods.fedbn import find
from fedpews.neurons.network import Batch, Network
from fedpews.options import Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fedala")
@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedAvg whose clients begin a round between their own last model and the global one: x_i + (x_g − x_i)·W.

    W is a number in [0, 1] for each weight of the upper layers, 1 at first and kept by the client; below them the
    global model is taken. The first steps of a round move W alone, W ← clip(W − η_w·∇f·(x_g − x_i)), all others the
    model, as in FedAvg. A client's model is the one with which its last round ended. In its first round nothing is
    mixed.

    The paper moves W over a random part of the samples before the round, the first time until the loss is steady; here
    it takes the round's own batches, as many each time. The authors' program evaluates a client's model after W was
    learned and before the round's training.

    Args:
        names: the layers to mix: ``"head"`` (the last layer), ``"all"``, or names of parameters or modules.
        weight_lr: η_w, the learning rate of W; the authors use 1.
        weight_steps: number of steps per round that train W.

    >>> FedALA().personalised
    True
    """

    takes_warmup: ClassVar[bool] = False
    personalised = True

    names: tuple[str, ...] | str = "head"
    weight_lr: Positive = 1.0
    weight_steps: Annotated[int, Field(ge=0)] = 5

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        find(net, self.names)  # a wrong name is an error before the first round
        return super().init(net, params, total)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        upper = tuple(name for name in find(net, self.names) if name in net.trainable)
        common = trees.pick(download.params, upper)
        own = common if memory is None else trees.pick(memory["params"], upper)
        weights = trees.map_tree(torch.ones_like, common) if memory is None else memory["weights"]
        local = super().start(net, download, None)
        away = trees.subtract(common, own)  # x_g − x_i
        return local | {
            "params": local["params"] | mixed(own, away, weights),
            "own": own,
            "away": away,
            "weights": weights,
            "left": {"steps": torch.tensor(0 if memory is None else self.weight_steps, device=net.device)},
        }

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        loss, grads, buffers = self.gradient(net, local, batch)
        is_mixing = local["left"]["steps"] > 0
        weights = {
            n: (w - self.weight_lr * grads[n] * local["away"][n]).clamp(0, 1)
            for n, w in local["weights"].items()
        }
        still = local["params"] | mixed(local["own"], local["away"], weights)
        if self.clip_norm is not None:
            grads = clip(net, grads, self.clip_norm)
        moved = self.descend(local, grads, buffers, lr)

        def choose(yes: Tree, no: Tree) -> Tree:
            return trees.map_tree(lambda a, b: torch.where(is_mixing, a, b), yes, no)

        chosen = {key: choose(local[key], moved[key]) for key in self.rule.slots}
        return moved | chosen | {
            "params": choose(still, moved["params"]),
            "weights": choose(weights, local["weights"]),
            "left": {"steps": local["left"]["steps"] - 1},
        }, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        return {"params": local["params"], "weights": local["weights"]}, upload

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return trees.pick(memory["params"], net.names)


def mixed(own: Tree, away: Tree, weights: Tree) -> Tree:
    """x_i + (x_g − x_i)·W."""
    return trees.map_tree(lambda x, d, w: x + d * w, own, away, weights)
