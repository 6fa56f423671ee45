"""FedDecorr: local SGD that keeps the features of a representation uncorrelated (Shi et al. 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "feddecorr")
@dataclass(frozen=True)
class FedDecorr(LocalSGD):
    """FedAvg that adds β·((N − 1)²/N)·mean(K_ij²) to the loss of a batch, against representations that collapse.

    K is the correlation matrix of what the classifier reads of the N samples, and the mean is over i ≠ j. This is the
    authors' program, with which β = 0.1 was chosen; the paper writes (β/d²)·‖K‖², without the factor and with the
    diagonal, which is constant. A batch of one sample has no correlations. In a warmup the d features are those of the
    client's open neurons.

    Args:
        strength: β; 0 is FedAvg.

    >>> FedDecorr().strength
    0.1
    """

    strength: NotNegative = 0.1

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        share = open_share(net, local["params"])

        def decorrelate(features: Tensor, outputs: Tensor) -> Tensor:
            values, count, variance = centred(features, batch)
            scaled = values / torch.sqrt(variance + 1e-8)
            products = scaled.T @ scaled  # (N − 1)·K, zero for closed neurons
            apart = 1 - torch.eye(len(products), dtype=products.dtype, device=products.device)
            width = share * len(products)
            pairs = (width * (width - 1)).clamp_min(1)
            return self.strength * (products * apart).pow(2).sum() / (pairs * count)

        return net.gradients(local["params"], batch, decorrelate)


def centred(values: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """The samples' values minus their mean, how many samples there are, and the variance; padding is left out."""
    ones = values.new_ones(len(values)) if batch.weight is None else batch.weight.to(values)
    count, weight = ones.sum().clamp_min(1), ones.view(-1, *[1] * (values.dim() - 1))
    differences = weight * (values - (weight * values).sum(0) / count)
    return differences, count, differences.pow(2).sum(0) / (count - 1).clamp_min(1)


def open_share(net: Network, params: Tree) -> Tensor:
    """The part of the classifier's inputs that come from open neurons."""
    name = f"{net.classifier}.weight"
    ones = torch.ones_like(params[name]) if name in params else torch.ones((), device=net.device)
    return net.opened({name: ones})[name].mean()
