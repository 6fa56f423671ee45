"""MOON: local SGD with a contrast between models (Li et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, softplus

from fedpews import trees
from fedpews.methods.contract import Download, Upload, Work
from fedpews.methods.local_sgd import LocalSGD
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative, Positive
from fedpews.registry import register
from fedpews.trees import Nest, Tree


@register("method", "moon")
@dataclass(frozen=True)
class Moon(LocalSGD):
    """Local SGD that draws a client's representation towards the global model's, away from its own last one's.

    Adds μ·CE([cos(z, z_glob), cos(z, z_prev)]/T, 0) to the loss of each sample, with z what the classifier
    reads; z_glob and z_prev carry no gradient and are taken in evaluation mode, without dropout and by running
    statistics. In a client's first round there is no z_prev and the term is 0. In a warmup all three come from the
    client's subnetwork, and its last model is the part it uploaded.

    The reference's projection head (Linear–ReLU–Linear to 256) lies between body and classifier, so it is a
    matter of the model: give the model those two layers, and its classifier reads the projection.

    Args:
        mu: μ, the strength of the contrast; the reference uses 1, and 5 for CIFAR-10.
        temperature: T, by which the similarities are divided.

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
