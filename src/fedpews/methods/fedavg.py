"""FedAvg: local SGD, then the mean (McMahan et al. 2017); the base of most methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods import optimizers
from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Rate, Upload, Work
from fedpews.methods.optimizers import Optimizer
from fedpews.methods.server_optimizers import SGD, ServerOptimizer
from fedpews.neurons.network import Batch, Network
from fedpews.options import Momentum, NotNegative, Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fedavg")
@dataclass(frozen=True)
class FedAvg(Method, ClientHalf):
    """K steps of SGD at each client, y ← y − η·∇f(y); the server takes the mean of the y.

    Most methods extend it, and override only where they differ: the gradient, the memory, or what is sent. The server's
    state is the params and its optimiser's slots. The client keeps nothing: its optimiser starts anew in every round,
    since its slots belong to another model.

    Args:
        momentum: of the local SGD; the FedPeWS paper uses none.
        weight_decay: of the local steps; the FedPeWS paper uses none.
        clip_norm: maximum norm of a local gradient; larger gradients are scaled down.
        optimizer: the local optimiser, by default SGD.

    >>> FedAvg(momentum=0.9).momentum
    0.9
    """

    takes_warmup: ClassVar[bool] = True

    momentum: Momentum = 0.0
    weight_decay: NotNegative = 0.0
    clip_norm: Positive | None = field(default=None, kw_only=True)
    optimizer: Optimizer = field(default=optimizers.SGD(), kw_only=True)
    server: ServerOptimizer = field(default=SGD(), kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.momentum and type(self.optimizer) is not optimizers.SGD:
            raise ConfigError(
                f"momentum goes with plain SGD; give {type(self.optimizer).__name__} its own options instead"
            )

    @cached_property
    def rule(self) -> Optimizer:
        """How a client moves along a gradient."""
        return optimizers.Momentum(self.momentum) if self.momentum else self.optimizer

    @property
    def is_plain(self) -> bool:
        """Whether a client's step is η times its gradient, weight decay apart."""
        return type(self.rule) is optimizers.SGD and self.clip_norm is None

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return self.server.init(net, params)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        return [self.broadcast(state, cohort)] * len(cohort.clients)

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        """The download that all clients get."""
        return Download(cohort.round, "train", cohort.total, state["params"])

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        if not self.rule.slots:
            return {"params": download.params}
        slots = {name: self.rule.start(download.params[name]) for name in net.trainable}
        return {"params": download.params} | by_slot(slots)

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        loss, grads, buffers = self.gradient(net, local, batch)
        if self.clip_norm is not None:
            grads = clip(net, grads, self.clip_norm)
        return self.descend(local, grads, buffers, lr), loss

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        """The loss, the gradient to descend on, and the new buffers."""
        return net.gradients(local["params"], batch)

    def descend(self, local: Nest, grads: Mapping[str, Tensor], buffers: Tree, lr: Rate) -> Nest:
        """One step of the local optimiser, with weight decay if it is set."""
        params, rule = local["params"], self.rule
        decay = self.weight_decay or rule.weight_decay
        values = {name: params[name] for name in grads}
        if decay and rule.decouples:
            values = {name: value - lr * decay * value for name, value in values.items()}
        elif decay:
            grads = {name: grad + decay * params[name] for name, grad in grads.items()}
        moved, slots = {}, {}
        for name, grad in grads.items():
            kept = {key: local[key][name] for key in rule.slots}
            moved[name], slots[name] = rule.step(values[name], grad, kept, lr)
        stepped = dict(local) | {"params": params | moved | buffers}
        return stepped | by_slot(slots) if rule.slots else stepped

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        return {}, work.upload(download, local["params"])

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        aggregate = self.aggregate(net, state["params"], uploads, average)
        values = [upload.params for upload in uploads]
        return state | self.server.move(net, state, aggregate, values, average)

    def aggregate(self, net: Network, old: Tree, uploads: Sequence[Upload], average: Average) -> Tree:
        """The aggregate of the uploads, before the server's step; an element that no client owns keeps its value."""
        return average([upload.params for upload in uploads], old)


def clip(net: Network, grads: Tree, most: float) -> Tree:
    """The gradient, clipped to the norm ``most``; masked neurons are excluded."""
    length = trees.norm(net.opened(grads))
    scale = (most / (length + 1e-6)).clamp_max(1.0)
    return {name: grad * scale for name, grad in grads.items()}


def weight_names(net: Network) -> tuple[str, ...]:
    """The trainable matrices and filters: not biases, nor the scale and shift of norm layers."""
    return tuple(name for name in net.trainable if len(net.shapes[name]) > 1)


def by_row(values: Tensor, like: Tensor) -> Tensor:
    """One value for each output unit, shaped to broadcast against its weights."""
    return values.view(-1, *[1] * (like.dim() - 1))


def by_slot(slots: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tree]:
    """name -> slot -> tensor as slot -> name -> tensor: a tree each, so that masks reach them like any other."""
    keys = dict.fromkeys(key for kept in slots.values() for key in kept)
    return {key: {name: kept[key] for name, kept in slots.items()} for key in keys}
