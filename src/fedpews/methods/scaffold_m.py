"""SCAFFOLD-M: SCAFFOLD whose steps lean towards where all clients went last (Cheng et al. 2024)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedpews.methods.fedavg_m import DIRECTION, FedAvgMomentum
from fedpews.methods.scaffold import Scaffold
from fedpews.registry import register
from fedpews.trees import Nest


@register("method", "scaffold-m")
@dataclass(frozen=True)
class ScaffoldMomentum(FedAvgMomentum, Scaffold):
    """A step is y ← y − η·(β·(g − c_i + c) + (1 − β)·v): FedAvg-M with SCAFFOLD's control variates.

    v is `fedavg-m`'s, the mean step of the last round. c_i⁺ is the mean of the client's own gradients g, as in the
    paper: ((x_g − y)/(K·η) − (1 − β)·v)/β + c_i − c. Everything else, and what happens in a warmup, is as in `scaffold`
    and `fedavg-m`. With β = 1 it is SCAFFOLD.

    Args:
        beta: β, the weight of the client's own corrected gradient.

    >>> ScaffoldMomentum().beta
    0.1
    """

    def mean_step(self, local: Nest, name: str, drift: Tensor) -> Tensor:
        direction: Tensor = local[DIRECTION][name]
        return (drift - (1 - self.beta) * direction) / self.beta
