"""The client halves of the warmup, and of the rounds after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews.methods.contract import ClientHalf, Download, Upload, Work
from fedpews.methods.subnetwork import start_subnetwork, step_subnetwork
from fedpews.neurons.network import Batch, Network, differentiate
from fedpews.trees import Nest
from fedpews.warmup.masks import Learned


@dataclass(frozen=True)
class LearnedClient(ClientHalf):
    """Algorithm 1: at every step first the mask scores s, then the weights of the neurons drawn by them."""

    inner: ClientHalf
    masks: Learned

    def noise_size(self, net: Network) -> int:
        return 2 * net.graph.size + self.inner.noise_size(net)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        first = torch.zeros(
            net.graph.size, device=next(iter(download.params.values())).device
        )  # s = 0, θ = 1/2
        scores = first if memory is None else memory["scores"]["neurons"]
        shared = torch.sigmoid(first) if memory is None else memory["shared"]["neurons"]
        total, mean = download.total, download.extra["theta"]["neurons"]
        # θ_{g∖i}, the mean over the other clients; a client alone has nobody to differ from
        others = ((total * mean - shared) / (total - 1)).clamp(0, 1) if total > 1 else None
        return {
            "inner": start_subnetwork(self.inner, net, download, _inner(memory)),
            "scores": {"neurons": scores},
            "others": {} if others is None else {"neurons": others},
        }

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        h = net.graph.size
        scores = self.step_scores(net, local, batch, noise[:h])
        gates = (noise[h : 2 * h] < torch.sigmoid(scores)).to(scores.dtype)  # a fresh draw for the weights
        inner, loss = step_subnetwork(self.inner, net, local["inner"], batch, noise[2 * h :], lr, gates)
        return local | {"inner": inner, "scores": {"neurons": scores}}, loss

    def step_scores(self, net: Network, local: Nest, batch: Batch, noise: Tensor) -> Tensor:
        """Procedure I: s ← s − η_s·(∂f/∂gate − 2λ(θ_i − θ_{g∖i}))·σ′(s), weights frozen.

        The gradient passes straight through the draw, so a neuron closed in this draw learns too.
        """
        scores: Tensor = local["scores"]["neurons"]
        params: Mapping[str, Tensor] = local["inner"]["params"]
        theta = torch.sigmoid(scores)
        gates = (noise < theta).to(scores.dtype)
        slope: Tensor
        _, _, slope = differentiate(lambda gates: net.gated(gates).loss(params, batch), gates)
        if local["others"]:
            slope = slope - 2 * self.masks.diversity * (theta - local["others"]["neurons"])
        stepped: Tensor = scores - self.masks.mask_lr * slope * theta * (1 - theta)
        return stepped

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        h = net.graph.size
        theta = torch.sigmoid(local["scores"]["neurons"])
        neurons = work.noise[:h] < theta
        shared = theta if self.masks.upload == "probabilities" else neurons.to(theta.dtype)
        rest = replace(work, noise=work.noise[2 * h :], neurons=neurons)
        memory, upload = self.inner.finish(net, download, local["inner"], rest)
        if self.masks.upload == "probabilities":
            upload = replace(upload, extra={**upload.extra, "theta": {"neurons": theta}})
        return {"inner": memory, "scores": local["scores"], "shared": {"neurons": shared}}, upload


@dataclass(frozen=True)
class WarmClient(ClientHalf):
    """After the warmup: the inner method as it is, with the memory it brought along."""

    inner: ClientHalf

    def noise_size(self, net: Network) -> int:
        return self.inner.noise_size(net)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        return self.inner.start(net, download, _inner(memory))

    def step(
        self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: float | Tensor
    ) -> tuple[Nest, Tensor]:
        return self.inner.step(net, local, batch, noise, lr)

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        memory, upload = self.inner.finish(net, download, local, work)
        return {"inner": memory}, upload


def _inner(memory: Nest | None) -> Nest | None:
    return None if memory is None else memory["inner"]
