"""FedPeWS-Auto: learned masks without a grid search for λ and W."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedpews.options import NotNegative, Share
from fedpews.registry import register
from fedpews.warmup.masks import Learned

if TYPE_CHECKING:
    from torch import Tensor

    from fedpews.trees import Nest

COMPARED = 32
"""Of a larger cohort, the updates of so many clients, evenly spread, are compared."""

WINDOW = 10
"""Rounds over which the training loss is averaged before it is compared: one round's goes up and down."""

TINY = 1e-12
"""A loss below this counts as this: zero has no logarithm."""


@register("masks", "auto")
@dataclass(frozen=True)
class Auto(Learned):
    """Learned masks without a diversity term; the warmup starts only if updates conflict, and ends automatically.

    λ is 0: each client's scores start at random, so the masks differ from the start. On the synthetic data of the
    paper λ = 5 made no difference with two clients over ten seeds, and λ = 2 ended 28 points lower with four.

    Round 1 is a plain round. If the clients' updates point the same way (iid data, for instance), there is no warmup.
    Otherwise the warmup begins, and lasts until the logarithm of the mean training loss falls by no more than a given
    share of its steepest fall: then the masked networks have learnt what their clients can teach them alone. The
    decisions use only what clients upload anyway, and no test or validation data.

    Args:
        agree_at: the mean cosine of the clients' first updates from which on there is no warmup.
        flat_at: the warmup ends when the log of the loss falls, from ten rounds to the next ten, by less than this
            share of its steepest fall.
        learnt_at: the share of its first value by which the loss must have fallen before the warmup may end.

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
