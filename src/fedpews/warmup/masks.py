"""Who owns which neurons during the warmup: learned at the clients, or fixed or drawn by the server.

The configuration reads the options of these classes, so torch is imported when a function needs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from fedpews.errors import ConfigError
from fedpews.options import NotNegative, Options, Positive, Share

if TYPE_CHECKING:
    from torch import Tensor

    from fedpews.methods.contract import Cohort
    from fedpews.neurons.graph import NeuronGraph


@dataclass(frozen=True)
class Masks(Options):
    """What all kinds of masks have in common.

    Args:
        evaluate: what the global model is evaluated with during the warmup: what a client ``"owned"`` in the last
            round, with zero for the rest, or ``"all"`` of it.
        unowned: what the server does in the warmup with an element that no client owns: ``"keep"`` it, or treat
            its aggregate as ``"zero"``, so that x_g ← x_g − η_g·x_g. A neuron whose weights are all zero never
            comes back.
    """

    evaluate: Literal["owned", "all"] = field(default="owned", kw_only=True)
    unowned: Literal["keep", "zero"] = field(default="keep", kw_only=True)


@dataclass(frozen=True)
class Learned(Masks):
    """Each client learns a score per neuron by which it is drawn, open or closed, at every step.

    Args:
        diversity: λ, how strongly a client is pushed away from the others' neurons.
        mask_lr: η_s, the learning rate of the scores.
        upload: what the server learns of a client's preferences: its ``"probabilities"`` θ, or only the
            ``"masks"`` it uploads anyway (a smaller upload, slightly slower in rounds).
        gradient: the gradient of a score by the loss: ∂f/∂gate times the probability ``"theta"``, times the draw
            (only neurons that are ``"open"`` in it), or as it is (``"gate"``). The first is the mean of the second.
        start: the mean of the scores before a client's first round; θ is their sigmoid.
        start_spread: their standard deviation; 0 starts all neurons alike.
        start_common: one random start for all clients, instead of a client's own.
        newcomer: what θ_g counts a client with that has not uploaded yet: ``"mean"`` is σ of ``start`` for every
            neuron, ``"start"`` σ of the client's own start.
        upload_mask: the neurons a client uploads: those with θ ≥ ½ (``"thresholded"``), or ``"drawn"`` once more.
        draw: when neurons are drawn: at every ``"step"``, twice, or once a ``"round"``.

    >>> Learned(diversity=5.0, start=-1.0).upload
    'probabilities'
    """

    diversity: NotNegative = 1.0
    mask_lr: Positive = 0.1
    upload: Literal["probabilities", "masks"] = "probabilities"
    gradient: Literal["theta", "open", "gate"] = "theta"
    start: float = 0.0
    start_spread: NotNegative = 1.0
    start_common: bool = False
    newcomer: Literal["mean", "start"] = "mean"
    upload_mask: Literal["drawn", "thresholded"] = "thresholded"
    draw: Literal["step", "round"] = "step"

    @property
    def first_theta(self) -> float:
        """θ of every neuron of a client of which nothing is known: σ of the mean start."""
        return 1 / (1 + math.exp(-self.start))

    def step(self, scores: Tensor, slope: Tensor, gates: Tensor, others: Tensor | None) -> Tensor:
        """Procedure I: s ← s − η_s·(θ·∂f/∂gate − 2λ(θ_i − θ_{g∖i}))·σ′(s).

        The gradient passes straight through the draw. A mask that multiplies the parameters has none where it
        is zero; the mean of that over draws is the factor θ. The diversity term moves the scores of all neurons.

        Args:
            slope: (neurons,) ∂f/∂gate at the gates that were drawn.
            others: (neurons,) θ_{g∖i}, the mean over the other clients; None for a client alone.
        """
        theta = scores.sigmoid()
        if self.gradient != "gate":
            slope = slope * (theta if self.gradient == "theta" else gates)
        if others is not None:
            slope = slope - 2 * self.diversity * (theta - others)
        # θ(1 − θ) is σ′(s)
        return scores - self.mask_lr * slope * theta * (1 - theta)


@dataclass(frozen=True)
class Fixed(Masks):
    """The server cuts every hidden layer into one contiguous group of neurons for each client.

    Args:
        shares: each client's part of every layer, in any unit; equal parts when not given.
    """

    shares: tuple[Positive, ...] | None = None

    def assign(self, graph: NeuronGraph, client: int, cohort: Cohort) -> Tensor:
        return contiguous(graph, client, cohort.total, self.shares)


@dataclass(frozen=True)
class Random(Masks):
    """The server draws each client's neurons at random: what learned masks are to be measured against.

    Args:
        density: the part of every layer that a client gets, drawn for each client alone, so that parts overlap; when
            not given every layer is split among all clients, no neuron twice.
        redraw: draw anew in every round, as IST does, instead of once.
    """

    density: Share | None = None
    redraw: bool = False

    def assign(self, graph: NeuronGraph, client: int, cohort: Cohort) -> Tensor:
        """The neurons of one client in a round: (neurons,) bool."""
        import torch

        from fedpews.seeds import fold

        drawn = fold(cohort.run_seed, "masks", *([cohort.round] if self.redraw else []))
        neurons = torch.zeros(graph.size, dtype=torch.bool)
        for layer in graph.layers:
            # one permutation for all clients makes their parts disjoint; with a density, each has its own
            names = (layer.start,) if self.density is None else (layer.start, client)
            generator = torch.Generator().manual_seed(fold(drawn, *names))
            shuffled = torch.randperm(layer.size, generator=generator)
            if self.density is None:
                part = shuffled.tensor_split(cohort.total)[client]
            else:
                part = shuffled[: max(1, round(self.density * layer.size))]
            if not len(part):
                raise ConfigError(
                    f"layer {layer.name} has {layer.size} neurons, too few to deal to {cohort.total} clients; set "
                    "warmup.density or take a wider model"
                )
            neurons[layer.start + part] = True
        return neurons


def draw_starts(masks: Learned, neurons: int, clients: Sequence[int], seed: int) -> Tensor:
    """The scores of some clients before their first round: (clients, neurons).

    A client's row is a function of the run's seed and its number, whoever else there is.
    """
    import torch

    from fedpews.seeds import fold

    if not masks.start_spread:
        return torch.full((len(clients), neurons), masks.start)
    rows = []
    # client 0's row stands for all when the start is common
    for client in [0] if masks.start_common else clients:
        generator = torch.Generator().manual_seed(fold(seed, client, "scores"))
        rows.append(torch.randn(neurons, generator=generator))
    return (masks.start + masks.start_spread * torch.stack(rows)).expand(len(clients), neurons)


def contiguous(graph: NeuronGraph, client: int, total: int, shares: Sequence[float] | None = None) -> Tensor:
    """The neurons of one client when every layer is cut into ``total`` groups: (neurons,) bool.

    The groups of all clients together hold every neuron exactly once.
    """
    import torch

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
    # an edge is rounded alike for the two clients it lies between: no neuron is lost or assigned twice
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
