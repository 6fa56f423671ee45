"""SpaFL: a trained threshold prunes each neuron, and only thresholds are sent (Kim et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpews import trees
from fedpews.methods.average import Average
from fedpews.methods.contract import ClientHalf, Cohort, Download, Method, Rate, Upload, Work
from fedpews.methods.fedavg import by_row, weight_names
from fedpews.neurons.network import Batch, Network
from fedpews.options import NotNegative
from fedpews.registry import register
from fedpews.trees import Nest, Tree

LOWEST = 0.01
"""The part of a layer's neurons at which all of its thresholds count as 0, so that the layer does not close."""


@register("method", "spafl")
@dataclass(frozen=True)
class SpaFL(Method, ClientHalf):
    """Every client trains weights of its own; a neuron (filter) is open where the mean of its |w| exceeds τ.

    A step moves the weights of open neurons down the gradient g at the masked weights, and τ down its own,
    −Σ_j g_j·w_j − α·e^−τ: straight through the mask, and towards fewer open neurons. τ starts at 0 and is averaged by
    the server. A client answers a change Δτ of the server's with w ← w − Δτ·sign(Σ_j w_j)/n, over the n weights of a
    neuron. All clients begin with the same weights. Biases and norm layers have no threshold. A client's model is its
    own masked one; the global model is the initial one under the common thresholds.

    The authors' program lets a gradient through the mask only where |mean|w| − τ| > 1, takes a filter's width × height
    for n, has momentum and clips gradients, and sends each round's Δτ to every client; here a client that was absent
    gets the sum with its next download.

    Args:
        sparsity: α, the weight of the term that raises thresholds; the authors use 0.0001 to 0.002.

    >>> SpaFL().personalised
    True
    """

    personalised = True

    sparsity: NotNegative = 0.002

    def init(self, net: Network, params: Tree, total: int) -> Nest:
        zeros = {_key(name): params[name].new_zeros(len(params[name])) for name in weight_names(net)}
        return {"params": params, "thresholds": zeros}

    def params(self, state: Nest) -> Tree:
        return masked(state["params"], state["thresholds"])

    def downloads(self, net: Network, state: Nest, cohort: Cohort) -> list[Download]:
        extra = {"thresholds": state["thresholds"]}
        return [Download(cohort.round, "train", cohort.total, {}, extra=extra)] * len(cohort.clients)

    def start(self, net: Network, download: Download, memory: Nest | None) -> Nest:
        params = net.initial() if memory is None else self.answered(download, memory)
        return {"params": params, "thresholds": download.extra["thresholds"]}

    def answered(self, download: Download, memory: Nest) -> Tree:
        """The client's weights after the server's change of the thresholds since its last download."""
        params: Tree = memory["params"]
        moved = dict(params)
        for name, w in params.items():
            if _key(name) in memory["common"]:
                change = download.extra["thresholds"][_key(name)] - memory["common"][_key(name)]
                step = change * w.flatten(1).sum(1).sign() / w[0].numel()
                moved[name] = w - by_row(step, w)
        return moved

    def step(self, net: Network, local: Nest, batch: Batch, noise: Tensor, lr: Rate) -> tuple[Nest, Tensor]:
        params, thresholds = local["params"], local["thresholds"]
        loss, grads, buffers = net.gradients(masked(params, thresholds), batch)
        opened, moved = opens(params, thresholds), {}
        for name, grad in grads.items():
            row = opened.get(_key(name))
            moved[name] = params[name] - lr * (grad if row is None else by_row(row, grad) * grad)
        raised = {}
        for name in weight_names(net):
            tau = thresholds[_key(name)]
            slope = -(grads[name] * params[name]).flatten(1).sum(1) - self.sparsity * torch.exp(-tau)
            raised[_key(name)] = tau - lr * slope
        return {"params": params | moved | buffers, "thresholds": thresholds | raised}, loss

    def finish(self, net: Network, download: Download, local: Nest, work: Work) -> tuple[Nest, Upload]:
        upload = work.upload(download, {}).adding({"thresholds": local["thresholds"]})
        return local | {"common": download.extra["thresholds"]}, upload

    def personal(self, net: Network, download: Download, memory: Nest) -> Tree:
        return trees.pick(masked(self.answered(download, memory), memory["thresholds"]), net.names)

    def update(self, net: Network, state: Nest, uploads: Sequence[Upload], average: Average) -> Nest:
        sent = [upload.extra["thresholds"] for upload in uploads]
        return state | {"thresholds": average(sent, state["thresholds"])}


def _key(name: str) -> str:
    # not the parameter's own name, which stands for a tensor of its shape
    return f"{name}:rows"


def opens(params: Mapping[str, Tensor], thresholds: Mapping[str, Tensor]) -> Tree:
    """Which neurons of each layer are open, 1 or 0."""
    opened = {}
    for name, w in params.items():
        if _key(name) in thresholds:
            mean = w.abs().flatten(1).mean(1)
            row = (mean > thresholds[_key(name)]).to(w)
            opened[_key(name)] = torch.where(row.mean() <= LOWEST, (mean > 0).to(w), row)
    return opened


def masked(params: Mapping[str, Tensor], thresholds: Mapping[str, Tensor]) -> Tree:
    """The weights of open neurons, and zeros for the others."""
    rows = opens(params, thresholds)
    return {n: v * by_row(rows[_key(n)], v) if _key(n) in rows else v for n, v in params.items()}
