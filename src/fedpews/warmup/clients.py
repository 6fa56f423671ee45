"""The client half of a warmup with learned masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedpews.methods.contract import PARAMS, THETA, ClientWrapper, Download, Rate, Upload, Work, inner_memory
from fedpews.methods.subnetwork import start_subnetwork, step_subnetwork
from fedpews.neurons.functional import differentiate
from fedpews.neurons.network import Batch, Network
from fedpews.trees import Nest
from fedpews.warmup.masks import Learned

CLOSED = -1000.0
"""The score of a neuron that a client never has."""


@dataclass(frozen=True)
class LearnedClient(ClientWrapper):
    """Algorithm 1: at every step first the mask scores s, then the weights of the neurons drawn by them."""

    masks: Learned

    def noise_size(self, net: Network) -> int:
        # a step draws twice: for the scores, and afresh for the weights
        return 2 * net.graph.size + self.inner.noise_size(net)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        like = next(iter(download.params.values()))
        if "start" in download.extra:
            first = download.extra["start"]["neurons"]
        else:
            first = like.new_full((net.graph.size,), self.masks.start)
        # a plain round before the warmup leaves a memory without scores
        known = memory if memory is not None and "scores" in memory else None
        scores = first if known is None else known["scores"]["neurons"]
        if download.neurons is not None:
            # of what the server lets it have: θ is exactly 0 elsewhere, and its gradient too
            scores = torch.where(download.neurons, scores, CLOSED)
        # the θ of this client in θ_g: the last it shared
        if known is not None:
            shared = known["shared"]["neurons"]
        elif self.masks.newcomer == "start":
            shared = torch.sigmoid(first)
        else:
            shared = torch.full_like(first, self.masks.first_theta)
        total, mean = download.total, download.extra[THETA]["neurons"]
        # θ_{g∖i}, the mean over the other clients; a client alone has no others
        others = ((total * mean - shared) / (total - 1)).clamp(0, 1) if total > 1 else None
        once = {"neurons": torch.full_like(scores, torch.nan)} if self.masks.draw == "round" else {}
        return {
            "inner": start_subnetwork(self.inner, net, download, inner_memory(memory)),
            "scores": {"neurons": scores},
            "others": {} if others is None else {"neurons": others},
            # with one draw a round, the numbers of the first step; NaN until then, because a compiled step cannot add
            # keys to its state
            "drawn": once,
        }

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        h = net.graph.size
        first, second = noise[:h], noise[h : 2 * h]
        if local["drawn"]:
            kept = local["drawn"]["neurons"]
            first = second = torch.where(kept.isnan(), first, kept)
            local = local | {"drawn": {"neurons": first}}
        scores = self.step_scores(net, local, batch, first)
        gates = (second < torch.sigmoid(scores)).to(scores.dtype)  # a fresh draw for the weights
        inner, loss = step_subnetwork(self.inner, net, local["inner"], batch, noise[2 * h :], lr, gates)
        return local | {"inner": inner, "scores": {"neurons": scores}}, loss

    def step_scores(self, net: Network, local: Nest, batch: Batch, noise: Tensor) -> Tensor:
        """The scores after this batch, at a fresh draw of the gates and with the weights frozen."""
        scores: Tensor = local["scores"]["neurons"]
        params: Mapping[str, Tensor] = local["inner"][PARAMS]
        gates = (noise < torch.sigmoid(scores)).to(scores.dtype)
        slope: Tensor
        # with respect to the gates alone: the weights are constants here, and this pass's buffers are dropped
        _, _, slope = differentiate(lambda gates: net.gated(gates).loss(params, batch), gates)
        return self.masks.step(scores, slope, gates, local["others"].get("neurons"))

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        h = net.graph.size
        theta = torch.sigmoid(local["scores"]["neurons"])
        if self.masks.upload_mask == "thresholded":
            neurons = theta >= 0.5
        else:
            neurons = (local["drawn"]["neurons"] if local["drawn"] else work.noise[:h]) < theta
        shared = theta if self.masks.upload == "probabilities" else neurons.to(theta.dtype)
        # the first 2h numbers are for the masks, the others for the inner method
        rest = replace(work, noise=work.noise[2 * h :], neurons=neurons)
        memory, upload = self.inner.finish(net, download, local["inner"], rest)
        if self.masks.upload == "probabilities":
            upload = upload.adding({THETA: {"neurons": theta}})
        return {"inner": memory, "scores": local["scores"], "shared": {"neurons": shared}}, upload
