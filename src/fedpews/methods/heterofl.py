"""HeteroFL: every client trains the network at its own width (Diao et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedpews.methods.contract import ClientHalf, Cohort, Download
from fedpews.methods.local_sgd import LocalSGD
from fedpews.methods.subnetwork import AssignedClient, window
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.options import Share
from fedpews.registry import register
from fedpews.trees import Nest


@register("method", "heterofl")
@dataclass(frozen=True)
class HeteroFL(LocalSGD):
    """Every client trains the first ⌈r·K⌉ units of each hidden layer of K, with r its own fixed width.

    In training, what is read from a unit is scaled by 1/r, so that layers see inputs of the usual size; with
    ReLU that is the same as scaling before the activation. Each element is averaged over the clients whose
    width covers it. At width 1 this is FedAvg. The classes a client lacks are not masked out of its loss.

    Args:
        widths: r for client 0, 1, …, and again from the start when there are more clients.

    >>> HeteroFL(widths=(1.0, 0.5)).width(3)
    0.5
    """

    takes_warmup: ClassVar[bool] = False

    widths: Annotated[tuple[Share, ...], Field(min_length=1)] = (1.0, 0.5, 0.25, 0.125, 0.0625)

    def width(self, client: int) -> float:
        return self.widths[client % len(self.widths)]

    def neurons(self, graph: NeuronGraph, client: int, round: int) -> Tensor:
        """The units a client trains in a round: (neurons,) bool."""
        return window(graph, self.width(client))

    def client(self, phase: str) -> ClientHalf:
        return AssignedClient(self)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        whole, device = self.broadcast(state, cohort), net.device
        return [
            replace(
                whole,
                neurons=self.neurons(net.graph, client, cohort.round).to(device),
                extra={"scale": {"scale": torch.tensor(1 / self.width(client), device=device)}},
            )
            for client in cohort.clients
        ]
