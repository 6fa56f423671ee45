"""FedMoSWA: FedSWA with control variates whose common part has momentum (Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import Cohort, Download, Upload, Work
from fedpews.methods.fedswa import FedSWA
from fedpews.neurons.network import Batch, Network
from fedpews.options import Share
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fedmoswa")
@dataclass(frozen=True)
class FedMoSWA(FedSWA):
    """FedSWA whose steps follow g − c_i + m, with c_i the client's own control and m the server's, both zero at first.

    Afterwards c_i⁺ = c_i − m + (x_g − y)/Σ_k η_k, the mean of the client's gradients by their rates, and at the server
    m ← m + γ·mean(c_i⁺ − m) over the clients of the round; SCAFFOLD's c is Σ c_i/N instead. Plain SGD only. The
    defaults are the paper's; in the authors' program the local rate is constant, α = 1, γ = 0.4, and the first m is the
    whole mean.

    In a warmup Σ_k η_k is over the steps in which the element took part, c_i changes only where the client uploads, and
    the mean runs over the owners of an element.

    Args:
        rho: ρ, as in `fedswa`.
        alpha: α, as in `fedswa`.
        gamma: γ, how far m goes towards the round's mean.

    >>> FedMoSWA().gamma
    0.2
    """

    gamma: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.is_plain:
            raise ConfigError(
                "fedmoswa needs plain SGD (train.optimizer = 'sgd', no momentum, no clip_norm): only then is "
                "(x_g − y)/Σ η the mean of a client's gradients"
            )

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        nothing = trees.zeros_like(trees.pick(params, net.trainable))
        return super().init(net, params, total) | {"control": nothing}

    def broadcast(self, state: Nest, cohort: Cohort) -> Download:
        return replace(super().broadcast(state, cohort), extra={"control": state["control"]})

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        control = download.extra["control"]
        own = trees.zeros_like(control) if memory is None else memory["control"]
        return super().start(net, download, memory) | {
            "control": own,
            "correction": trees.subtract(control, own),  # m − c_i
            # Σ η_k/η: a number for each parameter, which a warmup makes one for each element
            "way": {name: value.new_zeros(()) for name, value in own.items()},
        }

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        loss, grads, buffers = super().gradient(net, local, batch)
        return loss, grads | trees.add(local["correction"], grads), buffers

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        moved, loss = super().step(net, local, batch, noise, lr)
        factor = self.factor(local)
        return moved | {"way": trees.map_tree(lambda way: way + factor, local["way"])}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        owned = {} if work.neurons is None else net.graph.expand(work.neurons)
        control: Tree = {}
        for name, own in local["control"].items():
            way = local["way"][name]
            # where no step was taken the result is not used
            drift = (download.params[name] - local["params"][name]) / (torch.where(way > 0, way, 1) * work.lr)
            moves = (way > 0) & owned[name] if name in owned else way > 0
            control[name] = torch.where(moves, drift - local["correction"][name], own)
        change = trees.subtract(control, download.extra["control"])
        return memory | {"control": control}, upload.adding({"control": change})

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        changes = [upload.extra["control"] for upload in uploads]
        mean = average(changes, trees.zeros_like(state["control"]))
        control = trees.add(state["control"], mean, self.gamma)
        return super().update(net, state, uploads, average) | {"control": control}
