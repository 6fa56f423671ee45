"""Ditto: every client also trains a personal model near the global model (Li et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.contract import (
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Method,
    Rate,
    Upload,
    Work,
    Wrapper,
)
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.fedprox import FedProx
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("personal", "ditto")
@dataclass(frozen=True)
class Ditto(Wrapper):
    """Ditto: a personal model at each client with a penalty on its distance to the global model (Li et al. 2021).

    At every step of the inner method the client's own model v takes one too, on the same batch and by the same
    optimiser, on f(v) + (λ/2)‖v − x_g‖². v starts at the global model and never leaves the client. The global
    model is the inner method's to the bit. With λ = 0 the own models are those of local training.

    Args:
        strength: λ, the weight of the penalty on a personal model's distance to the global model.

    >>> from fedpews.methods.fedavg import FedAvg
    >>> Ditto(FedAvg()).personalised
    True
    """

    personalised = True

    strength: NotNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inner.refuse_personal("ditto")

    def client(self, phase: str) -> ClientHalf:
        return DittoClient(self.inner.client(phase), own_solver(self.inner, self.strength))

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        downloads = super().downloads(net, state, cohort)
        if any(download.neurons is not None for download in downloads):
            raise ConfigError(
                "ditto keeps each client near the whole global model, so it needs a method that sends all of it, "
                "not one that assigns neurons to clients"
            )
        return downloads


@dataclass(frozen=True)
class DittoClient(ClientWrapper):
    """The inner method's client, and a second model that stays at the client."""

    solver: FedProx

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        own = (memory or {}).get("own", download.params)
        solver = self.solver.start(net, replace(download, params=own), None) | {"anchor": download.params}
        return super().start(net, download, memory) | {"own": solver}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        moved, loss = super().step(net, local, batch, noise, lr)
        own, _ = self.solver.step(net, local["own"], batch, noise, lr)
        return moved | {"own": own}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = super().finish(net, download, local, work)
        return memory | {"own": local["own"]["params"]}, upload

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return trees.pick(memory["own"], net.names)


def own_solver(method: Method, strength: float) -> FedProx:
    """How clients train their own models: by the optimiser with which they train the global one."""
    inner = method
    while not isinstance(inner, FedAvg) and hasattr(inner, "inner"):
        inner = inner.inner
    if not isinstance(inner, FedAvg):
        return FedProx(mu=strength)
    return FedProx(
        momentum=inner.momentum,
        weight_decay=inner.weight_decay,
        clip_norm=inner.clip_norm,
        optimizer=inner.optimizer,
        mu=strength,
    )
