"""IST: the hidden neurons are assigned anew to the clients in every round (Yuan et al. 2022)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.contract import ClientHalf, Cohort, Download
from fedpews.methods.local_sgd import LocalSGD
from fedpews.methods.subnetwork import AssignedClient
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.registry import register
from fedpews.seeds import fold
from fedpews.trees import Nest


@register("method", "ist")
@dataclass(frozen=True)
class IST(LocalSGD):
    """Independent subnet training: every round assigns each hidden layer's neurons to the cohort, none twice.

    A client trains the network of its own neurons alone; inputs and outputs are whole for everyone. What one
    client owns overwrites the server's copy, what several own (the outputs' biases) is averaged, and a weight
    between two clients' neurons keeps its value. With one client this is local SGD.

    >>> IST().takes_warmup
    False
    """

    takes_warmup: ClassVar[bool] = False

    def client(self, phase: str) -> ClientHalf:
        return AssignedClient(self)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        whole = self.broadcast(state, cohort)
        assigned = assign_neurons(net.graph, cohort)
        return [replace(whole, neurons=neurons.to(net.device)) for neurons in assigned]


def assign_neurons(graph: NeuronGraph, cohort: Cohort) -> list[Tensor]:
    """Each client's neurons, (neurons,) bool: every layer shuffled, then cut into parts as equal as possible."""
    count = len(cohort.clients)
    assigned = [torch.zeros(graph.size, dtype=torch.bool) for _ in range(count)]
    for layer in graph.layers:
        if layer.size < count:
            raise ConfigError(
                f"layer {layer.name} has {layer.size} neurons, too few for {count} clients; "
                "lower participation or take a wider model."
            )
        generator = torch.Generator().manual_seed(fold(cohort.seed, "deal", layer.start))
        shuffled = torch.randperm(layer.size, generator=generator)
        for neurons, part in zip(assigned, shuffled.tensor_split(count), strict=True):
            neurons[layer.start + part] = True
    return assigned
