"""Clients of unequal rank: each has the first components of every LoRA adapter, as many as its own rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.average import Average
from fedpews.methods.contract import (
    ClientHalf,
    ClientWrapper,
    Cohort,
    Download,
    Upload,
    Wrapper,
    change_each,
)
from fedpews.methods.subnetwork import AssignedClient
from fedpews.models.adapters import COMPONENTS
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Network
from fedpews.options import Count
from fedpews.trees import Nest, Tree, where
from fedpews.warmup.warmup import LearnedClient, Warmup


@dataclass(frozen=True)
class Ranks(Wrapper):
    """The inner method among clients of unequal rank; put a warmup around that method first, if there is one.

    A component is a neuron, so masks and the average are those of any other neuron. Zero-padding is that of HetLoRA
    (Cho et al. 2024) without its pruning and its weights by norm.

    Args:
        ranks: of client 0, 1, …, and again from the start when there are more clients.
        padding: average a component over all clients, with zeros from those whose rank is smaller, instead of over
            those that have it.

    >>> from fedpews.methods.fedavg import FedAvg
    >>> Ranks(FedAvg(), (8, 2)).rank(3)
    2
    """

    ranks: Annotated[tuple[Count, ...], Field(min_length=1)]
    padding: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.inner.takes_warmup or isinstance(self.inner, Warmup)):
            name = type(self.inner).__name__
            raise ConfigError(
                f"model.lora.ranks goes with methods that train all of the model, not with {name}"
            )

    def rank(self, client: int) -> int:
        return self.ranks[client % len(self.ranks)]

    def neurons(self, graph: NeuronGraph, client: int) -> Tensor:
        """The neurons a client may have: (neurons,) bool. All clients have what is no component of an adapter."""
        neurons = torch.ones(graph.size, dtype=torch.bool)
        for layer in graph.layers:
            if COMPONENTS in f"{layer.name}.":
                neurons[layer.start + self.rank(client) : layer.start + layer.size] = False
        return neurons

    def client(self, phase: str) -> ClientHalf:
        half = self.inner.client(phase)
        # those that train a part of the network already keep to what they are assigned
        return (
            ClientWrapper(half) if isinstance(half, LearnedClient | AssignedClient) else AssignedClient(half)
        )

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        if not any(COMPONENTS in f"{layer.name}." for layer in net.graph.layers):
            raise ConfigError("model.lora.ranks: no component of an adapter can be masked in this model")
        return super().init(net, params, total)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        neurons = {
            self.rank(client): self.neurons(net.graph, client).to(net.device) for client in cohort.clients
        }

        def assign(download: Download, rank: int) -> Download:
            mine = neurons[rank]
            return replace(download, neurons=mine if download.neurons is None else mine & download.neurons)

        inner = super().downloads(net, state, replace(cohort, masked=True))
        return change_each(inner, [self.rank(client) for client in cohort.clients], assign)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        if self.padding:
            uploads, average = self._padded(net, uploads, average)
        return super().update(net, state, uploads, average)

    def _padded(
        self, net: Network, uploads: Sequence[Upload], average: Average
    ) -> tuple[list[Upload], Average]:
        """The uploads with zeros beyond each client's rank, and the average that counts these zeros.

        They do not count for a component that no client trained in this round: it would be zero for ever.
        """
        owned = [net.graph.expand(_neurons(upload)) for upload in uploads]
        trained = net.graph.covered(torch.stack([_neurons(upload) for upload in uploads]))
        padded, masks = [], []
        for upload, mine in zip(uploads, owned, strict=True):
            within = net.graph.expand(self.neurons(net.graph, upload.client).to(net.device))
            zeros = {name: torch.zeros_like(upload.params[name]) for name in within if name in upload.params}
            params = where(within, {name: upload.params[name] for name in zeros}, zeros)
            padded.append(replace(upload, params={**upload.params, **params}))
            masks.append({name: mask | (~within[name] & trained[name]) for name, mask in mine.items()})
        return padded, replace(average, masks=tuple(masks))


def _neurons(upload: Upload) -> Tensor:
    assert upload.neurons is not None, "every client says which neurons are its own"
    return upload.neurons
