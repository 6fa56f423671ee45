"""FedPeWS-Auto: learned masks without a grid search for λ and W."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from fedpews.options import NotNegative, Share
from fedpews.warmup.masks import Learned

if TYPE_CHECKING:
    from torch import Tensor

    from fedpews.trees import Nest

WINDOW = 10
"""Rounds over which the training loss is averaged before it is compared: one round's goes up and down."""

TINY = 1e-12
"""A loss below this counts as this: zero has no logarithm."""


@dataclass(frozen=True)
class Auto(Learned):
    """Learned masks without a diversity term, a warmup only where updates conflict, and an end by itself.

    λ is 0: each client's masks start at random by themselves, and so part by themselves. On the synthetic data of the
    paper λ = 5 made no difference with two clients that ten seeds show, and λ = 2 ended 28 points lower with four.

    Round 1 is a plain one. Where the clients' updates point the same way (iid data, for instance) that was all, and
    nothing was lost. Otherwise the warmup begins, and lasts until the masked networks have learnt what their clients
    can teach them alone: until the logarithm of the mean training loss falls by no more than a given part of what it
    fell by when it fell most. All of it is known from what clients upload anyway; no test or validation data are used.

    Args:
        agree_at: the mean cosine of the clients' first updates from which on there is no warmup.
        flat_at: the warmup ends when the log of the loss falls, from ten rounds to the next ten, by less than this
            part of its steepest fall.
        learnt_at: how much of its first value the loss must have lost before the warmup may end.

    >>> Auto().diversity
    0.0
    """

    diversity: NotNegative = 0.0
    agree_at: Annotated[float, Field(ge=-1, le=1)] = 0.1
    flat_at: Share = 0.2
    learnt_at: Share = 0.1

    def begin(self) -> Nest:
        """What is known before round 1."""
        import torch

        return {
            "probed": torch.tensor(False),
            "losses": torch.zeros(0),  # of the warmup's rounds
        }

    def decide(self, told: Nest, agreement: float | None) -> tuple[Nest, bool]:
        """After a plain round: what is known, and whether there is to be no warmup.

        Without an agreement (a cohort of one client) the next round is a plain one, too.
        """
        import torch

        if agreement is None:
            return told, False
        return {**told, "probed": torch.tensor(True)}, agreement >= self.agree_at

    def watch(self, told: Nest, loss: float) -> tuple[Nest, bool]:
        """After a warmup round with this mean training loss: what is known, and whether it was the last."""
        import torch

        losses = torch.cat([told["losses"], torch.tensor([loss])])
        return {**told, "losses": losses}, self.is_flat(losses.tolist())

    def is_flat(self, losses: Sequence[float]) -> bool:
        """Whether the training loss of the warmup's rounds so far has fallen and now falls no more.

        >>> falling = [0.9**t for t in range(20)]
        >>> Auto().is_flat(falling), Auto().is_flat(falling + [0.1] * 19)
        (False, True)
        """
        import torch

        if len(losses) < 2 * WINDOW:
            return False
        # the logarithm, since a client that knows its samples by heart has a loss that is ever smaller, never flat
        logs = torch.tensor(losses, dtype=torch.float64).clamp_min(TINY).log()
        means = logs.unfold(0, WINDOW, 1).mean(1)
        falls = means[:-WINDOW] - means[WINDOW:]
        learnt = bool(means[-1] <= logs[0] + math.log1p(-self.learnt_at))
        return learnt and bool(falls[-1] < self.flat_at * falls.max())


def agreement(start: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]]) -> float | None:
    """The mean cosine between two clients' updates: 1 where all go the same way, below 0 where they cancel.

    None for a client alone, or where nothing moved.

    >>> import torch
    >>> start = {"w": torch.zeros(2)}
    >>> agreement(start, [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 3.0])}])
    0.0
    """
    import torch

    if len(ends) < 2:
        return None
    # Σ over pairs of u·v is (‖Σu‖² − n) / 2 for unit vectors: no loop over pairs, however large the cohort
    squares = torch.zeros(len(ends), dtype=torch.float64)
    for name, before in start.items():
        squares += torch.stack([(end[name] - before).double().square().sum().cpu() for end in ends])
    moving = [i for i, square in enumerate(squares.tolist()) if square > 0]
    if len(moving) < 2:
        return None
    together = torch.zeros((), dtype=torch.float64)
    for name, before in start.items():
        total = torch.zeros_like(before, dtype=torch.float64)
        for i in moving:
            total += (ends[i][name] - before).double() / float(squares[i].sqrt())
        together += total.square().sum().cpu()
    n = len(moving)
    return (float(together) - n) / (n * (n - 1))
