"""FedUV: local SGD whose outputs vary and whose representations spread as with all classes (Son et al. 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews.methods.feddecorr import centred
from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "feduv")
@dataclass(frozen=True)
class FedUV(LocalSGD):
    """FedAvg that adds λ·V + μ·U to the loss of a batch, so that a client trains as if it had all classes.

    V is the mean over the C classes of max(0, γ − s_j), with s_j the deviation of the j-th probability over the batch,
    and γ = 1/√C that of C samples of one class each. U is the mean of exp(−‖z_i − z_j‖²/m) over the pairs of samples,
    with z what the classifier reads and m the median of the squared distances that are not 0; m carries a gradient, so
    that scaling z gains nothing. This is the authors' program, which does not put z on a sphere first. A batch of one
    sample has neither term. In a warmup z is that of the client's subnetwork.

    Args:
        variance: λ; the program uses 2.5 for ten classes.
        uniformity: μ; the program uses 0.5.

    >>> FedUV().uniformity
    0.5
    """

    variance: NotNegative = 2.5
    uniformity: NotNegative = 0.5

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        def spread(features: Tensor, outputs: Tensor) -> Tensor:
            _, _, variance = centred(outputs.softmax(1), batch)
            # below 1e-12 there is no slope: that of a root is infinite at 0
            deviation = variance.clamp_min(1e-12).sqrt()
            lacking = (1 / math.sqrt(outputs.shape[1]) - deviation).clamp_min(0).mean()
            return self.variance * lacking + self.uniformity * closeness(features, batch)

        return net.gradients(local["params"], batch, spread)


def closeness(features: Tensor, batch: Batch) -> Tensor:
    """The mean of exp(−‖z_i − z_j‖²/m) over the pairs of samples; without a pair it is 0."""
    count = len(features)
    first, second = torch.triu_indices(count, count, 1, device=features.device)
    if not len(first):
        return features.sum() * 0
    squares = (features[first] - features[second]).pow(2).sum(1)  # (pairs,)
    real = torch.ones_like(squares, dtype=torch.bool)
    if batch.weight is not None:
        real = (batch.weight[first] * batch.weight[second]) > 0
    apart = real & (squares > 0)
    # the lower of two medians, as torch.median: all that does not count is sorted behind
    ordered = torch.where(apart, squares, torch.inf).sort().values
    middle = (apart.sum() - 1).clamp_min(0) // 2
    chosen = (torch.arange(len(squares), device=features.device) == middle) & apart.any()
    median = torch.where(chosen, ordered, 0.0).sum()
    scale = torch.where(apart.any(), median, 1.0)
    return (torch.exp(-squares / scale) * real).sum() / real.sum().clamp_min(1)
