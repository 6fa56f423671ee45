"""Local SGD with a term on representations, what the classifier reads: MOON, FedDecorr and FedUV."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedpews import trees
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.fedavg import FedAvg
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative, Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "moon")
@dataclass(frozen=True)
class Moon(FedAvg):
    """MOON: local SGD with a contrastive loss between models (Li et al. 2021).

    It draws a client's representation towards the global model's, away from its own last one's: it adds μ·CE([cos(z,
    z_glob), cos(z, z_prev)]/T, 0) to the loss of each sample, with z what the classifier reads; z_glob and z_prev carry
    no gradient and are taken in evaluation mode, without dropout and by running statistics. In a client's first round
    there is no z_prev and the term is 0. In a warmup all three come from the client's subnetwork, and its last model is
    the part it uploaded.

    The reference's projection head (Linear–ReLU–Linear to 256) lies between body and classifier, so it is a
    matter of the model: give the model those two layers, and its classifier reads the projection.

    Args:
        mu: μ, the weight of the contrastive loss; the authors' code uses 1, and 5 for CIFAR-10.
        temperature: T, the divisor of the similarities.

    >>> Moon(mu=5.0).temperature
    0.5
    """

    mu: NotNegative = 1.0
    temperature: Positive = 0.5

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        params = download.params
        return super().start(net, download, memory) | {
            "global": params,
            "previous": params if memory is None else memory["previous"],
            "strength": {"mu": torch.tensor(0.0 if memory is None else self.mu, device=net.device)},
        }

    def gradient(self, net: Network, local: Nest, batch: Batch) -> tuple[Tensor, Tree, Tree]:
        with torch.no_grad():
            towards, _, _ = net.features(local["global"], batch.x, training=False)
            away, _, _ = net.features(local["previous"], batch.x, training=False)

        def contrast(features: Tensor, outputs: Tensor) -> Tensor:
            near = cosine_similarity(features, towards)
            far = cosine_similarity(features, away)
            # the cross-entropy of two classes is a softplus of their difference
            nearer: Tensor = local["strength"]["mu"] * softplus((far - near) / self.temperature)
            return nearer

        return net.gradients(local["params"], batch, contrast)

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        _, upload = super().finish(net, download, local, work)
        previous: Tree = local["params"]
        if work.neurons is not None:
            previous = trees.where(net.graph.expand(work.neurons), previous, trees.zeros_like(previous))
        return {"previous": previous}, upload


@register("method", "feddecorr")
@dataclass(frozen=True)
class FedDecorr(FedAvg):
    """FedDecorr: local SGD that keeps the features of a representation uncorrelated (Shi et al. 2023).

    FedAvg that adds β·((N − 1)²/N)·mean(K_ij²) to the loss of a batch, against representations that collapse. K is the
    correlation matrix of what the classifier reads of the N samples, and the mean is over i ≠ j. This is the authors'
    program, with which β = 0.1 was chosen; the paper writes (β/d²)·‖K‖², without the factor and with the diagonal,
    which is constant. A batch of one sample has no correlations. In a warmup the d features are those of the client's
    open neurons.

    Args:
        strength: β, the weight of the penalty; 0 equals FedAvg.

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


@register("method", "feduv")
@dataclass(frozen=True)
class FedUV(FedAvg):
    """FedUV: local SGD with a variance term on outputs and a uniformity term on representations (Son et al. 2024).

    FedAvg that adds λ·V + μ·U to the loss of a batch, so that a client trains as if it had all classes. V is the mean
    over the C classes of max(0, γ − s_j), with s_j the deviation of the j-th probability over the batch, and γ = 1/√C
    that of C samples of one class each. U is the mean of exp(−‖z_i − z_j‖²/m) over the pairs of samples, with z what
    the classifier reads and m the median of the squared distances that are not 0; m carries a gradient, so that scaling
    z gains nothing. This is the authors' program, which does not put z on a sphere first. A batch of one sample has
    neither term. In a warmup z is that of the client's subnetwork.

    Args:
        variance: λ, the weight of the variance term; the authors' code uses 2.5 for ten classes.
        uniformity: μ, the weight of the uniformity term; the authors' code uses 0.5.

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
