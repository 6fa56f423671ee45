"""Partial training: each client trains the neurons that the server assigns to it in a round."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax

from fedpews.errors import ConfigError
from fedpews.methods.contract import ClientHalf, Cohort, Download, Rate
from fedpews.methods.fedavg import FedAvg
from fedpews.methods.subnetwork import AssignedClient, step_subnetwork
from fedpews.neurons.graph import NeuronGraph
from fedpews.neurons.network import Batch, Network
from fedpews.options import Share
from fedpews.registry import register
from fedpews.seeds import fold
from fedpews.trees import Nest, Tree

Shares = Annotated[tuple[Share, ...], Field(min_length=1)]


@dataclass(frozen=True)
class PartialTraining(FedAvg):
    """Local SGD of assigned neurons; each element is averaged over the clients that train it."""

    takes_warmup: ClassVar[bool] = False

    @abstractmethod
    def assign(self, graph: NeuronGraph, cohort: Cohort) -> list[Tensor]:
        """The neurons of each client of a cohort: (neurons,) bool."""

    def client(self, phase: str) -> ClientHalf:
        return AssignedClient(self)

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        whole = self.broadcast(state, cohort)
        return [replace(whole, neurons=n.to(net.device)) for n in self.assign(net.graph, cohort)]


@register("method", "heterofl")
@dataclass(frozen=True)
class HeteroFL(PartialTraining):
    """HeteroFL: every client trains the network at its own width (Diao et al. 2021).

    A client trains the first ⌈r·K⌉ units of each hidden layer of K, with r its own fixed width. In training, what is
    read from a unit is scaled by 1/r, so that layers see inputs of the usual size; with ReLU that is the same as
    scaling before the activation. At width 1 this is FedAvg. The paper also masks the classes that a client lacks
    out of its loss, which is left out here.

    Args:
        widths: r of client 0, 1, …; the list repeats if there are more clients.

    >>> HeteroFL(widths=(1.0, 0.5)).width(3)
    0.5
    """

    widths: Shares = (1.0, 0.5, 0.25, 0.125, 0.0625)

    def width(self, client: int) -> float:
        return self.widths[client % len(self.widths)]

    def assign(self, graph: NeuronGraph, cohort: Cohort) -> list[Tensor]:
        return [window(graph, self.width(client)) for client in cohort.clients]

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        scales = [torch.tensor(1 / self.width(client), device=net.device) for client in cohort.clients]
        downloads = super().downloads(net, state, cohort)
        return [replace(d, extra={"scale": {"scale": s}}) for d, s in zip(downloads, scales, strict=True)]


@register("method", "fedrolex")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """FedRolex: HeteroFL with a window that rolls over the units (Alam et al. 2022).

    In round t a client trains units (t + 0 … ⌈r·K⌉ − 1) mod K, so that all get their turn. t is 0 in the first round.
    At width 1 this is HeteroFL at width 1, and so FedAvg.

    Args:
        widths: r of client 0, 1, …; the list repeats if there are more clients.

    >>> FedRolex(widths=(0.5,)).width(0)
    0.5
    """

    def assign(self, graph: NeuronGraph, cohort: Cohort) -> list[Tensor]:
        return [window(graph, self.width(client), offset=cohort.round - 1) for client in cohort.clients]


@register("method", "ist")
@dataclass(frozen=True)
class IST(PartialTraining):
    """IST: the hidden neurons are reassigned to the clients in every round (Yuan et al. 2022).

    Independent subnet training: every round assigns each hidden layer's neurons to the cohort, none twice. A client
    trains the network of its own neurons alone; inputs and outputs are whole for every client. What one client owns
    overwrites the server's copy, what several own (the outputs' biases) is averaged, and a weight between two clients'
    neurons keeps its value. With one client this is local SGD.

    >>> IST().takes_warmup
    False
    """

    def assign(self, graph: NeuronGraph, cohort: Cohort) -> list[Tensor]:
        """Every layer shuffled, then cut into parts as equal as possible."""
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


@register("method", "fjord")
@dataclass(frozen=True)
class FjORD(PartialTraining):
    """FjORD: ordered dropout, a random width for every batch (Horváth et al. 2021).

    Every batch trains the first ⌈p·K⌉ units of each layer, with p drawn from the widths a client can carry. A client's
    tier is the largest width it can carry. The server averages each element over the clients whose tier covers it. With
    the one tier 1 this is FedAvg. With distillation α a step descends on (1−α)·CE(f_p) + α·KL(f_max ‖ f_p), where f_max
    is the output at the client's tier and carries no gradient.

    Args:
        tiers: the largest width of client 0, 1, …; the list repeats if there are more clients. Each batch draws
            a width from this list, up to the client's own.
        distill: α, the weight of the distillation loss; 0 means none.

    >>> FjORD(tiers=(1.0, 0.5)).distill
    0.0
    """

    tiers: Shares = (1.0, 0.8, 0.6, 0.4, 0.2)
    distill: Annotated[float, Field(ge=0, le=1)] = 0.0

    def client(self, phase: str) -> ClientHalf:
        return FjordClient(self)

    def assign(self, graph: NeuronGraph, cohort: Cohort) -> list[Tensor]:
        return [window(graph, self.tiers[client % len(self.tiers)]) for client in cohort.clients]

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        if not self.distill:
            return super().gradient(net, local, batch)
        teacher = log_softmax(local["teacher"]["outputs"], 1)

        def term(features: Tensor, outputs: Tensor) -> Tensor:
            learnt = kl_div(log_softmax(outputs, 1), teacher, reduction="none", log_target=True).sum(1)
            return self.distill * (learnt - net.sample_loss(outputs, batch.y))

        return net.gradients(local["params"], batch, term)


@dataclass(frozen=True)
class FjordClient(AssignedClient):
    """Draws a width for every batch."""

    inner: FjORD

    def noise_size(self, net: Network) -> int:
        return 1

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        local = super().start(net, download, memory)
        gates = local["gates"]["neurons"]
        # (tiers, neurons)
        widths = torch.stack([window(net.graph, tier) for tier in sorted(set(self.inner.tiers))]).to(gates)
        fitting = (widths <= gates).all(1).sum()
        return local | {"widths": {"gates": widths, "fitting": fitting}}

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        widths, inner = local["widths"]["gates"], local["inner"]
        drawn = (noise[0] * local["widths"]["fitting"]).floor()
        is_drawn = torch.arange(len(widths), device=widths.device) == drawn
        gates = (is_drawn.to(widths.dtype)[:, None] * widths).sum(0)
        if self.inner.distill:
            with torch.no_grad():
                _, outputs, _ = net.gated(local["gates"]["neurons"]).features(inner["params"], batch.x)
            inner = inner | {"teacher": {"outputs": outputs}}
        inner, loss = step_subnetwork(self.inner, net, inner, batch, noise, lr, gates)
        inner.pop("teacher", None)
        return local | {"inner": inner}, loss


def window(graph: NeuronGraph, width: float, offset: int = 0) -> Tensor:
    """The units (offset + 0 … ⌈width·K⌉ − 1) mod K of every layer of K neurons: (neurons,) bool.

    >>> from fedpews.neurons import Layer
    >>> window(NeuronGraph((Layer("hidden", 0, 4),), {}), width=0.5, offset=3)
    tensor([ True, False, False,  True])
    """
    neurons = torch.zeros(graph.size, dtype=torch.bool)
    for layer in graph.layers:
        # 1e-9: 0.2·15 is 3, not 3.0000000000000004
        count = max(1, math.ceil(width * layer.size - 1e-9))
        neurons[layer.start + (offset + torch.arange(count)) % layer.size] = True
    return neurons
