"""FedProx: local SGD with a penalty on the distance to the global model (Li et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpews.methods.contract import Download
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """FedAvg with (μ/2)‖y − x_g‖² added to the local loss, over the trainable parameters.

    Args:
        mu: μ, the weight of the proximal term; 0 equals FedAvg. The FedPeWS paper uses 0.01.

    >>> FedProx(mu=0.1).mu
    0.1
    """

    mu: NotNegative = 0.01

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        return super().start(net, download, memory) | {"anchor": download.params}

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        loss, grads, buffers = super().gradient(net, local, batch)
        y, anchor = local["params"], local["anchor"]
        return (
            loss,
            {name: grad + self.mu * (y[name] - anchor[name]) for name, grad in grads.items()},
            buffers,
        )
