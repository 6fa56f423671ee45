"""FedPeWS-Auto: learned masks without a grid search for λ and W."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpews.methods.options import NotNegative, Share
from fedpews.warmup.masks import Learned


@dataclass(frozen=True)
class Auto(Learned):
    """Learned masks with one λ for all settings, and a warmup that ends by itself.

    It ends after the first round in which the mean training loss of the masked networks is at most a given part
    of round 1's: by then the subnetworks have learnt what their clients can teach them alone.

    Args:
        end_at_loss: the part of round 1's training loss at which the warmup ends.
        at_least: warmup rounds to run before it may end.

    >>> Auto().diversity
    2.0
    """

    diversity: NotNegative = 2.0
    end_at_loss: Share = 0.03
    at_least: int = 3

    def is_over(self, round: int, loss: Tensor, first_loss: Tensor) -> Tensor | None:
        """Whether this round was the last of the warmup; None before the rule applies."""
        return loss <= self.end_at_loss * first_loss if round >= self.at_least else None
