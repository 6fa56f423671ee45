"""The masks of a warmup: learned by the clients (also FedPeWS-Auto), or fixed or drawn by the server.

The configuration reads the options of these classes, so torch is imported when a function needs it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedpews.errors import ConfigError
from fedpews.options import NotNegative, Options, Positive, Share
from fedpews.registry import register

if TYPE_CHECKING:
    from torch import Tensor

    from fedpews.methods.contract import Cohort
    from fedpews.neurons.graph import NeuronGraph
    from fedpews.trees import Nest


COMPARED = 32
"""Of a larger cohort, the updates of so many clients, evenly spread, are compared."""

WINDOW = 10
"""Rounds over which the training loss is averaged before it is compared: one round's goes up and down."""

TINY = 1e-12
"""A loss below this counts as this: zero has no logarithm."""


@dataclass(frozen=True)
class Masks(Options):
    """The options of all kinds of masks.

    Args:
        evaluate: which elements of the global model are evaluated during the warmup: those that some client owned in
            the last round, with zeros for the rest (``"owned"``), or ``"all"``.
        unowned: update of an element that no client owns during the warmup: ``"keep"`` its value, or count its
            aggregate as ``"zero"``: x_g ← x_g − η_g·x_g. A neuron whose weights become zero never recovers.
    """

    evaluate: Literal["owned", "all"] = field(default="owned", kw_only=True)
    unowned: Literal["keep", "zero"] = field(default="keep", kw_only=True)

    def assign(self, graph: NeuronGraph, client: int, cohort: Cohort) -> Tensor:
        """The neurons of one client in a round, (neurons,) bool, if the server assigns them."""
        raise NotImplementedError(f"{type(self).__name__} assigns no neurons")


