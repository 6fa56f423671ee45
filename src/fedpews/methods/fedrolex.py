"""FedRolex: HeteroFL with a window that rolls over the units (Alam et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpews.methods.heterofl import HeteroFL
from fedpews.methods.subnetwork import window
from fedpews.neurons.graph import NeuronGraph
from fedpews.registry import register


@register("method", "fedrolex")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """HeteroFL, but in round t a client trains units (t + 0 … ⌈r·K⌉ − 1) mod K, so that all get their turn.

    t is 0 in the first round. At width 1 this is HeteroFL at width 1, and so FedAvg.

    Args:
        widths: r for client 0, 1, …, and again from the start when there are more clients.

    >>> FedRolex(widths=(0.5,)).width(0)
    0.5
    """

    def neurons(self, graph: NeuronGraph, client: int, round: int) -> Tensor:
        return window(graph, self.width(client), offset=round - 1)
