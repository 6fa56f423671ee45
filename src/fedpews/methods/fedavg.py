"""FedAvg: local SGD, then the mean (McMahan et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from fedpews.methods.local_sgd import LocalSGD
from fedpews.registry import register


@register("method", "fedavg")
@dataclass(frozen=True)
class FedAvg(LocalSGD):
    """K steps of SGD at each client, y ← y − η·∇f(y); the server takes the mean of the y.

    Args:
        momentum: of the local SGD; the FedPeWS paper uses none.
        weight_decay: of the local steps; the FedPeWS paper uses none.
        clip_norm: the most a local gradient's length may be; longer ones are scaled down.
        optimizer: the local steps' rule, by default SGD.

    >>> FedAvg(momentum=0.9).momentum
    0.9
    """