@register("masks", "learned")
@dataclass(frozen=True)
class Learned(Masks):
    """Each client learns a probability per neuron and draws its mask from it at every step.

    Args:
        diversity: λ, the weight of the term that separates a client's mask from the others'.
        mask_lr: η_s, the learning rate of the scores.
        upload: ``"probabilities"`` uploads θ beside the mask; ``"masks"`` uploads only the mask, which is smaller
            but needs slightly more rounds to converge.
        gradient: gradient of the loss with respect to θ: ∂f/∂gate times θ (``"theta"``), times the drawn 0 or 1
            (``"open"``, whose mean is ``"theta"``), or ∂f/∂gate (``"gate"``).
        start: mean of a client's initial scores; θ is their sigmoid.
        start_spread: standard deviation of the initial scores; with 0 they are all equal.
        start_common: use the same random initial scores for all clients.
        newcomer: θ that θ_g assumes for a client that has not uploaded yet: ``"mean"`` is σ(``start``) for every
            neuron, ``"start"`` is σ of the client's own initial scores.
        upload_mask: which neurons a client uploads: those with θ ≥ ½ (``"thresholded"``), or a new draw (``"drawn"``).
        draw: when masks are drawn: twice in every ``"step"`` (scores, weights), or once per ``"round"``.

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
        """θ of every neuron of a client that has not uploaded yet: σ of the mean start."""
        return 1 / (1 + math.exp(-self.start))


@register("masks", "auto")
@dataclass(frozen=True)
class Auto(Learned):
    """Learned masks without a diversity term; the warmup starts only if updates conflict, and ends automatically.

    λ is 0: each client's scores start at random, so the masks differ from the start. On the synthetic data of the
    paper λ = 5 made no difference with two clients over ten seeds, and λ = 2 ended 28 points lower with four.

    Round 1 is a plain round. If the clients' updates have similar directions (as on iid data), there is no warmup.
    Otherwise the warmup starts, and ends when the logarithm of the mean training loss falls by less than a given share
    of its steepest fall. The decisions use only the uploads, and no test or validation data.

    Args:
        agree_at: there is no warmup if the mean cosine of the clients' first updates is at least this.
        flat_at: the warmup ends when the log of the loss, averaged over ten rounds, falls by less than this share
            of its steepest fall.
        learnt_at: the warmup cannot end before the loss has fallen by this share of its first value.

    >>> Auto().diversity
    0.0
    """

    diversity: NotNegative = 0.0
    agree_at: Annotated[float, Field(ge=-1, le=1)] = 0.1
    flat_at: Share = 0.2
    learnt_at: Share = 0.1

    def begin(self) -> Nest:
        """The state before round 1."""
        import torch

        return {
            "probed": torch.tensor(False),
            "losses": torch.zeros(0),  # of the warmup's rounds
        }

    def compare(self, start: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]]) -> float | None:
        """The mean cosine of the clients' updates; None for a single client, or if nothing moved."""
        from fedpews.trees import mean_cosine

        chosen = ends[:: max(1, -(-len(ends) // COMPARED))]
        return mean_cosine([start] * len(chosen), chosen)

    def decide(self, state: Nest, cosine: float | None) -> tuple[Nest, bool]:
        """The state after a plain round, and whether the warmup is skipped.

        Without a cosine (a cohort of one client) the next round is a plain round, too.
        """
        import torch

        if cosine is None:
            return state, False
        return {**state, "probed": torch.tensor(True)}, cosine >= self.agree_at

    def watch(self, state: Nest, loss: float) -> tuple[Nest, bool]:
        """The state after a warmup round with this mean training loss, and whether it was the last."""
        import torch

        losses = torch.cat([state["losses"], torch.tensor([loss])])
        return {**state, "losses": losses}, self.is_flat(losses.tolist())

    def is_flat(self, losses: Sequence[float]) -> bool:
        """Whether the training loss of the warmup's rounds has fallen, and is flat now.

        >>> falling = [0.9**t for t in range(20)]
        >>> Auto().is_flat(falling), Auto().is_flat(falling + [0.1] * 19)
        (False, True)
        """
        import torch

        if len(losses) < 2 * WINDOW:
            return False
        # the logarithm, since the loss of a client that overfits gets smaller and smaller, never flat
        logs = torch.tensor(losses, dtype=torch.float64).clamp_min(TINY).log()
        means = logs.unfold(0, WINDOW, 1).mean(1)
        falls = means[:-WINDOW] - means[WINDOW:]
        learnt = bool(means[-1] <= logs[0] + math.log1p(-self.learnt_at))
        return learnt and bool(falls[-1] < self.flat_at * falls.max())


@register("masks", "fixed")
@dataclass(frozen=True)
class Fixed(Masks):
    """The server assigns each client a contiguous group of neurons in every hidden layer.

    Args:
        shares: relative size of each client's part of every layer; by default all are equal.
    """

    shares: tuple[Positive, ...] | None = None

    def assign(self, graph: NeuronGraph, client: int, cohort: Cohort) -> Tensor:
        return contiguous(graph, client, cohort.total, self.shares)


@register("masks", "random")
@dataclass(frozen=True)
class Random(Masks):
    """The server draws each client's neurons at random: the baseline for learned masks.

    Args:
        density: each client draws its own mask with this share of every layer, so masks overlap; by default every
            layer is split among the clients without overlap.
        redraw: draw new masks in every round, as in IST, instead of once.
    """

    density: Share | None = None
    redraw: bool = False

    def assign(self, graph: NeuronGraph, client: int, cohort: Cohort) -> Tensor:
        import torch

        from fedpews.seeds import fold

        drawn = fold(cohort.run_seed, "masks", *([cohort.round] if self.redraw else []))
        neurons = torch.zeros(graph.size, dtype=torch.bool)
        for layer in graph.layers:
            # one permutation for all clients makes their masks disjoint; with a density, each has its own
            names = (layer.start,) if self.density is None else (layer.start, client)
            generator = torch.Generator().manual_seed(fold(drawn, *names))
            shuffled = torch.randperm(layer.size, generator=generator)
            if self.density is None:
                chosen = shuffled.tensor_split(cohort.total)[client]
            else:
                chosen = shuffled[: max(1, round(self.density * layer.size))]
            if not len(chosen):
                raise ConfigError(
                    f"layer {layer.name} has {layer.size} neurons, too few for {cohort.total} clients; set "
                    "warmup.density or use a wider model"
                )
            neurons[layer.start + chosen] = True
        return neurons


def draw_starts(masks: Learned, neurons: int, clients: Sequence[int], seed: int) -> Tensor:
    """The scores of some clients before their first round: (clients, neurons).

    A client's row depends on the run's seed and its number alone, not on the other clients.
    """
    import torch

    from fedpews.seeds import fold

    if not masks.start_spread:
        return torch.full((len(clients), neurons), masks.start)
    rows = []
    # a common start is client 0's row
    for client in [0] if masks.start_common else clients:
        generator = torch.Generator().manual_seed(fold(seed, client, "scores"))
        rows.append(torch.randn(neurons, generator=generator))
    return (masks.start + masks.start_spread * torch.stack(rows)).expand(len(clients), neurons)


def contiguous(graph: NeuronGraph, client: int, total: int, shares: Sequence[float] | None = None) -> Tensor:
    """The neurons of one client when every layer is cut into ``total`` groups: (neurons,) bool.

    Every neuron is in the group of exactly one client.
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
    # an edge is rounded in the same way for the two clients beside it: no neuron is lost or assigned twice
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
