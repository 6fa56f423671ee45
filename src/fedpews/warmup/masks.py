"""Who owns which neurons during the warmup: learned at the clients, or fixed by the server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpews.errors import ConfigError
from fedpews.methods.options import NotNegative, Options, Positive
from fedpews.neurons.graph import NeuronGraph


@dataclass(frozen=True)
class Learned(Options):
    """Each client learns a score per neuron by which it is drawn, open or closed, at every step.

    Args:
        diversity: λ, how strongly a client is pushed away from the others' neurons.
        mask_lr: η_s, the learning rate of the scores.
        upload: what the server learns of a client's preferences: its ``"probabilities"`` θ, or only the
            ``"masks"`` it uploads anyway (a smaller upload, slightly slower in rounds).
    """

    diversity: NotNegative = 1.0
    mask_lr: Positive = 0.1
    upload: Literal["probabilities", "masks"] = "probabilities"


@dataclass(frozen=True)
class Fixed(Options):
    """The server cuts every hidden layer into one contiguous group of neurons for each client.

    Args:
        shares: each client's part of every layer, in any unit; equal parts when not given.
    """

    shares: tuple[Positive, ...] | None = None


def contiguous(graph: NeuronGraph, client: int, total: int, shares: Sequence[float] | None = None) -> Tensor:
    """The neurons of one client when every layer is cut into ``total`` groups: (neurons,) bool.

    The groups of all clients together hold every neuron exactly once.
    """
    parts = (
        torch.ones(total, dtype=torch.float64)
        if shares is None
        else torch.tensor(shares, dtype=torch.float64)
    )
    if len(parts) != total:
        raise ConfigError(
            f"warmup.shares has {len(parts)} numbers for {total} clients; give one for each client"
        )
    if not bool((parts > 0).all()):
        raise ConfigError(f"warmup.shares must all be positive, got {parts.tolist()}")
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), (parts / parts.sum()).cumsum(0)])
    neurons = torch.zeros(graph.size, dtype=torch.bool)
    for layer in graph.layers:
        first, last = (round(float(edge) * layer.size) for edge in edges[client : client + 2])
        if first == last:
            raise ConfigError(
                f"layer {layer.name} has {layer.size} neurons, too few for client {client}'s share among "
                f"{total} clients; use learned masks (pews), larger shares or a wider model"
            )
        neurons[layer.start + first : layer.start + last] = True
    return neurons
