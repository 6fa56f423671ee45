"""Ditto: every client also trains a personal model, kept near the global one (Li et al. 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from fedpews import trees
from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import (
    ClientHalf,
    Cohort,
    Download,
    Method,
    Upload,
    Work,
    Wrapper,
    inner_memory,
)
from fedpews.methods.fedprox import FedProx
from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("personal", "ditto")
@dataclass(frozen=True)
class Ditto(Wrapper):
    """Ditto: a personal model at each client, kept near the global one (Li et al. 2021).

    At every step of the inner method the client's own model v takes one too, on the same batch and by the same
    optimiser, on f(v) + (λ/2)‖v − x_g‖². v starts at the global model and never leaves the client. The global
    model is the inner method's to the bit. With λ = 0 the own models are those of local training.

    Args:
        strength: λ, how near the global model a client's own stays.

    >>> from fedpews.methods.fedavg import FedAvg
    >>> Ditto(FedAvg()).personalised
    True
    """

    strength: NotNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.inner.personalised:
            raise ConfigError(f"{type(self.inner).__name__} has personal models already; leave ditto out")

    @property
    def personalised(self) -> bool:
        return True

    def client(self, phase: str) -> ClientHalf:
        return DittoClient(self.inner.client(phase), own_solver(self.inner, self.strength))

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        return {"inner": self.inner.init(net, params, total)}

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        sent = self.inner.downloads(net, state["inner"], cohort)
        if any(download.neurons is not None for download in sent):
            raise ConfigError(
                "ditto keeps each client near the whole global model, so it needs a method that sends all of it, "
                "not one that assigns neurons to clients"
            )
        return sent

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        return {"inner": self.inner.update(net, state["inner"], uploads, average)}


@dataclass(frozen=True)
class DittoClient(ClientHalf):
    """The inner method's client, and a second model that stays at the client."""

    inner: ClientHalf
    solver: FedProx

    def noise_size(self, net: Network) -> int:
        return self.inner.noise_size(net)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        own = download.params if memory is None else memory["own"]
        near = {"anchor": download.params}
        return {
            "inner": self.inner.start(net, download, inner_memory(memory)),
            "own": self.solver.start(net, replace(download, params=own), None) | near,
        }

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        inner, loss = self.inner.step(net, local["inner"], batch, noise, lr)
        own, _ = self.solver.step(net, local["own"], batch, noise, lr)
        return {"inner": inner, "own": own}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = self.inner.finish(net, download, local["inner"], work)
        return {"inner": memory, "own": local["own"]["params"]}, upload

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return trees.pick(memory["own"], net.names)


def own_solver(method: Method, strength: float) -> FedProx:
    """How clients train their own models: by the optimiser with which they train the global one."""
    inner = method
    while not isinstance(inner, LocalSGD) and hasattr(inner, "inner"):
        inner = inner.inner
    if not isinstance(inner, LocalSGD):
        return FedProx(mu=strength)
    return FedProx(
        momentum=inner.momentum,
        weight_decay=inner.weight_decay,
        clip_norm=inner.clip_norm,
        optimizer=inner.optimizer,
        mu=strength,
    )
